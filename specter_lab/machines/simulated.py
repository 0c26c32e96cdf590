"""A machine with a virtual clock: exact, the same on every computer, as fast as Python can count.

Real tensors may run through it; their wall time is ignored and the cost table is charged instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from specter_lab.observe.trace import TraceWriter
from specter_lab.pieces import LinkSource
from specter_lab.records import ExpertKey, Transfer


@dataclass(frozen=True)
class LaneCosts:
    """What one lane's compute takes, in microseconds: a fixed part a call and a part for each row (token).

    ``attention`` covers a decoder layer up to its experts, ``expert`` one routed expert, ``head`` the end of a pass,
    ``rebuild`` one expert out of code and residual.

    >>> LaneCosts(expert_us=50, expert_row_us=2).of("expert", tokens=5, experts=1)
    60.0
    """

    attention_us: float = 0.0
    attention_row_us: float = 0.0
    expert_us: float = 0.0
    expert_row_us: float = 0.0
    head_us: float = 0.0
    head_row_us: float = 0.0
    plan_us: float = 0.0
    rebuild_us: float = 0.0

    def of(self, kind: str, tokens: int, experts: int) -> float:
        """Microseconds of one compute segment: ``tokens`` rows in all, over ``experts`` experts."""
        if kind in ("plan", "rebuild"):
            return float(self.plan_us if kind == "plan" else self.rebuild_us)
        calls = experts if kind == "expert" else 1
        return float(calls * getattr(self, f"{kind}_us") + tokens * getattr(self, f"{kind}_row_us"))


@dataclass(frozen=True)
class CostTable:
    """The compute costs of a target and of its draft.

    The default has the ratios of a data-centre GPU: a layer's attention takes 200 us, an expert 50 us, rebuilding one 40 us,
    and a low-bit draft step half of a target's.

    >>> CostTable().draft.expert_us < CostTable().target.expert_us
    True
    """

    target: LaneCosts = field(default=LaneCosts(200, 2, 50, 1, 300, 5, rebuild_us=40))
    draft: LaneCosts = field(default=LaneCosts(100, 1, 20, 0.5, 150, 5))


class SimulatedMachine:
    """Virtual time for compute, for one link of ``link_gb_s`` with ``latency_us`` a copy, and for a host that reads
    weights at ``host_gb_s`` (3 x the link by default: the ratio that a DeepSeek-V2-Lite expert shows on an A800 host).
    An expert of a mapped store is read at ``disk_gb_s`` before its first copy in a request; then it is in the page cache.

    >>> machine = SimulatedMachine(link_gb_s=1.0); machine.start(None); machine.compute("target", "head", step=0, tokens=1)
    >>> machine.now_us()
    305.0
    """

    def __init__(
        self,
        link_gb_s: float = 16.0,
        latency_us: float = 10.0,
        costs: CostTable | None = None,
        host_gb_s: float | None = None,
        disk_gb_s: float = 3.0,
    ) -> None:
        if not link_gb_s > 0 or latency_us < 0:
            raise ValueError(
                f"A link needs a bandwidth above 0 GB/s and a latency of at least 0 us; got {link_gb_s} GB/s and {latency_us} us; "
                "give for instance link_gb_s=16.0, latency_us=10.0."
            )
        self.link_gb_s, self.latency_us = link_gb_s, latency_us
        self.host_gb_s = 3 * link_gb_s if host_gb_s is None else host_gb_s
        self.disk_gb_s = disk_gb_s
        self.costs = costs or CostTable()
        self.label = "simulated"
        self.start(None)

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Nothing to guard: one thread does everything."""
        return nullcontext()

    def start(self, source: LinkSource | None) -> None:
        """Begin a request at virtual time 0."""
        self.trace = TraceWriter(self.label)
        self._source = source
        self._now = 0.0
        self._segment = 0.0
        self._flying: Transfer | None = None
        self._flight = (0.0, 0.0)
        self._arrived: set[int] = set()
        self._host_free = 0.0
        self._in_page_cache: set[ExpertKey] = set()

    def now_us(self) -> float:
        """Virtual microseconds since ``start``."""
        return self._now

    def mark(self, kind: str, **fields: Any) -> None:
        """Record an instant."""
        self.trace.add("control", kind, self._now, self._now, **fields)

    def compute(
        self, lane: str, kind: str, *, step: int, layer: int = -1, expert: int = -1, tokens: int = 0, experts: int = 1, request_id: int = -1
    ) -> None:
        """Charge one segment; copies that end within it land at their own times. A draft's segment of one named expert is
        of an exact one, and costs what the target's does."""
        costs = self.costs.draft if lane == "draft" and expert < 0 else self.costs.target
        duration = costs.of(kind, tokens, experts)
        if duration > 0:
            start = self._now
            self._advance(start + duration)
            self.trace.add(lane, kind, start, self._now, step=step, layer=layer, expert=expert, tokens=tokens, request_id=request_id)

    def wait(self, key: ExpertKey, request_id: int, *, step: int) -> None:
        """Let virtual time run to the arrival of ``request_id``."""
        start = self._now
        while request_id not in self._arrived:
            self.notify()
            if self._flying is None:
                raise RuntimeError(f"A wait must end: {key} (request {request_id}) is neither on the link nor can be put there.")
            self._advance(self._flight[1])
        if self._now > start:
            self.trace.add("target", "stall", start, self._now, step=step, layer=key.layer, expert=key.expert, request_id=request_id)

    def on_host(self, key: ExpertKey, bytes: int, work: Callable[[], None], *, step: int, tokens: int) -> None:
        """The host reads the weights once, however many rows use them."""
        work()
        start = max(self._now, self._host_free)
        self._host_free = start + self.host_us(bytes)
        self.trace.add("host", "expert", start, self._host_free, step=step, layer=key.layer, expert=key.expert, tokens=tokens)

    def join_host(self, *, step: int, layer: int) -> None:
        """Let virtual time run to the end of the host's work."""
        start = self._now
        if self._host_free > start:
            self._advance(self._host_free)
            self.trace.add("target", "stall", start, self._now, step=step, layer=layer, reason="host")

    def host_us(self, bytes: int) -> float:
        """Weights over ``host_gb_s``."""
        return bytes / (self.host_gb_s * 1e3)

    def host_backlog_us(self) -> float:
        """Until the host is free."""
        return max(0.0, self._host_free - self._now)

    def copy_us(self, bytes: int) -> float:
        """Latency and bytes over ``link_gb_s``."""
        return self.latency_us + bytes / (self.link_gb_s * 1e3)

    def link_backlog_us(self) -> float:
        """Until the copy on the link has landed."""
        return max(0.0, self._flight[1] - self._now) if self._flying is not None else 0.0

    def notify(self) -> None:
        """An idle link takes its next copy now."""
        if self._flying is None and self._source is not None:
            self._flying = self._source.next_transfer()
            if self._flying is not None:
                begin = self._read(self._flying) if self._flying.mapped else self._now
                self._flight = (begin, begin + self.copy_us(self._flying.bytes))

    def _read(self, transfer: Transfer) -> float:
        """When a mapped store's bytes are in the page cache: at once, but for the first use in a request."""
        if transfer.key in self._in_page_cache:
            return self._now
        self._in_page_cache.add(transfer.key)
        end = self._now + transfer.bytes / (self.disk_gb_s * 1e3)
        self.trace.add(
            "disk", "read", self._now, end, step=transfer.step, layer=transfer.key.layer, expert=transfer.key.expert,
            bytes=transfer.bytes, request_id=transfer.request_id, reason=transfer.reason,
        )  # fmt: skip
        return end

    def stop(self) -> None:
        """No new copies; the one on the link still lands."""
        source, self._source = self._source, None
        if self._flying is not None and source is not None:
            self._now = max(self._now, self._flight[1])
            self._land(source)

    def close(self) -> None:
        """Nothing to release."""
        self.stop()

    def _advance(self, until_us: float) -> None:
        while self._flying is not None and self._flight[1] <= until_us:
            self._now = self._flight[1]
            assert self._source is not None
            self._land(self._source)
            self.notify()
        self._now = until_us

    def _land(self, source: LinkSource) -> None:
        transfer, self._flying = self._flying, None
        assert transfer is not None
        if transfer.source is not None and transfer.destination is not None:
            transfer.destination.copy_(transfer.source)
        start, end = self._flight
        self.trace.add(
            "link", "transfer", start, end, step=transfer.step, position=transfer.position, layer=transfer.key.layer,
            expert=transfer.key.expert, bytes=transfer.bytes, request_id=transfer.request_id, reason=transfer.reason,
        )  # fmt: skip
        self._arrived.add(transfer.request_id)
        source.arrived(transfer)
