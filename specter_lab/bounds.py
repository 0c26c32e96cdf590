"""How fast a run could have been: lower bounds that no schedule of the same work beats.

Three questions, each with less given: how many loads does a sequence of calls need (``clairvoyant_loads``); how fast
could this run's own windows have been served (``schedule_bound``); how fast is this text with perfect drafts and perfect
knowledge (``oracle_bound``). All bounds begin with the best possible slot contents at the first commit, let a copy
bypass the slots, and let compute, link and host work beside each other without ever waiting for one another.

Slots. By default each layer has slots of its own, and a bound holds for that division of them. ``shared=True`` gives
one pool of their sum: a weaker bound, but one for every policy that has so many slots in all, divided or shared.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from specter_lab.machines.simulated import CostTable
from specter_lab.observe.trace import COMPUTE_KINDS, Trace

PerLayer = int | Sequence[int]


def clairvoyant_loads(events: Iterable[Collection[Hashable]], slots: int, residents: Collection[Hashable] = ()) -> int:
    """The least number of loads that serve ``events`` in order from ``slots`` slots, knowing them all.

    An event is a set of experts that one call needs (keys of one layer, or of a shared pool). What isn't there is loaded
    for the event, in waves if need be, and needn't stay. ``residents`` may be there at the start: the best of them,
    where they are more than the slots. Raises ``ValueError`` for a negative number of slots.

    Proof. A use is free only if its expert was held ever since its last use (or the start). So free uses are intervals
    between neighbouring uses of one expert, and at no point between two events do more than ``slots`` of them overlap;
    any such choice of intervals is also a schedule. Most are kept by going through the events and dropping, wherever
    too many overlap, the one that ends last: whatever another choice drops there, exchanging the two leaves every later
    point no fuller. Ties don't change the number.

    Source: Belady, "A study of replacement algorithms for a virtual-storage computer" (1966), here with bypass.

    >>> clairvoyant_loads([{1}, {2}, {1}], slots=1)  # 1 stays, 2 passes by
    2
    """
    if slots < 0:
        raise ValueError(f"A cache has 0 slots (everything passes by) or more; got {slots}. Give the slots of one layer or pool.")
    calls = [frozenset(event) for event in events]
    end, later = len(calls), dict[Hashable, int]()
    next_use: list[dict[Hashable, int]] = []
    for i in reversed(range(end)):
        next_use.append({expert: later.get(expert, end) for expert in calls[i]})
        later.update(dict.fromkeys(calls[i], i))
    next_use.reverse()
    held: set[Hashable] = set()
    farthest: list[tuple[int, Hashable]] = []

    def keep(uses: dict[Hashable, int]) -> None:
        for expert, when in uses.items():
            if when < end:
                held.add(expert)
                heapq.heappush(farthest, (-when, expert))
        while len(held) > slots:  # entries whose use is over lie below all that are held
            held.remove(heapq.heappop(farthest)[1])

    keep({expert: later.get(expert, end) for expert in frozenset(residents)})
    loads = 0
    for call, uses in zip(calls, next_use, strict=True):
        loads += len(call - held)
        held -= call
        keep(uses)
    return loads


@dataclass(frozen=True)
class ScheduleBound:
    """What one run's own windows need at least, in ms per token after the first; see ``schedule_bound``.

    ``loads``: copies (or uses on the host) that can't be avoided. ``tpot_ms``: what the run took.

    >>> ScheduleBound(compute_ms=2.0, link_ms=3.0, loads=40, tpot_ms=4.0).share
    0.75
    """

    compute_ms: float
    link_ms: float
    loads: int
    tpot_ms: float

    @property
    def ms_per_token(self) -> float:
        """The larger part: the other may lie wholly beside it."""
        return max(self.compute_ms, self.link_ms)

    @property
    def share(self) -> float:
        """Bound / TPOT: 1 is a run that no schedule of its windows could have beaten."""
        return self.ms_per_token / self.tpot_ms if self.tpot_ms else 1.0


def schedule_bound(
    trace: Trace,
    *,
    slots: PerLayer,
    blob_bytes: PerLayer,
    link_gb_s: float,
    latency_us: float = 0.0,
    host_gb_s: float | None = None,
    host_bytes: PerLayer | None = None,
    shared: bool = False,
) -> ScheduleBound:
    """The larger of what the run computed on the device and what its windows must move, from first to last commit.

    A window is what one call of a layer needed, rejected rows included. ``slots`` and ``blob_bytes``: one number, or
    one a layer. Moving takes ``latency_us`` a copy and bytes / ``link_gb_s`` for each load that ``clairvoyant_loads``
    can't avoid. With ``host_gb_s`` the host may compute a miss instead, reading ``host_bytes`` (``blob_bytes``, if not
    given) at that speed: then these are the fewest uses of absent experts, and link and host share them as evenly as
    they can; what the run computed on the device stays the other part.

    It bounds every schedule, eviction and prefetch of the same windows: compute is one timeline and the link carries
    one copy at a time. Raises ``ValueError`` for a run without a second token, one whose misses the host computed if
    ``host_gb_s`` isn't given, lengths that don't fit its layers, and a shared pool of experts of different sizes.

    >>> import specter_lab as sl
    >>> with sl.Pipeline("tiny-moe", slots=6, machine=sl.SimulatedMachine()) as p: trace = p.generate("Once", max_new_tokens=4).trace
    >>> schedule_bound(trace, slots=6, blob_bytes=98_304, link_gb_s=16.0, latency_us=10.0).share < 1
    True
    """
    commits, needs = trace.of_kind("commit"), trace.of_kind("need")
    tokens = int(commits["tokens"].sum()) - 1
    if tokens < 1:
        raise ValueError(f"A bound per token needs a run of at least two tokens; this one committed {tokens + 1}. Decode more.")
    hardware = _Hardware(max(needs["layer"], default=0) + 1, slots, blob_bytes, link_gb_s, latency_us, host_gb_s, host_bytes, shared)
    needs = needs[needs["step"] >= 1]
    hosted = int((needs["reason"] == "host").sum())
    if hosted and host_gb_s is None:
        raise ValueError(f"The host computed {hosted} misses of this run, so the bound must know its speed. Give host_gb_s.")
    begin, end = float(commits["start_us"].iloc[0]), float(commits["start_us"].iloc[-1])
    compute = trace.of_kind(*COMPUTE_KINDS).query("lane in ('target', 'draft')")
    compute_us = float((compute["end_us"].clip(begin, end) - compute["start_us"].clip(begin, end)).sum())
    loads = hardware.loads([(layer, frozenset(e)) for (_, layer), e in needs.groupby(["step", "layer"], sort=False)["expert"]])
    per_token = [us / tokens / 1e3 for us in (compute_us, hardware.link_us(loads), end - begin)]
    return ScheduleBound(compute_ms=per_token[0], link_ms=per_token[1], loads=sum(loads), tpot_ms=per_token[2])


@dataclass(frozen=True)
class OracleBound:
    """What a text needs at least, in ms per token; see ``oracle_bound``.

    ``compute_ms`` and ``link_ms`` are the least of either alone; ``drafting``: whether they are of drafting or of
    decoding token by token. ``lengths``, indexed by draft_length: the same for passes that are all of one length.

    >>> OracleBound(compute_ms=2.0, link_ms=2.9, drafting=True).ms_per_token
    2.9
    """

    compute_ms: float
    link_ms: float
    drafting: bool
    lengths: pd.DataFrame = field(default_factory=pd.DataFrame, repr=False, compare=False)

    @property
    def ms_per_token(self) -> float:
        """The larger part: the other may lie wholly beside it."""
        return max(self.compute_ms, self.link_ms)


def oracle_bound(
    routing: np.ndarray,
    *,
    slots: PerLayer,
    blob_bytes: PerLayer,
    link_gb_s: float,
    latency_us: float = 0.0,
    costs: CostTable | None = None,
    draft_limit: int = 0,
    draft_slots: PerLayer | None = None,
    host_gb_s: float | None = None,
    host_bytes: PerLayer | None = None,
    shared: bool = False,
) -> OracleBound:
    """The least time of a text whose drafts are always right, over all ways to cut it into verification passes.

    ``routing``: (token, layer, rank) ids of the decoding phase's rows, -1 where a rank is unused: from the first
    generated token to the last but one. A pass verifies 1 to ``draft_limit`` + 1 tokens, with a draft step for each but
    the first. ``draft_slots``: what a draft's own memory leaves of ``slots`` (all, if not given); the bound is the
    lesser of drafting with these and of not drafting with ``slots``. The rest is as for ``schedule_bound``, except that
    the host may also relieve the device; rebuilding residuals isn't counted. It bounds every drafter that pays
    ``costs.draft`` a token, every draft length (also one that changes from step to step), predictor, eviction and
    schedule, since rejected rows only add needs and compute. Raises ``ValueError`` for what doesn't fit together.

    Proof, for the link. Cut the text into phases at boundaries of passes. At the start of a phase at most ``slots`` of
    its experts are there, so it loads at least (distinct experts - slots); with the right phases that is the
    clairvoyant number itself. The passes are unknown, so let an opponent who wants the fewest loads choose them: one
    pass at a time, after each of which we say, not knowing the next, whether a phase ends there. The value of that game,
    found backwards over (start of the phase, boundary), is no more than any passes load. Each layer plays its own.

    >>> import numpy as np
    >>> oracle_bound(np.array([[[0]], [[1]], [[0]]]), slots=1, blob_bytes=48_000, link_gb_s=16.0).link_ms  # one load of 3 us
    0.001
    """
    routing = np.asarray(routing)
    if routing.ndim != 3 or not routing.size or draft_limit < 0:
        raise ValueError(
            f"An oracle needs routing of shape (token, layer, rank) and a draft limit of 0 or more; got {routing.shape} and {draft_limit}. "
            "Give the rows after the prompt."
        )
    text, rows, bounds = _Text(routing, costs or CostTable()), [], []
    for limit in sorted({0, draft_limit}):
        chosen = slots if limit == 0 or draft_slots is None else draft_slots
        hardware = _Hardware(text.layers, chosen, blob_bytes, link_gb_s, latency_us, host_gb_s, host_bytes, shared)
        longest = min(limit + 1, text.tokens)
        cost = text.pass_us(hardware, longest)
        distinct, room = text.distinct, np.array(hardware.slots)
        if shared:
            distinct, room = distinct.sum(axis=0, keepdims=True), room.sum(keepdims=True)
        link_us = hardware.link_us(_fewest_loads(distinct, room, longest))
        bounds.append(OracleBound(_cheapest(cost) / text.tokens / 1e3, link_us / text.tokens / 1e3, limit > 0))
        for size in range(min(limit, 1) + 1, longest + 1):
            cuts = [(start, min(size, text.tokens - start)) for start in range(0, text.tokens, size)]
            loads = hardware.loads([text.call(*cut, layer) for cut in cuts for layer in range(text.layers)])
            compute_us = np.sum([cost[:, start, n - 1] for start, n in cuts], axis=0).max()
            rows.append((compute_us, hardware.link_us(loads)))
    best = min(bounds, key=lambda bound: (bound.ms_per_token, bound.compute_ms + bound.link_ms))
    lengths = pd.DataFrame(np.array(rows) / text.tokens / 1e3, columns=["compute_ms", "link_ms"]).rename_axis("draft_length")
    lengths.insert(0, "ms_per_token", lengths.max(axis=1))
    return replace(best, lengths=lengths)


class _Hardware:
    """Slots, and the us of a copy and of a use on the host (None: there is none), of each layer."""

    def __init__(
        self,
        layers: int,
        slots: PerLayer,
        blob_bytes: PerLayer,
        link_gb_s: float,
        latency_us: float,
        host_gb_s: float | None,
        host_bytes: PerLayer | None,
        shared: bool,
    ) -> None:
        given = (slots, blob_bytes, blob_bytes if host_bytes is None else host_bytes)
        self.slots, moved, read = (tuple(n) if isinstance(n, Sequence) else (n,) * layers for n in given)
        if any(len(n) != layers or min(n) < 1 for n in (self.slots, moved, read)) or (shared and max(len({*moved}), len({*read})) > 1):
            raise ValueError(
                f"A bound needs slots and bytes (1 or more) for each of {layers} MoE layers, and in a shared pool the same bytes for all; "
                f"got slots={slots!r}, blob_bytes={blob_bytes!r} and host_bytes={host_bytes!r}. Give one number, or one a layer."
            )
        if not link_gb_s > 0 or latency_us < 0 or (host_gb_s is not None and not host_gb_s > 0):
            raise ValueError(
                f"Link and host need bandwidths above 0 GB/s and a latency of at least 0 us; got {link_gb_s} and {host_gb_s} GB/s and "
                f"{latency_us} us. Give the machine's own, for instance link_gb_s=16.0."
            )
        self.copy_us = latency_us + np.array(moved, dtype=float) / (link_gb_s * 1e3)
        self.host_us = None if host_gb_s is None else np.array(read, dtype=float) / (host_gb_s * 1e3)
        self.shared = shared

    def loads(self, calls: Sequence[tuple[int, frozenset[int]]]) -> list[int]:
        """Least loads of each layer, or [of the pool]; ``calls``: (layer, experts) in order."""
        if self.shared:
            pooled = [{(layer, expert) for expert in experts} for layer, experts in calls]
            return [clairvoyant_loads(pooled, sum(self.slots), set().union(*pooled))]
        own = [[experts for called, experts in calls if called == layer] for layer in range(len(self.slots))]
        return [clairvoyant_loads(events, n, frozenset().union(*events)) for events, n in zip(own, self.slots, strict=True)]

    def weights(self, own_us: np.ndarray) -> list[float]:
        """How much a lane counts against the host (1 - w) in sums that the later of the two can't undercut."""
        return [1.0] if self.host_us is None else [1.0, *(self.host_us / (self.host_us + own_us)).tolist()]

    def cheaper_us(self, weight: float, own_us: np.ndarray) -> np.ndarray:
        """(layers,) what a job counts in such a sum, wherever it is done."""
        return weight * own_us if self.host_us is None else np.minimum(weight * own_us, (1 - weight) * self.host_us)

    def link_us(self, loads: Sequence[int]) -> float:
        """The link's time for these loads (of each layer or [of the pool]); with a host, until the later of the two ends."""
        each = np.array([*loads, *[0] * (len(self.slots) - len(loads))])
        return max(float((each * self.cheaper_us(w, self.copy_us)).sum()) for w in self.weights(self.copy_us))


class _Text:
    """Distinct experts of every stretch of a text, and what passes over it compute."""

    def __init__(self, routing: np.ndarray, costs: CostTable) -> None:
        self.routing, self.costs = routing, costs
        self.tokens, self.layers = routing.shape[:2]
        self.distinct = np.zeros((self.layers, self.tokens + 1, self.tokens + 1), dtype=np.int64)
        """(layer, start, end): experts that tokens start .. end - 1 use."""
        for layer in range(self.layers):
            last = np.full(int(routing.max()) + 1, -1)
            for end, picked in enumerate(routing[:, layer], start=1):
                last[picked[picked >= 0]] = end - 1
                self.distinct[layer, :end, end] = np.bincount(last[last >= 0], minlength=end)[::-1].cumsum()[::-1]

    def call(self, start: int, rows: int, layer: int) -> tuple[int, frozenset[int]]:
        """The layer and the experts it needs in a pass over these rows."""
        return layer, frozenset(self.routing[start : start + rows, layer].ravel().tolist()) - {-1}

    def pass_us(self, hardware: _Hardware, longest: int) -> np.ndarray:
        """(weights, start, rows - 1): compute of drafting and verifying these rows, infinite past the end of the text.

        Beside a host (1 - w), the device's time counts w and a use what it counts where it is cheaper.
        """
        target, draft, used = self.costs.target, self.costs.draft, (self.routing >= 0).sum(axis=2)
        # a rank that is unused at one token may be unused by the draft: the least that any token uses
        steps = [self.layers * draft.of("attention", 1, 1), draft.of("head", 1, 1), draft.of("plan", 1, 1)]
        draft_us = sum(steps) + sum(draft.of("expert", n, n) for n in used.min(axis=0).tolist())
        first_us = target.of("expert", 1, 1)
        more_us = target.of("expert", 2, 1) - first_us if hardware.host_us is None else 0.0  # the host reads for all rows at once
        until = np.concatenate([[0], used.sum(axis=1).cumsum()])
        own_us = np.full(self.layers, first_us)
        weights = np.array(hardware.weights(own_us))
        use_us = np.array([hardware.cheaper_us(w, own_us) for w in weights])
        cost = np.full((len(weights), self.tokens, longest), np.inf)
        for rows in range(1, longest + 1):
            start = np.arange(self.tokens - rows + 1)
            needed = self.distinct[:, start, start + rows]
            other_us = self.layers * target.of("attention", rows, 1) + target.of("head", rows, 1) + target.of("plan", 1, 1)
            other_us = other_us + (rows - 1) * draft_us + more_us * (until[start + rows] - until[start] - needed.sum(axis=0))
            cost[:, start, rows - 1] = weights[:, None] * other_us + use_us @ needed
        return cost


def _cheapest(cost: np.ndarray) -> float:
    """Least compute over all cuts of the text: ``cost`` as from ``pass_us``, of whose weights the best counts."""
    tokens, longest = cost.shape[1:]
    left = np.zeros((len(cost), tokens + 1))
    for at in reversed(range(tokens)):
        most = min(longest, tokens - at)
        left[:, at] = (cost[:, at, :most] + left[:, at + 1 : at + most + 1]).min(axis=1)
    return float(left[:, 0].max())


def _fewest_loads(distinct: np.ndarray, slots: np.ndarray, longest: int) -> list[int]:
    """The value of each pool's game in ``oracle_bound``'s proof; ``distinct``: (pools, start, end), ``slots``: (pools,)."""
    tokens = distinct.shape[1] - 1
    ended = np.maximum(distinct - slots[:, None, None], 0)
    value = np.zeros_like(distinct)  # (pool, start of the phase, boundary): loads from that phase on
    value[:, :, tokens] = ended[:, :, tokens]
    for at in reversed(range(tokens)):
        going_on = value[:, : at + 1, at + 1 : at + longest + 1].min(axis=2)
        value[:, : at + 1, at] = np.maximum(going_on, ended[:, : at + 1, at] + going_on[:, at:])
    return [int(loads) for loads in value[:, 0, 0]]
