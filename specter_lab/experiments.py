"""Experiments: tables over pipelines and prompts. Functions return; notebooks show."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from specter_lab.generation import Generation
from specter_lab.pipeline import Pipeline
from specter_lab.records import Conditions

MEANS = (
    "tokens_per_step", "acceptance_rate", "hit_rate", "late_rate", "miss_rate", "recall", "precision", "on_time", "moved_mb_per_token",
    "wasted_mb_per_token", "exposed_ms_per_token", "transfer_ms_per_token", "overlap", "link_utilisation", "draft_ms_per_token",
    "target_ms_per_token",
)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Rows of figures, one a system, over the same prompts, with the runs they come from.

    >>> import specter_lab as sl
    >>> moe = sl.load_moe("tiny-moe", dtype="float32")
    >>> with sl.baselines.on_demand(moe, machine=sl.SimulatedMachine()) as p:
    ...     sl.compare({"on_demand": p}, ["Once"], max_new_tokens=3)
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

    @property
    def table(self) -> pd.DataFrame:
        """The rows, flat, indexed by system."""
        return pd.json_normalize([dict(row) for row in self.rows]).set_index("system")

    def __repr__(self) -> str:
        return f"Comparison({self.machine}, {', '.join(row['system'] for row in self.rows)})"

    def _repr_html_(self) -> str:
        return self.table.T.to_html(escape=True, float_format=lambda value: f"{value:.3g}") + self.conditions._repr_html_()


def compare(
    pipelines: Mapping[str, Pipeline],
    prompts: Sequence[Any],
    *,
    references: Sequence[Sequence[int]] | None = None,
    rivals: Collection[str] | None = None,
    progress: bool = False,
    **options: Any,
) -> Comparison:
    """Run every prompt through every pipeline, in turn (A B C, A B C, ...), each from empty slots.

    ``references``: for each prompt the new token ids that every pipeline must give (the first pipeline's, if not given).
    ``speedup`` is the fastest of ``rivals``' mean TPOT (of all, if not given) over the row's. ``options`` go to ``generate``.

    >>> import specter_lab as sl
    >>> with sl.baselines.on_demand(sl.load_moe("tiny-moe"), machine=sl.SimulatedMachine()) as p:
    ...     sl.compare({"on_demand": p}, ["Once"], max_new_tokens=3).identical_tokens
    True
    """
    if not pipelines or not prompts:
        raise ValueError(f"A comparison needs pipelines and prompts; got {len(pipelines)} and {len(prompts)}. Give at least one of each.")
    totals = {name: pipeline.plan.device.total for name, pipeline in pipelines.items()}
    budgets = {pipeline.plan.budget for pipeline in pipelines.values()}
    if len(budgets) > 1 or (budgets == {None} and len(set(totals.values())) > 1):
        raise ValueError(
            f"Systems are compared at equal device memory; these take {', '.join(f'{n}: {t:,}' for n, t in totals.items())} bytes. "
            "Build all of them with the same memory=..."
        )
    runs: dict[str, list[Generation]] = {name: [] for name in pipelines}
    with tqdm(total=len(prompts) * len(pipelines), disable=not progress, unit="run") as bar:
        for prompt in prompts:
            for name, pipeline in pipelines.items():
                bar.set_description(name)
                pipeline.reset()
                runs[name].append(pipeline.generate(prompt, **options))
                bar.update()
    expected = [tuple(r) for r in references] if references is not None else [g.new_ids for g in next(iter(runs.values()))]
    identical = all(g.new_ids == e for done in runs.values() for g, e in zip(done, expected, strict=True))
    rows = [_row(name, done) for name, done in runs.items()]
    best = min(row["tpot_ms"]["mean"] for row in rows if rivals is None or row["system"] in rivals)
    for row in rows:
        row["speedup"] = best / row["tpot_ms"]["mean"] if best is not None and row["tpot_ms"]["mean"] else None
    return Comparison(next(iter(pipelines.values())).machine.label, identical, tuple(rows), _conditions(pipelines, runs, options), runs)


def _row(name: str, runs: Sequence[Generation]) -> dict[str, Any]:
    figures = pd.DataFrame([run.metrics for run in runs]).astype(float)
    tpot = figures["tpot_ms"].dropna()

    def mean(column: str) -> float | None:
        value = figures[column].mean()
        return None if np.isnan(value) else float(value)

    return {
        "system": name,
        "ttft_ms": float(figures["ttft_ms"].median()),
        "tpot_ms": {"mean": float(tpot.mean()), "median": float(tpot.median()), "p95": float(tpot.quantile(0.95))}
        if len(tpot)
        else dict.fromkeys(("mean", "median", "p95")),
        **{column: mean(column) for column in MEANS},
        "device_bytes": runs[0].device.as_dict(),
    }


def _conditions(pipelines: Mapping[str, Pipeline], runs: Mapping[str, Sequence[Generation]], options: Mapping[str, Any]) -> Conditions:
    """What all runs share, and for what they don't, the values by system."""
    cards = {name: done[0].conditions.values for name, done in runs.items()}
    lengths = {name: [g.conditions.values for g in done] for name, done in runs.items()}
    shared: dict[str, Any] = {}
    for key in next(iter(cards.values())):
        values = {name: card[key] for name, card in cards.items()}
        first = next(iter(values.values()))
        shared[key] = first if all(v == first for v in values.values()) else values
    tokens = [card["prompt_tokens"] for card in next(iter(lengths.values()))]
    shared["prompts"] = len(tokens)
    shared["prompt_tokens"] = tokens[0] if len(set(tokens)) == 1 else {"min": min(tokens), "max": max(tokens)}
    shared["concurrency"] = 1
    shared["threads"] = torch.get_num_threads()
    return Conditions(shared)
