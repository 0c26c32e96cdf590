"""A machine with a wall clock: real CPU compute beside real byte copies, paced to the speed of a chosen link.

It shows real overlap without a GPU: the processor plays the device, a worker thread plays the copy engine.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from specter_lab.observe.trace import TraceWriter
from specter_lab.pieces import LinkSource
from specter_lab.records import ExpertKey, Transfer

HAND_OVER_US = 100.0
"""Waking a thread and being woken by it takes about as long: a shorter copy is carried out by the one that asks for it."""


class ThrottledMachine:
    """Wall time for compute; one link thread that copies at ``link_gb_s`` (GB/s, 10**9 bytes) plus ``latency_us`` a copy.

    On a link so fast that a copy takes less than ``HAND_OVER_US``, the compute thread carries it out itself and stalls for it.

    The host's lane is a thread too, paced to read weights at ``host_gb_s`` (3 x the link by default), since the
    processor that plays the device would otherwise be as fast as the host. Threads live from ``start`` to ``stop``. For
    steady figures set ``torch.set_num_threads(1)``, so that compute and link have a core each.

    >>> machine = ThrottledMachine(link_gb_s=0.05); machine.start(None); machine.stop()
    >>> machine.label
    'throttled'
    """

    def __init__(self, link_gb_s: float = 0.05, latency_us: float = 0.0, host_gb_s: float | None = None) -> None:
        if not link_gb_s > 0 or latency_us < 0:
            raise ValueError(
                f"A link needs a bandwidth above 0 GB/s and a latency of at least 0 us; got {link_gb_s} GB/s and {latency_us} us; "
                "give for instance link_gb_s=0.05."
            )
        self.link_gb_s, self.latency_us = link_gb_s, latency_us
        self.host_gb_s = 3 * link_gb_s if host_gb_s is None else host_gb_s
        self._host: ThreadPoolExecutor | None = None
        self._host_work: list[Future[None]] = []
        self._host_free = 0.0
        self._lands_at = 0.0
        self.label = "throttled"
        self.trace = TraceWriter(self.label)
        self.lock = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._source: LinkSource | None = None
        self._failure: BaseException | None = None
        self._handed: Transfer | None = None
        self._idle = self._stopping = False
        self._zero = self._segment = time.perf_counter()
        self._arrived: dict[int, float] = {}

    def start(self, source: LinkSource | None) -> None:
        """Begin a request: time 0, an empty trace, and a link thread if there is a source."""
        self.stop()
        self.trace = TraceWriter(self.label)
        self._arrived, self._failure, self._source, self._handed = {}, None, source, None
        self._idle, self._stopping = True, False
        self._zero = self._segment = self._lands_at = time.perf_counter()
        if source is not None:
            self._thread = threading.Thread(target=self._run_link, name="specter-link", daemon=True)
            self._thread.start()

    def now_us(self) -> float:
        """Wall microseconds since ``start``."""
        return (time.perf_counter() - self._zero) * 1e6

    def mark(self, kind: str, **fields: Any) -> None:
        """Record an instant."""
        now = self.now_us()
        self.trace.add("control", kind, now, now, **fields)

    def compute(
        self, lane: str, kind: str, *, step: int, layer: int = -1, expert: int = -1, tokens: int = 0, experts: int = 1, request_id: int = -1
    ) -> None:
        """Close the running segment: everything since the last one was ``kind``; up to the arrival of its expert, planning."""
        now = time.perf_counter()
        arrived = self._arrived.get(request_id, self._segment)
        if arrived > self._segment:
            self._add("target", "plan", self._segment, arrived, step=step, layer=layer)
            self._segment = arrived
        self._add(lane, kind, self._segment, now, step=step, layer=layer, expert=expert, tokens=tokens, request_id=request_id)
        self._segment = now

    def wait(self, key: ExpertKey, request_id: int, *, step: int) -> None:
        """Block until ``request_id`` has arrived; what ran before it on the compute timeline counts as planning."""
        start = time.perf_counter()
        with self.lock:
            self.notify()
            while request_id not in self._arrived:
                if self._failure is not None:
                    raise RuntimeError(f"The link thread failed while {key} was awaited: {self._failure!r}") from self._failure
                self.lock.wait(timeout=1.0)
        end = time.perf_counter()
        self._add("target", "plan", self._segment, start, step=step, layer=key.layer)
        self._add("target", "stall", start, end, step=step, layer=key.layer, expert=key.expert, request_id=request_id)
        self._segment = end

    def on_host(self, key: ExpertKey, bytes: int, work: Callable[[], None], *, step: int, tokens: int) -> None:
        """Queue the work for the host's thread, which takes at least the paced time for it."""
        if self._host is None:
            self._host = ThreadPoolExecutor(1, thread_name_prefix="specter-host")
        self._host_free = max(self._host_free, time.perf_counter()) + self.host_us(bytes) * 1e-6
        until = self._host_free

        def run() -> None:
            start = time.perf_counter()
            with torch.no_grad():  # the mode of the calling thread doesn't reach this one
                work()
            time.sleep(max(0.0, until - time.perf_counter()))
            self._add("host", "expert", start, time.perf_counter(), step=step, layer=key.layer, expert=key.expert, tokens=tokens)

        self._host_work.append(self._host.submit(run))

    def join_host(self, *, step: int, layer: int) -> None:
        """Block until the host's thread has nothing left; its failure is raised here."""
        start = time.perf_counter()
        work, self._host_work = self._host_work, []
        for future in work:
            future.result()
        end = time.perf_counter()
        self._add("target", "plan", self._segment, start, step=step, layer=layer)
        self._add("target", "stall", start, end, step=step, layer=layer, reason="host")
        self._segment = end

    def host_us(self, bytes: int) -> float:
        """Weights over ``host_gb_s``."""
        return bytes / (self.host_gb_s * 1e3)

    def host_backlog_us(self) -> float:
        """Until the host's queued work is due."""
        return max(0.0, self._host_free - time.perf_counter()) * 1e6

    def copy_us(self, bytes: int) -> float:
        """Latency and bytes over ``link_gb_s``."""
        return self.latency_us + bytes / (self.link_gb_s * 1e3)

    def link_backlog_us(self) -> float:
        """Until the copy on the link is due."""
        return max(0.0, self._lands_at - time.perf_counter()) * 1e6

    def notify(self) -> None:
        """An idle link takes its next copy: the link thread, or this one where that is quicker than waking it."""
        with self.lock:
            while self._idle and self._failure is None:
                transfer = self._next()
                if transfer is None:
                    return
                self._lands_at = max(self._lands_at, time.perf_counter())  # it rested: no time to catch up with
                if self.copy_us(transfer.bytes) >= HAND_OVER_US:
                    self._handed, self._idle = transfer, False
                    self.lock.notify_all()
                else:
                    self._carry(transfer)

    def stop(self) -> None:
        """Let the copy on the link finish and end the thread."""
        with self.lock:
            self._stopping = True
            self.lock.notify_all()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        host, self._host, self._host_work = self._host, None, []
        if host is not None:
            host.shutdown(cancel_futures=True)

    def close(self) -> None:
        """End the thread."""
        self.stop()

    def _add(self, lane: str, kind: str, start: float, end: float, **fields: Any) -> None:
        self.trace.add(lane, kind, (start - self._zero) * 1e6, (end - self._zero) * 1e6, **fields)

    def _next(self) -> Transfer | None:
        """The source's next copy; its failure is kept for the thread that waits."""
        try:
            return None if self._source is None or self._stopping else self._source.next_transfer()
        except BaseException as failure:
            self._failure = failure
            return None

    def _carry(self, transfer: Transfer) -> None:
        """A copy by the compute thread, which stalls for it."""
        start = time.perf_counter()
        self._add("target", "plan", self._segment, start, step=transfer.step, layer=transfer.key.layer)
        began = self._copy(transfer, start)
        while time.perf_counter() < self._lands_at:
            pass  # a sleep this short takes longer
        end = self._segment = self._land(transfer, began)
        where = {"layer": transfer.key.layer, "expert": transfer.key.expert, "request_id": transfer.request_id}
        self._add("target", "stall", start, end, step=transfer.step, **where)

    def _copy(self, transfer: Transfer, start: float) -> float:
        """The bytes, and when they are due: the link has a schedule of its own, so late wake-ups don't add up.

        Returns when the copy began: at ``start``, or once the bytes of a mapped store had been read.
        """
        if transfer.source is not None and transfer.destination is not None:
            if transfer.mapped:
                start = self._read(transfer, transfer.source)
            transfer.destination.copy_(transfer.source)
        self._lands_at += self.copy_us(transfer.bytes) * 1e-6
        return start

    def _read(self, transfer: Transfer, source: Tensor) -> float:
        """Touch every page: what the system still has of the file takes microseconds, the rest as long as the disk takes."""
        start = time.perf_counter()
        source[:: mmap.PAGESIZE].sum()
        end = time.perf_counter()
        where = {"layer": transfer.key.layer, "expert": transfer.key.expert, "request_id": transfer.request_id}
        self._add("disk", "read", start, end, step=transfer.step, bytes=transfer.bytes, reason=transfer.reason, **where)
        self._lands_at = max(self._lands_at, end)  # the link stood idle meanwhile
        return end

    def _run_link(self) -> None:
        try:
            while True:
                with self.lock:
                    while self._handed is None:
                        self._idle = True
                        if self._stopping:
                            return
                        self.lock.wait()
                    transfer = self._handed
                start = time.perf_counter()
                start = self._copy(transfer, start)
                time.sleep(max(0.0, self._lands_at - time.perf_counter()))
                with self.lock:
                    self._land(transfer, start)
                    self.lock.notify_all()
                    self._handed = self._next()
        except BaseException as failure:  # handed to the waiting compute thread, which raises it
            with self.lock:
                self._failure = failure
                self.lock.notify_all()

    def _land(self, transfer: Transfer, start: float) -> float:
        end = time.perf_counter()
        self._add(
            "link", "transfer", start, end, step=transfer.step, position=transfer.position, layer=transfer.key.layer,
            expert=transfer.key.expert, bytes=transfer.bytes, request_id=transfer.request_id, reason=transfer.reason,
        )  # fmt: skip
        self._arrived[transfer.request_id] = end
        assert self._source is not None
        self._source.arrived(transfer)
        return end
