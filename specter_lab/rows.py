"""One system's figures over all prompts: a row of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from specter_lab.generation import Generation
from specter_lab.observe.metrics import acceptance_by_position, prediction_scores
from specter_lab.observe.trace import Trace

SPEED = ("tokens_per_step", "acceptance_rate")
EXPERTS = ("hit_rate", "late_rate", "miss_rate", "host_rate", "recall", "recall_accepted", "precision", "on_time")
LINK = (
    "moved_mb_per_token", "wasted_mb_per_token", "exposed_ms_per_token", "transfer_ms_per_token", "overlap", "link_utilisation",
    "draft_ms_per_token", "target_ms_per_token",
)  # fmt: skip


def row_of(system: str, runs: Sequence[Generation]) -> dict[str, Any]:
    """Means over the runs (of TTFT the median), None for what doesn't apply; times in ms, bytes in MB of 10^6.

    Lists "by position" and "by horizon" begin with the token at hand. Horizons are None where nothing was predicted for
    a position: a plan for a whole window has none.

    >>> import specter_lab as sl
    >>> with sl.Pipeline("tiny-moe", machine=sl.SimulatedMachine()) as p: row_of("mine", [p.generate("Once", max_new_tokens=3)])["prompts"]
    1
    """
    figures = pd.DataFrame([run.metrics for run in runs]).astype(float)
    tpot = figures["tpot_ms"].dropna()
    means = {str(name): None if np.isnan(value) else float(value) for name, value in figures.mean().items()}
    times = {part: means[f"{name}_ms_per_token"] or 0.0 for part, name in (("draft", "draft"), ("verify", "target"), ("stall", "exposed"))}
    total = sum(times.values())
    return {
        "system": system,
        "prompts": len(runs),
        "start": runs[0].conditions["start"],
        "ttft_ms": float(figures["ttft_ms"].median()),
        "tpot_ms": {"mean": float(tpot.mean()), "median": float(tpot.median()), "p95": float(tpot.quantile(0.95))}
        if len(tpot)
        else dict.fromkeys(("mean", "median", "p95")),
        **{name: means[name] for name in SPEED},
        "acceptance_by_position": acceptance_by_position([run.trace for run in runs]),
        **{name: means[name] for name in EXPERTS},
        **_by_horizon(runs),
        **{name: means[name] for name in LINK},
        **{f"{part}_share": ms / total if total else None for part, ms in times.items()},
        "device_bytes": runs[0].device.as_dict(),
    }


def _by_horizon(runs: Sequence[Generation]) -> dict[str, list[float | None] | None]:
    tables = [prediction_scores(run.trace, by="horizon") for run in runs]
    scores = pd.concat(tables).groupby(level=0).mean() if sum(table["predicted"].sum() for table in tables) else None
    return {
        f"{name}_by_horizon": None if scores is None else [None if np.isnan(value) else float(value) for value in scores[name]]
        for name in ("recall", "precision", "on_time")
    }


def looks_ahead(trace: Trace) -> bool:
    """Whether anything was predicted for a token of a pass before that pass began, as a draft's routing is.

    >>> import specter_lab as sl
    >>> with sl.Pipeline("tiny-moe", machine=sl.SimulatedMachine()) as p: looks_ahead(p.generate("Once", max_new_tokens=3).trace)
    False
    """
    passes = trace.of_kind("attention")
    begins = passes[passes["lane"] == "target"].groupby("step")["start_us"].min()
    predicted = trace.of_kind("predict")
    return bool((predicted["start_us"] <= predicted["step"].map(begins).fillna(np.inf)).any())
