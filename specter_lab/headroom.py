"""How far a run stayed from what its windows, and perfect drafts, would have allowed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specter_lab.bounds import oracle_bound, schedule_bound
from specter_lab.calibration import costs_of
from specter_lab.generation import Generation
from specter_lab.machines.simulated import LaneCosts
from specter_lab.oracle import text_routing
from specter_lab.pipeline import Pipeline


@dataclass(frozen=True)
class Lanes:
    """What a pipeline's bounds depend on: slots and bytes of each layer, link and host, and compute costs.

    ``costs`` is None on a machine that measures: they are then fitted to the run, and the oracle bound is an estimate.
    ``host``: whether misses may be computed on the host. ``free_drafts``: drafts that don't pay the self-draft's cost.

    >>> import specter_lab as sl
    >>> with sl.Pipeline("tiny-moe", slots=6, machine=sl.SimulatedMachine()) as pipeline: Lanes.of(pipeline).slots[0]
    6
    """

    slots: tuple[int, ...]
    moved: tuple[int, ...]
    read: tuple[int, ...]
    link_gb_s: float
    latency_us: float
    host_gb_s: float
    host: bool
    costs: Any
    free_drafts: bool
    width: int

    @classmethod
    def of(cls, pipeline: Pipeline) -> Lanes | None:
        """None for a machine whose link has no known bandwidth."""
        machine: Any = pipeline.machine
        if getattr(machine, "link_gb_s", None) is None:
            return None
        layers, host_store = range(pipeline.target.layers), pipeline.assembly.host_store
        return cls(
            tuple(pipeline.residency.slots),
            tuple(pipeline.prefetcher.blob_bytes(layer) for layer in layers),
            tuple(host_store.blob_bytes(layer) for layer in layers),
            machine.link_gb_s,
            machine.latency_us,
            machine.host_gb_s,
            pipeline.assembly.split is not None,
            getattr(machine, "costs", None),
            getattr(pipeline.drafter, "bank", None) is None,
            pipeline.target.geometry.experts_per_token,
        )

    @property
    def hardware(self) -> dict[str, Any]:
        """As the bounds take it."""
        host = {"host_gb_s": self.host_gb_s, "host_bytes": self.read} if self.host else {}
        return {
            "slots": self.slots, "blob_bytes": self.moved, "link_gb_s": self.link_gb_s, "latency_us": self.latency_us, **host,
        }  # fmt: skip


def oracle_ms(run: Generation, lanes: Lanes, known: dict[Hashable, float]) -> float:
    """``oracle_bound`` of the run's text in ms per token: perfect drafts up to the longest that it drafted, in its own slots,
    byte format and lanes. ``known`` keeps what was bounded before under the same conditions.

    >>> import specter_lab as sl
    >>> with sl.Pipeline("tiny-moe", slots=6, machine=sl.SimulatedMachine()) as pipeline:
    ...     run, lanes = pipeline.generate("Once", max_new_tokens=4), Lanes.of(pipeline)
    >>> oracle_ms(run, lanes, {}) < run.metrics["tpot_ms"]
    True
    """
    costs = lanes.costs or costs_of([run.trace])
    if lanes.free_drafts:
        costs = replace(costs, draft=LaneCosts())
    lengths, prompt = run.trace.of_kind("draft_length")["value"], run.conditions["prompt_tokens"]
    limit = int(lengths.max()) if len(lengths) else 0
    routing = text_routing(run.trace, prompt, lanes.width)[prompt:]
    key = (routing.tobytes(), limit, lanes, costs)
    if key not in known:
        known[key] = oracle_bound(routing, draft_limit=limit, costs=costs, **lanes.hardware).ms_per_token
    return known[key]


def shares_of_bounds(runs: Mapping[str, Sequence[Generation]], lanes: Mapping[str, Lanes | None]) -> dict[str, dict[str, float | None]]:
    """For each system the mean over its runs of ``share_of_schedule_bound`` and ``share_of_bound``.

    The first is of the run's own windows. The second compares with perfect drafts: on each prompt, the lowest oracle bound
    among the compared systems' slots, byte formats and lanes, the same for all. None without a second token, or for a
    machine whose link has no known bandwidth.
    """
    prompts = len(next(iter(runs.values())))
    of_all = [lane for lane in lanes.values() if lane is not None]
    if len(of_all) < len(runs) or min(len(run.new_ids) for done in runs.values() for run in done) < 2:
        return {system: {"share_of_schedule_bound": None, "share_of_bound": None} for system in runs}
    known: dict[Hashable, float] = {}
    pairs = list(zip(runs.values(), of_all, strict=True))
    least = [min(oracle_ms(done[i], lane, known) for done, lane in pairs) for i in range(prompts)]
    shares: dict[str, dict[str, float | None]] = {}
    for (system, done), lane in zip(runs.items(), of_all, strict=True):
        own = [schedule_bound(run.trace, **lane.hardware).share for run in done]
        oracle = [bound / run.metrics["tpot_ms"] for bound, run in zip(least, done, strict=True)]
        shares[system] = {"share_of_schedule_bound": sum(own) / prompts, "share_of_bound": sum(oracle) / prompts}
    return shares
