"""Systems side by side: the same prompts, the same device memory, in turn, with intervals and a token-by-token check."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd
import torch
from tqdm.auto import tqdm

from specter_lab.baselines import RIVALS, named
from specter_lab.generation import Generation
from specter_lab.headroom import Lanes, shares_of_bounds
from specter_lab.intervals import LEAST_PROMPTS, Interval, Resampled
from specter_lab.memory import BudgetError
from specter_lab.pieces import Machine
from specter_lab.pipeline import Pipeline
from specter_lab.records import Conditions
from specter_lab.replay import ReplayTarget
from specter_lab.rows import looks_ahead, row_of


@dataclass(frozen=True)
class Comparison:
    """Rows of figures, one a system, over the same prompts, with the runs they come from.

    ``unfit``: systems that were left out since the budget doesn't hold them, and the bytes that they lack.

    >>> import specter_lab as sl
    >>> sl.compare(["on_demand"], ["Once"], target="tiny-moe", machine=sl.SimulatedMachine(), max_new_tokens=3)
    Comparison(simulated, on_demand)
    """

    machine: str
    identical_tokens: bool
    rows: tuple[dict[str, Any], ...]
    conditions: Conditions
    generations: Mapping[str, Sequence[Generation]]
    unfit: Mapping[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """What the command line prints as JSON."""
        return {
            "machine": self.machine,
            "identical_tokens": self.identical_tokens,
            "conditions": dict(self.conditions.values),
            "rows": [dict(row) for row in self.rows],
            "bytes_short": dict(self.unfit),
        }

    @cached_property
    def table(self) -> pd.DataFrame:
        """The rows, flat, indexed by system; the speed-ups against each system are in ``speedups``."""
        return pd.json_normalize([{k: v for k, v in row.items() if k != "speedups"} for row in self.rows]).set_index("system")

    @cached_property
    def speedups(self) -> pd.DataFrame:
        """[system x baseline] mean TPOT of the baseline / that of the system: above 1 the system is faster."""
        ratios = {row["system"]: {name: cell["mean"] for name, cell in row["speedups"].items()} for row in self.rows}
        return pd.DataFrame(ratios, dtype=float).T.rename_axis(index="system", columns="baseline")

    def speedup(self, system: str, baseline: str, confidence: float = 0.95) -> Interval:
        """Mean TPOT of ``baseline`` over that of ``system``, with the bounds of its interval over prompts."""
        return Resampled({name: _tpots(self.generations[name]) for name in (system, baseline)}, confidence).ratio(baseline, system)

    def __repr__(self) -> str:
        return f"Comparison({self.machine}, {', '.join(row['system'] for row in self.rows)})"

    def _repr_html_(self) -> str:
        plain = self.table.drop(columns=[c for c in self.table if isinstance(self.table[c].iloc[0], list | dict)])
        return plain.T.to_html(escape=True, float_format=lambda value: f"{value:.3g}") + self.conditions._repr_html_()


def compare(
    systems: Sequence[str | Pipeline] | Mapping[str, Pipeline],
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
    skip_unfit: bool = False,
    **options: Any,
) -> Comparison:
    """Run every prompt through every system, in turn (A B C, A B C, ...), each from empty slots, or, for a pipeline made with
    ``warm=True``, from the slots that its last prompt left; ``start`` of its row says which.

    ``systems``: names of ``baselines`` (then ``target``, ``machine`` and ``memory`` say what they are built with, and
    ``system_options`` what one of them needs besides), pipelines, or pipelines by name. ``references``: for each prompt
    the new token ids that every system must give (the first system's, if not given). ``confidence``: of the intervals
    over prompts; by default 0.95, or none below three prompts. ``options`` go to ``generate``. For a ``ReplayTarget``
    prompts are texts, with ``max_new_tokens`` and ``prompt_tokens`` (the text's own or 16, if not given).

    Each row is what ``row_of`` gives, its shares of the bounds (``shares_of_bounds``), and its speed-ups, ratios of mean TPOT with
    intervals: ``speedup`` over the fastest system that doesn't look ahead (``looks_ahead``), ``speedup_vs_fastest_rival`` over the
    fastest of ``rivals`` (by default ``baselines.RIVALS``, or all if none of those takes part) with its interval in ``ci95``,
    and ``speedups`` over each.

    Raises ``ValueError`` for unequal memory, and ``BudgetError`` with the bytes that each system lacks; ``skip_unfit`` leaves
    those systems out, as long as one fits.

    >>> import specter_lab as sl
    >>> sl.compare(["on_demand"], ["Once"], target="tiny-moe", machine=sl.SimulatedMachine(), max_new_tokens=3).identical_tokens
    True
    """
    if not systems or not prompts:
        raise ValueError(f"A comparison needs systems and prompts; got {len(systems)} and {len(prompts)}. Give at least one of each.")
    if confidence is None and len(prompts) >= LEAST_PROMPTS:
        confidence = 0.95
    Resampled({"prompts": [0.0] * len(prompts)}, confidence)  # refuses an interval over too few before anything runs
    shared = {"target": target, "machine": machine, "memory": memory, "context_length": context_length}
    with ExitStack() as stack:
        pipelines, unfit = _assemble(systems, shared, system_options or {}, stack, skip_unfit)
        _refuse_unequal(pipelines)
        runs: dict[str, list[Generation]] = {name: [] for name in pipelines}
        with tqdm(total=len(prompts) * len(pipelines), disable=not progress, unit="run") as bar:
            for prompt in prompts:
                for name, pipeline in pipelines.items():
                    bar.set_description(name)
                    if not pipeline.warm:
                        pipeline.reset()
                    if isinstance(pipeline.target, ReplayTarget):
                        given = prompt_tokens or int(getattr(prompt, "prompt_tokens", 16))
                        runs[name].append(pipeline.replay(prompt, prompt_tokens=given, **options))
                    else:
                        runs[name].append(pipeline.generate(prompt, **options))
                    bar.update()
        label = next(iter(pipelines.values())).machine.label
        lanes = {name: Lanes.of(pipeline) for name, pipeline in pipelines.items()}
    expected = [tuple(r) for r in references] if references is not None else [g.new_ids for g in next(iter(runs.values()))]
    identical = all(g.new_ids == e for done in runs.values() for g, e in zip(done, expected, strict=True))
    shares, speeds = shares_of_bounds(runs, lanes), _speedups(runs, rivals, confidence)
    rows = tuple({**row_of(name, done), **shares[name], **speeds[name]} for name, done in runs.items())
    return Comparison(label, identical, rows, _conditions(runs), runs, unfit)


def _assemble(
    systems: Sequence[str | Pipeline] | Mapping[str, Pipeline],
    shared: Mapping[str, Any],
    own: Mapping[str, Mapping[str, Any]],
    stack: ExitStack,
    skip_unfit: bool,
) -> tuple[Mapping[str, Pipeline], dict[str, int]]:
    """Pipelines by name, those that are built here closed with ``stack``, and the bytes that others lack."""
    if isinstance(systems, Mapping):
        return systems, {}
    pipelines: dict[str, Pipeline] = {}
    unfit: dict[str, BudgetError] = {}
    for number, system in enumerate(systems, start=1):
        if isinstance(system, Pipeline):
            pipelines[f"pipeline {number}"] = system
            continue
        try:
            pipelines[system] = stack.enter_context(named(system)(**{**shared, **own.get(system, {})}))
        except BudgetError as error:
            unfit[system] = error
    if unfit and not (skip_unfit and pipelines):
        budget = next(iter(unfit.values())).budget
        raise BudgetError(
            f"All systems get the same {budget:,} bytes; "
            + "; ".join(f"{name} lacks {error.short:,} ({error})" for name, error in unfit.items()),
            smallest=max(error.smallest for error in unfit.values()),
            budget=budget,
        )
    return pipelines, {name: error.short for name, error in unfit.items()}


def _refuse_unequal(pipelines: Mapping[str, Pipeline]) -> None:
    totals = {name: pipeline.plan.device.total for name, pipeline in pipelines.items()}
    budgets = {pipeline.plan.budget for pipeline in pipelines.values()}
    if len(budgets) > 1 or (budgets == {None} and len(set(totals.values())) > 1):
        raise ValueError(
            f"Systems are compared at equal device memory; these take {', '.join(f'{n}: {t:,}' for n, t in totals.items())} bytes. "
            "Build all of them with the same memory=..."
        )


def _tpots(runs: Sequence[Generation]) -> list[float]:
    return [run.metrics["tpot_ms"] for run in runs]


def _speedups(
    runs: Mapping[str, Sequence[Generation]], rivals: Collection[str] | None, confidence: float | None
) -> dict[str, dict[str, Any]]:
    """The speed-ups of each system, None where a run has no second token."""
    timed = all(tpot is not None for done in runs.values() for tpot in _tpots(done))
    tpots = {name: _tpots(done) if timed else [0.0] * len(done) for name, done in runs.items()}
    drawn = Resampled(tpots, confidence)
    blind = [name for name, done in runs.items() if not any(looks_ahead(run.trace) for run in done)]
    wanted = RIVALS if rivals is None else rivals
    contenders = [name for name in runs if name in wanted] or (list(runs) if rivals is None else [])

    def fastest(names: Sequence[str]) -> str | None:
        return min(names, key=lambda name: drawn.mean(name).value) if timed and names else None

    def over(name: str | None, system: str) -> Interval | None:
        return drawn.ratio(name, system) if timed and name is not None else None

    rows = {}
    for system in runs:
        plain, rival = over(fastest(blind), system), over(fastest(contenders), system)
        each = {name: over(name, system) for name in runs}
        rows[system] = {
            "tpot_ms_ci95": drawn.mean(system).bounds if timed else None,
            "speedup": plain and plain.value,
            "speedup_ci95": plain and plain.bounds,
            "fastest_rival": fastest(contenders),
            "speedup_vs_fastest_rival": rival and rival.value,
            "ci95": rival and rival.bounds,
            "speedups": {name: {"mean": cell and cell.value, "ci95": cell and cell.bounds} for name, cell in each.items()},
        }
    return rows


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
