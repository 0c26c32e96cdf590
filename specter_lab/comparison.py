"""Systems side by side: the same prompts, the same device memory, in turn, with intervals and a token-by-token check."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import bootstrap
from tqdm.auto import tqdm

from specter_lab.baselines import DRAFTLESS, named
from specter_lab.generation import Generation
from specter_lab.observe.metrics import acceptance_by_position, prediction_scores
from specter_lab.pieces import Machine
from specter_lab.pipeline import Pipeline
from specter_lab.records import Conditions
from specter_lab.replay import ReplayTarget

MEANS = (
    "tokens_per_step", "acceptance_rate", "hit_rate", "late_rate", "miss_rate", "host_rate", "recall", "precision", "on_time",
    "moved_mb_per_token", "wasted_mb_per_token", "exposed_ms_per_token", "transfer_ms_per_token", "overlap", "link_utilisation",
    "draft_ms_per_token", "target_ms_per_token",
)  # fmt: skip
LEAST_PROMPTS = 3


@dataclass(frozen=True)
class Comparison:
    """Rows of figures, one a system, over the same prompts, with the runs they come from.

    >>> import specter_lab as sl
    >>> sl.compare(["on_demand"], ["Once"], target="tiny-moe", machine=sl.SimulatedMachine(), max_new_tokens=3)
    Comparison(simulated, on_demand)
    """

    machine: str
    identical_tokens: bool
    rows: tuple[dict[str, Any], ...]
    conditions: Conditions
    generations: Mapping[str, Sequence[Generation]]

    def as_dict(self) -> dict[str, Any]:
        """What the command line prints as JSON."""
        return {
            "machine": self.machine,
            "identical_tokens": self.identical_tokens,
            "conditions": dict(self.conditions.values),
            "rows": [dict(row) for row in self.rows],
        }

    @cached_property
    def table(self) -> pd.DataFrame:
        """The rows, flat, indexed by system."""
        return pd.json_normalize([dict(row) for row in self.rows]).set_index("system")

    def speedup(self, system: str, baseline: str, confidence: float = 0.95) -> tuple[float, float, float]:
        """Mean TPOT of ``baseline`` over that of ``system``, with the bounds of its interval over prompts (paired bootstrap)."""
        return _speedup(_tpots(self.generations[baseline]), _tpots(self.generations[system]), confidence)

    def __repr__(self) -> str:
        return f"Comparison({self.machine}, {', '.join(row['system'] for row in self.rows)})"

    def _repr_html_(self) -> str:
        plain = self.table.drop(columns=[c for c in self.table if isinstance(self.table[c].iloc[0], list | dict)])
        return plain.T.to_html(escape=True, float_format=lambda value: f"{value:.3g}") + self.conditions._repr_html_()


def compare(
    systems: Sequence[str] | Mapping[str, Pipeline],
    prompts: Sequence[Any],
    *,
    target: Any = None,
    machine: Machine | None = None,
    memory: int | str | None = None,
    rivals: Collection[str] | None = None,
    references: Sequence[Sequence[int]] | None = None,
    confidence: float | None = None,
    progress: bool = False,
    prompt_tokens: int | None = None,
    system_options: Mapping[str, Mapping[str, Any]] | None = None,
    context_length: int | None = None,
    **options: Any,
) -> Comparison:
    """Run every prompt through every system, in turn (A B C, A B C, ...), each from empty slots.

    ``systems``: names of ``baselines`` (then ``target``, ``machine`` and ``memory`` say what they are built with, and
    ``system_options`` what one of them needs besides), or pipelines by name. ``references``: for each prompt the new
    token ids that every system must give (the first system's, if not given). ``rivals``: whose fastest ``speedup`` is
    measured against (all, if not given). ``confidence``: of the intervals over prompts, for instance 0.95.
    ``options`` go to ``generate``. For a ``ReplayTarget`` prompts are texts, with ``prompt_tokens`` and ``max_new_tokens``.

    >>> import specter_lab as sl
    >>> sl.compare(["on_demand"], ["Once"], target="tiny-moe", machine=sl.SimulatedMachine(), max_new_tokens=3).identical_tokens
    True
    """
    if not systems or not prompts:
        raise ValueError(f"A comparison needs systems and prompts; got {len(systems)} and {len(prompts)}. Give at least one of each.")
    if confidence is not None and len(prompts) < LEAST_PROMPTS:
        raise ValueError(f"An interval over prompts needs at least {LEAST_PROMPTS}; got {len(prompts)}. Give more, or confidence=None.")
    with ExitStack() as stack:
        pipelines = systems if isinstance(systems, Mapping) else {}
        if not isinstance(systems, Mapping):
            shared = {"machine": machine, "memory": memory, "context_length": context_length}
            pipelines = {n: stack.enter_context(named(n)(target, **shared, **(system_options or {}).get(n, {}))) for n in systems}
        _refuse_unequal(pipelines)
        runs: dict[str, list[Generation]] = {name: [] for name in pipelines}
        with tqdm(total=len(prompts) * len(pipelines), disable=not progress, unit="run") as bar:
            for prompt in prompts:
                for name, pipeline in pipelines.items():
                    bar.set_description(name)
                    pipeline.reset()
                    if isinstance(pipeline.target, ReplayTarget):
                        runs[name].append(pipeline.replay(prompt, prompt_tokens=prompt_tokens or 16, **options))
                    else:
                        runs[name].append(pipeline.generate(prompt, **options))
                    bar.update()
        label = next(iter(pipelines.values())).machine.label
    expected = [tuple(r) for r in references] if references is not None else [g.new_ids for g in next(iter(runs.values()))]
    identical = all(g.new_ids == e for done in runs.values() for g, e in zip(done, expected, strict=True))
    rows = [_row(name, done) for name, done in runs.items()]
    _add_speedups(rows, runs, rivals, confidence)
    return Comparison(label, identical, tuple(rows), _conditions(runs), runs)


def _refuse_unequal(pipelines: Mapping[str, Pipeline]) -> None:
    totals = {name: pipeline.plan.device.total for name, pipeline in pipelines.items()}
    budgets = {pipeline.plan.budget for pipeline in pipelines.values()}
    if len(budgets) > 1 or (budgets == {None} and len(set(totals.values())) > 1):
        raise ValueError(
            f"Systems are compared at equal device memory; these take {', '.join(f'{n}: {t:,}' for n, t in totals.items())} bytes. "
            "Build all of them with the same memory=..."
        )


def _tpots(runs: Sequence[Generation]) -> np.ndarray:
    return np.array([run.metrics["tpot_ms"] for run in runs], dtype=float)


def _speedup(baseline: np.ndarray, system: np.ndarray, confidence: float) -> tuple[float, float, float]:
    def ratio(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
        return a.mean(axis=axis) / b.mean(axis=axis)

    value = float(ratio(baseline, system))
    if np.array_equal(baseline, system):
        return value, value, value
    rng = np.random.default_rng(0)
    interval = bootstrap(
        (baseline, system), ratio, paired=True, vectorized=True, n_resamples=2000, confidence_level=confidence, method="percentile", rng=rng
    ).confidence_interval
    return value, float(interval.low), float(interval.high)


def _add_speedups(
    rows: list[dict[str, Any]], runs: Mapping[str, Sequence[Generation]], rivals: Collection[str] | None, confidence: float | None
) -> None:
    timed = {row["system"]: row["tpot_ms"]["mean"] for row in rows if row["tpot_ms"]["mean"] is not None}
    contenders = {name: tpot for name, tpot in timed.items() if rivals is None or name in rivals}
    fastest = min(contenders, key=lambda name: contenders[name]) if contenders else None
    for row in rows:
        row["fastest_rival"] = fastest
        row["speedup"] = row["speedup_vs_fastest_rival"] = (
            timed[fastest] / timed[row["system"]] if fastest and row["system"] in timed else None
        )
        row["ci95"] = None
        if fastest and confidence is not None and row["system"] in timed:
            row["ci95"] = list(_speedup(_tpots(runs[fastest]), _tpots(runs[row["system"]]), confidence)[1:])


def _row(name: str, runs: Sequence[Generation]) -> dict[str, Any]:
    figures = pd.DataFrame([run.metrics for run in runs]).astype(float)
    tpot = figures["tpot_ms"].dropna()

    def mean(column: str) -> float | None:
        value = figures[column].mean()
        return None if np.isnan(value) else float(value)

    times = figures[["draft_ms_per_token", "target_ms_per_token", "exposed_ms_per_token"]].mean()
    total = times.sum()
    horizons = pd.concat([prediction_scores(run.trace, by="horizon") for run in runs]).groupby(level=0).mean()
    return {
        "system": name,
        "ttft_ms": float(figures["ttft_ms"].median()),
        "tpot_ms": {"mean": float(tpot.mean()), "median": float(tpot.median()), "p95": float(tpot.quantile(0.95))}
        if len(tpot)
        else dict.fromkeys(("mean", "median", "p95")),
        **{column: mean(column) for column in MEANS},
        "draft_share": float(times.iloc[0] / total) if total else None,
        "verify_share": float(times.iloc[1] / total) if total else None,
        "stall_share": float(times.iloc[2] / total) if total else None,
        "acceptance_by_position": acceptance_by_position([run.trace for run in runs]),
        "recall_by_horizon": [] if name in DRAFTLESS else [None if np.isnan(v) else float(v) for v in horizons["recall"]],
        "device_bytes": runs[0].device.as_dict(),
    }


def _conditions(runs: Mapping[str, Sequence[Generation]]) -> Conditions:
    """What all runs share, and for what they don't, the values by system."""
    cards = {name: done[0].conditions.values for name, done in runs.items()}
    shared: dict[str, Any] = {}
    for key in next(iter(cards.values())):
        values = {name: card[key] for name, card in cards.items()}
        first = next(iter(values.values()))
        shared[key] = first if all(v == first for v in values.values()) else values
    tokens = [g.conditions["prompt_tokens"] for g in next(iter(runs.values()))]
    shared["prompts"] = len(tokens)
    shared["prompt_tokens"] = tokens[0] if len(set(tokens)) == 1 else {"min": min(tokens), "max": max(tokens)}
    shared["concurrency"] = 1
    shared["threads"] = torch.get_num_threads()
    return Conditions(shared)
