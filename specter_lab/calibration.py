"""Measure what compute costs on this very machine, so that the simulator can predict it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from specter_lab.baselines import on_demand, speculative_on_demand
from specter_lab.machines.simulated import CostTable, LaneCosts
from specter_lab.models import MoE
from specter_lab.observe.trace import Trace
from specter_lab.pieces import ExpertStore, Machine


def calibrate(
    machine: Machine, target: MoE, *, bank: ExpertStore | None = None, prompts: Sequence[Any] | None = None, max_new_tokens: int = 24
) -> CostTable:
    """Costs of target and draft compute, fitted to traces of two runs on ``machine``: on demand, and speculative.

    Each kind of segment gets a fixed part and a part for each row, by least squares over all of its segments (the
    slowest hundredth left out). The pipeline's own work between segments is charged with the attention of its layer.
    ``prompts``: what to run (two bundled ones by default: use others than those you predict).

    >>> import specter_lab as sl
    >>> costs = sl.calibrate(sl.SimulatedMachine(), sl.load_moe("tiny-moe"), max_new_tokens=4)
    >>> round(costs.target.attention_us)
    200
    """
    if prompts is None:
        from specter_lab.bundled import load_prompts

        prompts = [load_prompts("docs")[-1].text, load_prompts("prose")[-1].text]
    traces: list[Trace] = []
    target.lease()
    try:
        bank = bank or target.quantize("qint4")
        slots = [max(1, n // 2) for n in target.geometry.experts]
        with (
            on_demand(target, machine=machine, slots=slots) as plain,
            speculative_on_demand(target, machine=machine, slots=slots, bank=bank) as spec,
        ):
            for prompt in prompts:
                traces += [p.generate(prompt, max_new_tokens=max_new_tokens, do_sample=False).trace for p in (plain, spec)]
    finally:
        target.release()
    return costs_of(traces)


def costs_of(traces: Sequence[Trace]) -> CostTable:
    """The cost table that fits these traces' decoding phases best.

    >>> costs_of([Trace.of([("target", "head", 0.0, 9.0, 1, -1, -1, -1, 1, 0, -1, "", "", 0.0)], "simulated")]).target.head_us
    9.0
    """
    events = pd.concat([trace.events for trace in traces])
    events = events[(events["step"] >= 1) & events["lane"].isin(["target", "draft"])]
    events = events.assign(us=events["end_us"] - events["start_us"])
    lanes = {lane: _lane(events[events["lane"] == lane]) for lane in ("target", "draft")}
    return CostTable(**lanes)


def _lane(events: pd.DataFrame) -> LaneCosts:
    fits = {kind: _fit(events[events["kind"] == kind]) for kind in ("attention", "expert", "head")}
    calls = (events["kind"] == "attention").sum()
    between = events.loc[events["kind"] == "plan", "us"].sum() / calls if calls else 0.0
    return LaneCosts(
        attention_us=fits["attention"][0] + float(between), attention_row_us=fits["attention"][1], expert_us=fits["expert"][0],
        expert_row_us=fits["expert"][1], head_us=fits["head"][0], head_row_us=fits["head"][1],
    )  # fmt: skip


def _fit(events: pd.DataFrame) -> tuple[float, float]:
    """(fixed, per row) in us, neither negative; a draft's segment of a whole layer counts its experts as one call each."""
    if events.empty:
        return 0.0, 0.0
    kept = events[events["us"] <= events["us"].quantile(0.99)]
    us, rows = kept["us"].to_numpy(), kept["tokens"].to_numpy(dtype=float)
    whole_layer = (kept["kind"] == "expert") & (kept["expert"] < 0)
    if whole_layer.all():  # one row in each expert: calls and rows are the same number
        return float(us.sum() / rows.sum()), 0.0
    if np.ptp(rows) == 0:
        return float(us.mean()), 0.0
    slope = max(0.0, float(np.polyfit(rows, us, 1)[0]))
    return max(0.0, float(us.mean() - slope * rows.mean())), slope
