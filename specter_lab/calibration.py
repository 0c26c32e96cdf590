"""Measure what compute and copies cost on this very machine, so that the simulator can predict it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from specter_lab.baselines import fiddler, lookahead, on_demand, residual_lookahead
from specter_lab.machines.simulated import CostTable, LaneCosts, SimulatedMachine
from specter_lab.models import MoE
from specter_lab.observe.trace import Trace
from specter_lab.pieces import ExpertStore
from specter_lab.records import ExpertKey


class Twin(SimulatedMachine):
    """Simulates a measured machine: plans with the same nominal speeds, and charges what copies and host jobs took beyond them.

    >>> machine = Twin(1.0, 0.0, CostTable(), 3.0, copy_delay_us=50.0, host_delay_us=20.0)
    >>> machine.copy_us(1000), machine.host_us(3000)  # what pieces plan with
    (1.0, 1.0)
    """

    def __init__(
        self, link_gb_s: float, latency_us: float, costs: CostTable, host_gb_s: float, *, copy_delay_us: float, host_delay_us: float
    ) -> None:
        self.copy_delay_us, self.host_delay_us = copy_delay_us, host_delay_us
        super().__init__(link_gb_s, latency_us, costs, host_gb_s)

    def notify(self) -> None:
        """An idle link takes its next copy, which arrives late."""
        before = self._flying
        super().notify()
        if self._flying is not None and self._flying is not before:
            start, end = self._flight
            self._flight = (start, end + self.copy_delay_us)

    def on_host(self, key: ExpertKey, bytes: int, work: Callable[[], None], *, step: int, tokens: int) -> None:
        """The host begins late."""
        self._host_free = max(self._now, self._host_free) + self.host_delay_us
        super().on_host(key, bytes, work, step=step, tokens=tokens)


def calibrate(
    machine: Any,
    target: MoE,
    *,
    bank: ExpertStore | None = None,
    residual: ExpertStore | None = None,
    prompts: Sequence[Any] | None = None,
    max_new_tokens: int = 24,
) -> Twin:
    """The simulated twin of ``machine``: the same link and host, compute costs and delays as measured here.

    Runs ``target`` on demand, with misses on the host, and with a self-draft's lookahead (``bank``: qint4 if not given) on
    ``machine``, with slots for a third of the experts, and fits ``costs_of`` to the traces; with a ``residual`` bank also what
    rebuilding costs. What a copy and a job of the host take beyond their bytes (hand-overs between threads, late wake-ups) comes
    from ``copy_delay_us`` and ``host_job_us``. ``prompts``: what to run (two bundled ones by default: use others than those you
    predict). What predictors compute, and what a busy link thread takes from compute, is charged as it was in these runs.

    >>> import specter_lab as sl
    >>> twin = sl.calibrate(sl.SimulatedMachine(), sl.load_moe("tiny-moe"), max_new_tokens=4)
    >>> round(twin.costs.target.attention_us), round(twin.copy_delay_us)
    (200, 0)
    """
    if prompts is None:
        from specter_lab.bundled import load_prompts

        prompts = [load_prompts("docs")[-1].text, load_prompts("prose")[-1].text]
    plain: list[Trace] = []
    hosted: list[Trace] = []
    drafted: list[Trace] = []
    target.lease()
    try:
        bank = bank or target.quantize("qint4")
        shared: dict[str, Any] = {"machine": machine, "slots": [max(1, n // 3) for n in target.geometry.experts]}
        systems = [(on_demand(target, **shared), plain), (fiddler(target, **shared), hosted)]
        systems.append((lookahead(target, bank=bank, **shared), drafted))
        if residual is not None:
            systems.append((residual_lookahead(target, bank=bank, **{**shared, "residual": residual}), drafted))
        try:
            for prompt in prompts:
                for pipeline, traces in systems:
                    traces.append(pipeline.generate(prompt, max_new_tokens=max_new_tokens, do_sample=False).trace)
        finally:
            for pipeline, _ in systems:
                pipeline.close()
        size = target.store.blob_bytes(0)
    finally:
        target.release()
    costs, job = costs_of([*plain, *hosted, *drafted]), host_job_us(hosted)
    delays = {"copy_delay_us": copy_delay_us(plain, machine.copy_us), "host_delay_us": max(0.0, job - machine.host_us(size))}
    return Twin(machine.link_gb_s, machine.latency_us, costs, machine.host_gb_s, **delays)


def costs_of(traces: Sequence[Trace]) -> CostTable:
    """The cost table that fits these traces' decoding phases best.

    Each kind of segment gets a fixed part and a part for each row, by least squares over all of its segments (the slowest
    hundredth left out). Planning is the pipeline's work after a drafted token and at a commit; what it does while a copy is on its
    way is hidden behind that copy and isn't charged.

    >>> costs_of([Trace.of([("target", "head", 0.0, 9.0, 1, -1, -1, -1, 1, 0, -1, "", "", 0.0)], "simulated")]).target.head_us
    9.0
    """
    events = pd.concat([trace.events for trace in traces])
    events = events[(events["step"] >= 1) & events["lane"].isin(["target", "draft"])]
    events = events.assign(us=events["end_us"] - events["start_us"])
    exact = (events["lane"] == "target") | (events["expert"] >= 0)  # a draft's too, where it computed with the target's experts
    lanes = {"target": _lane(events[exact]), "draft": _lane(events[~exact])}
    return CostTable(**lanes)


def copy_delay_us(traces: Sequence[Trace], copy_us: Any) -> float:
    """How much later a layer had all its misses than after their copies, in us a copy; 0 for traces without such layers.

    ``traces``: of runs without prefetch, where the link rests when a layer asks. ``copy_us(bytes)``: what one copy should take.
    Counted are layers whose last wait was for a copy, so that compute in between hid nothing of it.

    >>> copy_delay_us([], lambda size: 1.0)
    0.0
    """
    late, copies = 0.0, 0
    for trace in traces:
        moved = trace.of_kind("transfer").query("step >= 1").groupby(["step", "layer"])
        ends, sizes = moved["end_us"].max(), moved["bytes"].agg(list)
        asked = trace.of_kind("need").query("outcome == 'miss'").groupby(["step", "layer"])["start_us"].min()
        waits = trace.of_kind("stall").query("reason != 'host'").groupby(["step", "layer"])["end_us"].max()
        for call in waits.index.intersection(ends.index).intersection(asked.index):
            if waits[call] >= ends[call]:
                late += waits[call] - asked[call] - sum(map(copy_us, sizes[call]))
                copies += len(sizes[call])
    return max(0.0, late / copies) if copies else 0.0


def host_job_us(traces: Sequence[Trace]) -> float:
    """What an expert takes on the host, hand-overs included; 0 if the host computed nothing that was waited for.

    Counted are layers whose last wait was for the host, from when they asked.

    >>> host_job_us([])
    0.0
    """
    taken, jobs = 0.0, 0
    for trace in traces:
        needs = trace.of_kind("need").query("reason == 'host'").groupby(["step", "layer"])
        asked, count = needs["start_us"].min(), needs.size()
        stalls = trace.of_kind("stall")
        last = stalls.loc[stalls.groupby(["step", "layer"])["end_us"].idxmax()].query("reason == 'host'").set_index(["step", "layer"])
        for call in last.index.intersection(asked.index):
            taken += last.loc[call, "end_us"] - asked[call]
            jobs += count[call]
    return taken / jobs if jobs else 0.0


def _lane(events: pd.DataFrame) -> LaneCosts:
    fits = {kind: _fit(events[events["kind"] == kind]) for kind in ("attention", "expert", "head", "rebuild")}
    plans = events.loc[(events["kind"] == "plan") & (events["layer"] < 0), "us"]
    return LaneCosts(
        attention_us=fits["attention"][0], attention_row_us=fits["attention"][1], expert_us=fits["expert"][0],
        expert_row_us=fits["expert"][1], head_us=fits["head"][0], head_row_us=fits["head"][1],
        plan_us=float(plans.mean()) if len(plans) else 0.0, rebuild_us=fits["rebuild"][0],
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
