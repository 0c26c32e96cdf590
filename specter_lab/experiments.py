"""The measurement families of Specter's artifact, each one call that returns a table and its figure.

Every function takes the name of a system (or several), prompts and what ``compare`` takes (``target``, ``machine``,
``memory``, ...), and works on the throttled and the simulated machine alike. Functions return; notebooks show.

>>> import specter_lab as sl
>>> sl.experiments.ABLATIONS["barrier"][0]
{'barrier': False}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import pandas as pd
import plotly.graph_objects as go

from specter_lab.baselines import named
from specter_lab.comparison import Comparison, compare
from specter_lab.offload.eviction import LRU
from specter_lab.pieces import Machine
from specter_lab.pipeline import Pipeline
from specter_lab.plots.sweeps import plot_column
from specter_lab.routing.predictors import NoPrediction
from specter_lab.speculate.drafters import PromptLookupDrafter


class Experiment(NamedTuple):
    """A table and the figure of its main column.

    >>> Experiment(pd.DataFrame({"a": [1]}), go.Figure()).table.shape
    (1, 1)
    """

    table: pd.DataFrame
    figure: go.Figure


def sweep(builds: Mapping[Any, Callable[[], Pipeline]], prompts: Sequence[Any], *, by: str, **options: Any) -> Experiment:
    """Compare what each of ``builds`` makes, keyed by the swept value; ``by`` names it. ``options`` go to ``compare``.

    >>> import specter_lab as sl
    >>> moe, machine = sl.load_moe("tiny-moe"), sl.SimulatedMachine()
    >>> builds = {n: lambda n=n: sl.Pipeline(moe, machine=machine, slots=6) for n in (1, 2)}
    >>> sl.experiments.sweep(builds, ["Once"], by="copy", max_new_tokens=3).table.index.tolist()
    [1, 2]
    """
    with ExitStack() as stack:
        pipelines = {str(value): stack.enter_context(build()) for value, build in builds.items()}
        table = compare(pipelines, prompts, **options).table
    table.index = pd.Index(list(builds), name=by)
    return Experiment(table, plot_column(table, title=f"time per output token by {by}"))


def _variants(
    name: str, target: Any, machine: Machine, memory: int | str, pieces: Mapping[Any, Mapping[str, Any]], **shared: Any
) -> dict[Any, Any]:
    def build(changes: Mapping[str, Any]) -> Callable[[], Pipeline]:
        return lambda: named(name)(target, machine=machine, memory=memory, **{**shared, **changes})

    return {value: build(changes) for value, changes in pieces.items()}


def draft_depth(
    system: str, prompts: Sequence[Any], *, target: Any, machine: Machine, memory: int | str, lengths: Sequence[int] = (2, 4, 8, 16),
    context_length: int | None = None, **options: Any,
) -> Experiment:  # fmt: skip
    """Time per output token by fixed draft length.

    >>> import specter_lab as sl
    >>> kw = dict(target=sl.load_moe("tiny-moe"), machine=sl.SimulatedMachine(), memory="12MB")
    >>> sl.experiments.draft_depth("lookahead", ["Once"], lengths=(1, 2), max_new_tokens=4, **kw).table.index.name
    'draft_length'
    """
    pieces = {n: {"draft_length": n} for n in lengths}
    return sweep(_variants(system, target, machine, memory, pieces, context_length=context_length), prompts, by="draft_length", **options)


def cache_policies(
    prompts: Sequence[Any], *, target: Any, machine: Machine, memory: int | str, context_length: int | None = None, **options: Any
) -> Experiment:
    """Specter with its adaptive chunks, without prefetch, and with one early or late plan, at the same slots.

    >>> import specter_lab as sl
    >>> kw = dict(target=sl.load_moe("tiny-moe"), machine=sl.SimulatedMachine(), memory="12MB")
    >>> sl.experiments.cache_policies(["Once"], max_new_tokens=4, **kw).table.index.tolist()
    ['adaptive', 'none', 'early', 'late']
    """
    pieces = {s: {"schedule": s} for s in ("adaptive", "none", "early", "late")}
    return sweep(_variants("specter", target, machine, memory, pieces, context_length=context_length), prompts, by="schedule", **options)


def memory_sweep(
    system: str, prompts: Sequence[Any], *, target: Any, machine: Machine, budgets: Sequence[int | str], context_length: int | None = None,
    **options: Any,
) -> Experiment:  # fmt: skip
    """One system at several budgets.

    >>> import specter_lab as sl
    >>> kw = dict(target=sl.load_moe("tiny-moe"), machine=sl.SimulatedMachine(), budgets=("8MB", "12MB"))
    >>> sl.experiments.memory_sweep("on_demand", ["Once"], max_new_tokens=4, **kw).table["hit_rate"].is_monotonic_increasing
    True
    """
    tables = [
        compare([system], prompts, target=target, machine=machine, memory=budget, context_length=context_length, **options).table
        for budget in budgets
    ]
    table = pd.concat(tables).set_axis(pd.Index(list(budgets), name="memory"))
    return Experiment(table, plot_column(table, title=f"{system} by device memory"))


def sensitivity(
    systems: Sequence[str],
    groups: Mapping[str, Sequence[Any]],
    *,
    variations: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> Experiment:
    """Systems over groups of prompts (kinds of text, input lengths) and variations of the request (temperatures, lengths).

    ``groups``: name -> prompts; ``variations``: name -> options of ``generate`` (greedy alone, if not given).

    >>> import specter_lab as sl
    >>> kw = dict(target=sl.load_moe("tiny-moe"), machine=sl.SimulatedMachine(), memory="12MB", max_new_tokens=4)
    >>> sl.experiments.sensitivity(["on_demand"], {"short": ["Once"], "long": ["Once upon a time"]}, **kw).table.shape[0]
    2
    """
    tables = {}
    for group, prompts in groups.items():
        for variation, changes in (variations or {"greedy": {"do_sample": False}}).items():
            tables[group, variation] = compare(systems, prompts, **{**options, **changes}).table
    table = pd.concat(tables, names=["group", "variation"])
    flat = table.set_axis([" ".join(map(str, key)) for key in table.index])
    return Experiment(table, plot_column(flat, title="time per output token"))


ABLATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # mechanism: (what replaces it in the whole system, what puts it alone on top of on_demand)
    "speculation": ({"drafter": None, "predictor": None, "draft_length": 0, "barrier": False}, {"drafter": ..., "draft_length": ...}),
    "quantization": ({"drafter": PromptLookupDrafter(), "predictor": None, "barrier": False}, {}),
    "lookahead": ({"predictor": NoPrediction(), "barrier": False}, {"drafter": ..., "draft_length": ..., "predictor": ...}),
    "prefetch timing": ({"schedule": "late"}, {}),
    "eviction": ({"eviction": LRU()}, {"eviction": ...}),
    "barrier": ({"barrier": False}, {}),
}


def ablate(system: str, prompts: Sequence[Any], *, target: Any, machine: Machine, memory: int | str, **options: Any) -> Experiment:
    """Each mechanism of a system removed, and each alone on top of ``on_demand``, at the same memory.

    ``share``: of the whole system's gain in mean TPOT over ``on_demand``, what is lost without the mechanism (removed)
    or reached with it alone. Memory that a mechanism needed goes to slots when it is removed. Quantization removed
    means drafting by prompt lookup: a full-precision draft wouldn't fit. Mechanisms that a system doesn't have are left out.

    >>> import specter_lab as sl
    >>> kw = dict(target=sl.load_moe("tiny-moe"), machine=sl.SimulatedMachine(), memory="12MB", max_new_tokens=6)
    >>> float(sl.ablate("specter", ["Once upon a time"], **kw).table.loc["whole", "share"])
    1.0
    """
    construct = {"target": target, "machine": machine, "memory": memory, "context_length": options.pop("context_length", None)}
    builds: dict[str, Callable[[], Pipeline]] = {
        "on_demand": lambda: named("on_demand")(**construct),
        "whole": lambda: named(system)(**construct),
    }
    with named(system)(**construct) as whole:
        has = {
            "speculation": whole.drafter is not None,
            "quantization": getattr(whole.drafter, "bank", None) is not None,
            "lookahead": not isinstance(whole.predictor, NoPrediction) or type(whole.predictor) is not NoPrediction,
            "prefetch timing": hasattr(whole.predictor, "schedule"),
            "eviction": type(whole.residency.eviction) is not LRU,
            "barrier": whole.assembly.barrier,
        }
    for mechanism, (replacement, alone) in ABLATIONS.items():
        if has[mechanism]:
            builds[f"without {mechanism}"] = lambda changes=replacement: named(system)(**construct, **changes)  # type: ignore[misc]
            if alone:
                builds[f"{mechanism} alone"] = lambda names=tuple(alone): _alone(system, names, construct)  # type: ignore[misc]
    table = sweep(builds, prompts, by="variant", **options).table
    tpot = table["tpot_ms.mean"]
    gain = tpot["on_demand"] - tpot["whole"]
    removed = table.index.str.startswith("without")
    table["share"] = ((tpot - tpot["whole"]).where(removed, tpot["on_demand"] - tpot) / gain) if gain else float("nan")
    return Experiment(table, plot_column(table, title=f"{system}: each mechanism removed and alone"))


def _alone(system: str, names: Sequence[str], construct: Mapping[str, Any]) -> Pipeline:
    """``on_demand`` with these pieces of the system."""
    donor = named(system)(**construct)
    pieces: dict[str, Any] = {
        "drafter": donor.drafter,
        "predictor": donor.predictor,
        "eviction": donor.residency.eviction,
        "draft_length": donor.draft_length,
    }
    donor.close()
    return Pipeline(**construct, **{name: pieces[name] for name in names})


def oracle_replay(
    build: Callable[[Any], Pipeline],
    predictor: Callable[[float], Any],
    prompt: Any,
    *,
    replaced: Sequence[float] = (0.0, 0.25, 0.5, 0.75),
    **options: Any,
) -> Experiment:
    """A system whose predictions are perfect but for a share of wrong identities.

    ``predictor(share)`` makes the predictor, ``build(predictor)`` the pipeline.

    >>> import specter_lab as sl
    >>> moe = sl.load_moe("tiny-moe")
    >>> build = lambda predictor: sl.Pipeline(moe, predictor=predictor, machine=sl.SimulatedMachine(), slots=6)
    >>> sl.experiments.oracle_replay(build, lambda share: None, "Once", replaced=(0.0,), max_new_tokens=3).table.index.name
    'replaced'
    """
    builds = {share: (lambda share=share: build(predictor(share))) for share in replaced}
    return sweep(builds, [prompt], by="replaced", **options)


def latency(comparison: Comparison) -> pd.DataFrame:
    """Where each system's decoding time goes: draft, verification and stalls in ms a token.

    >>> import specter_lab as sl
    >>> done = sl.compare(["on_demand"], ["Once"], target="tiny-moe", machine=sl.SimulatedMachine(), max_new_tokens=3)
    >>> sl.experiments.latency(done).columns.tolist()
    ['draft_ms_per_token', 'target_ms_per_token', 'exposed_ms_per_token', 'tpot_ms.mean']
    """
    return comparison.table[["draft_ms_per_token", "target_ms_per_token", "exposed_ms_per_token", "tpot_ms.mean"]]
