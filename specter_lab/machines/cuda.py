"""A machine with a GPU's clock: compute on the current stream, copies on a stream of their own from page-locked memory.

Times are CUDA events, kept as they are recorded and resolved once, after the run: asking for them earlier would cause the
very stalls that they measure. An instant (a prediction, an eviction, ...) gets the time of the last compute event before it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from specter_lab.observe.trace import TraceWriter
from specter_lab.pieces import LinkSource
from specter_lab.records import ExpertKey, Transfer


class CudaMachine:
    """One GPU. At most ``queue_depth`` copies are on the copy stream at a time; intents beyond that stay in software.

    ``link_gb_s`` is only what ``copy_us`` estimates with: the link itself is as fast as it is. Host memory that isn't
    page-locked copies slower and without overlap (``ExpertBank.page_lock``). Raises ``RuntimeError`` without a GPU.

    >>> CudaMachine.available() == torch.cuda.is_available()
    True
    """

    def __init__(self, device: int = 0, queue_depth: int = 2, link_gb_s: float = 50.0) -> None:
        if not self.available():
            raise RuntimeError("CudaMachine measures a GPU; torch finds none here. Use ThrottledMachine or SimulatedMachine.")
        if queue_depth < 1:
            raise ValueError(f"The copy stream holds at least one copy; got queue_depth={queue_depth}; 2 is usual.")
        self.device = torch.device("cuda", device)
        self.queue_depth, self.link_gb_s, self.latency_us = queue_depth, link_gb_s, 0.0
        self.label = f"measured on {torch.cuda.get_device_name(self.device)}"
        self.copies = torch.cuda.Stream(self.device)
        self.start(None)

    @staticmethod
    def available() -> bool:
        """Whether torch finds a GPU."""
        return torch.cuda.is_available()

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Nothing to guard: the calling thread does everything, the GPU runs beside it."""
        return nullcontext()

    def start(self, source: LinkSource | None) -> None:
        """Begin a request: both streams idle, time 0."""
        torch.cuda.synchronize(self.device)
        self.trace = TraceWriter(self.label)
        self._source = source
        self._deferred: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event, dict[str, Any]]] = []
        self._flying: deque[tuple[Transfer, torch.cuda.Event]] = deque()
        self._arrived: set[int] = set()
        self._slot_of: dict[int, tuple[int, int]] = {}
        self._last_use: dict[tuple[int, int], torch.cuda.Event] = {}
        self._zero = self._segment = self._event()
        self._begun = time.perf_counter()

    def now_us(self) -> float:
        """Host microseconds since ``start``: for estimates; the trace has the GPU's own times."""
        return (time.perf_counter() - self._begun) * 1e6

    def mark(self, kind: str, **fields: Any) -> None:
        """Record an instant, at the last compute event."""
        self._deferred.append(("control", kind, self._segment, self._segment, fields))

    def compute(
        self,
        lane: str,
        kind: str,
        *,
        step: int,
        layer: int = -1,
        expert: int = -1,
        tokens: int = 0,
        experts: int = 1,
        request_id: int = -1,
    ) -> None:
        """Close the running segment with an event on the compute stream; the slot of a used expert is free after it."""
        end = self._event()
        fields = {"step": step, "layer": layer, "expert": expert, "tokens": tokens, "request_id": request_id}
        self._deferred.append((lane, kind, self._segment, end, fields))
        self._segment = end
        if request_id in self._slot_of:
            self._last_use[self._slot_of[request_id]] = end
        self.notify()

    def wait(self, key: ExpertKey, request_id: int, *, step: int) -> None:
        """The compute stream (not the host) waits for the copy; the wait is a stall between two events."""
        begin = self._event()
        self._deferred.append(("target", "plan", self._segment, begin, {"step": step, "layer": key.layer}))
        self.notify()
        while request_id not in self._arrived:
            if not self._flying:
                raise RuntimeError(f"A wait must end: {key} (request {request_id}) is neither on the link nor can be put there.")
            torch.cuda.current_stream(self.device).wait_event(self._flying[0][1])
            self._land()
            self.notify()
        end = self._event()
        fields = {"step": step, "layer": key.layer, "expert": key.expert, "request_id": request_id}
        self._deferred.append(("target", "stall", begin, end, fields))
        self._segment = end

    def on_host(self, key: ExpertKey, bytes: int, work: Callable[[], None], *, step: int, tokens: int) -> None:
        """Not offered: the rows would have to leave the GPU."""
        raise RuntimeError(f"CudaMachine computes on the GPU only; {key} was given to the host. Leave out split=, or use ThrottledMachine.")

    def join_host(self, *, step: int, layer: int) -> None:
        """Nothing runs there."""

    def host_us(self, bytes: int) -> float:
        """Never the better choice here."""
        return float("inf")

    def host_backlog_us(self) -> float:
        """Nothing runs there."""
        return 0.0

    def copy_us(self, bytes: int) -> float:
        """An estimate from ``link_gb_s``."""
        return bytes / (self.link_gb_s * 1e3)

    def link_backlog_us(self) -> float:
        """An estimate: the copies on the stream at ``link_gb_s``."""
        return sum(self.copy_us(transfer.bytes) for transfer, _ in self._flying)

    def notify(self) -> None:
        """Take in what has arrived, then keep the copy stream's short queue full."""
        while self._flying and self._flying[0][1].query():
            self._land()
        while self._source is not None and len(self._flying) < self.queue_depth:
            transfer = self._source.next_transfer()
            if transfer is None:
                return
            self._issue(transfer)

    def stop(self) -> None:
        """Let the copies finish and write the trace. Idempotent."""
        source, self._source = self._source, None
        torch.cuda.synchronize(self.device)
        while self._flying:
            transfer, _ = self._flying.popleft()
            if source is not None:
                source.arrived(transfer)
        deferred, self._deferred = self._deferred, []
        resolved = [
            (self._zero.elapsed_time(start) * 1e3, self._zero.elapsed_time(end) * 1e3, lane, kind, fields)
            for lane, kind, start, end, fields in deferred
        ]
        for start_us, end_us, lane, kind, fields in sorted(resolved, key=lambda row: row[0]):
            self.trace.add(lane, kind, start_us, end_us, **fields)

    def close(self) -> None:
        """Nothing outlives ``stop``."""
        self.stop()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _issue(self, transfer: Transfer) -> None:
        """Copy on the copy stream, after the slot's last use on the compute stream (never before: it would be overwritten in use)."""
        place = (transfer.key.layer, transfer.slot)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._slot_of[transfer.request_id] = place
        assert transfer.source is not None and transfer.destination is not None
        with torch.cuda.stream(self.copies):
            if place in self._last_use:
                self.copies.wait_event(self._last_use[place])
            else:
                self.copies.wait_event(self._zero)
            begin.record(self.copies)
            transfer.destination.copy_(transfer.source, non_blocking=True)
            end.record(self.copies)
        fields = {
            "step": transfer.step, "position": transfer.position, "layer": transfer.key.layer, "expert": transfer.key.expert,
            "bytes": transfer.bytes, "request_id": transfer.request_id, "reason": transfer.reason,
        }  # fmt: skip
        self._deferred.append(("link", "transfer", begin, end, fields))
        self._flying.append((transfer, end))

    def _land(self) -> None:
        transfer, _ = self._flying.popleft()
        self._arrived.add(transfer.request_id)
        if self._source is not None:
            self._source.arrived(transfer)
