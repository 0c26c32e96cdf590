"""Synthetic traces of any size, the same each time: a request replayed on a small hand-made clock."""

from __future__ import annotations

import random
from typing import Any

from specter_lab.observe.trace import Trace, TraceWriter

EXPERT_BYTES = 4096


class _Request:
    """One request: a compute clock, a first-come link, and layers that hold ``slots`` experts each."""

    def __init__(self, machine: str, layers: int, experts: int, slots: int, seed: int) -> None:
        self.trace = TraceWriter(machine)
        self.random = random.Random(seed)
        self.layers, self.experts, self.slots = layers, experts, slots
        self.now = 0.0
        self.link_free = 0.0
        self.requests = 0
        self.held: dict[tuple[int, int], tuple[int, float]] = {}  # (layer, expert) -> request id, arrival

    def compute(self, lane: str, kind: str, us: float, **columns: Any) -> None:
        self.trace.add(lane, kind, self.now, self.now + us, **columns)
        self.now += us

    def mark(self, kind: str, **columns: Any) -> None:
        self.trace.add("control", kind, self.now, self.now, **columns)

    def stall(self, key: tuple[int, int], step: int, reason: str) -> None:
        request_id, arrival = self.held[key]
        place: dict[str, Any] = {"step": step, "layer": key[0], "expert": key[1], "request_id": request_id}
        self.trace.add("target", "stall", self.now, arrival, reason=reason, **place)
        self.now = arrival

    def free_slot(self, step: int, layer: int, reason: str, keep: tuple[int, ...]) -> bool:
        """Forget an expert when the layer is full; a demand waits for a slot, a prefetch does without."""
        if sum(key[0] == layer for key in self.held) < self.slots:
            return True
        others = [key for key in self.held if key[0] == layer and key[1] not in keep]
        victim = min(others, key=lambda key: self.held[key][1])
        if self.held[victim][1] > self.now:
            if reason == "prefetch":
                return False
            self.stall(victim, step, reason)
        self.held.pop(victim)
        self.mark("evict", step=step, layer=layer, expert=victim[1], bytes=EXPERT_BYTES, reason=reason)
        return True

    def copy(self, step: int, layer: int, expert: int, reason: str, keep: tuple[int, ...] = ()) -> int:
        """Queue one copy and return its request, -1 if there is no slot; the slot is taken now, so its owner goes now."""
        if not self.free_slot(step, layer, reason, keep):
            return -1
        start = max(self.now, self.link_free)
        self.link_free = start + 6.0 + self.random.random()
        request_id, self.requests = self.requests, self.requests + 1
        self.held[layer, expert] = (request_id, self.link_free)
        place: dict[str, Any] = {"step": step, "layer": layer, "expert": expert, "request_id": request_id}
        self.trace.add("link", "transfer", start, self.link_free, bytes=EXPERT_BYTES, reason=reason, **place)
        return request_id

    def draft(self, step: int, length: int, per_token: int) -> None:
        for horizon in range(1, length + 1):
            for layer in range(self.layers):
                self.compute("draft", "attention", 2.0, step=step, layer=layer, tokens=1)
                self.compute("draft", "expert", 1.0, step=step, layer=layer, expert=layer % self.experts, tokens=1)
            self.compute("draft", "head", 1.0, step=step, tokens=1)
            for layer in range(self.layers):
                for expert in self.random.sample(range(self.experts), per_token):
                    key = (layer, expert)
                    asked = self.held[key][0] if key in self.held else self.copy(step, layer, expert, "prefetch")
                    self.mark("predict", step=step, layer=layer, expert=expert, request_id=asked, tokens=horizon, value=0.5)

    def verify(self, step: int, rows: int, per_token: int) -> None:
        for layer in range(self.layers):
            self.compute("target", "attention", 4.0, step=step, layer=layer, tokens=rows)
            needed = tuple(sorted(self.random.sample(range(self.experts), min(per_token + rows - 1, self.slots))))
            self.trace.needed(step, layer, needed)
            for expert in needed:
                place: dict[str, Any] = {"step": step, "layer": layer, "expert": expert}
                known = self.held.get((layer, expert))
                outcome = "miss" if known is None else "late" if known[1] > self.now else "hit"
                request_id = self.copy(step, layer, expert, "demand", keep=needed) if known is None else known[0]
                self.mark("need", **place, tokens=1, request_id=request_id, outcome=outcome)
                if self.held[layer, expert][1] > self.now:
                    self.stall((layer, expert), step, "demand" if known is None else "prefetch")
                self.trace.use(request_id)
                self.compute("target", "expert", 3.0, **place, tokens=rows, request_id=request_id)
        self.compute("target", "head", 2.0, step=step, tokens=rows)


def make_trace(
    steps: int = 4,
    *,
    layers: int = 3,
    experts: int = 8,
    per_token: int = 2,
    draft_length: int = 3,
    machine: str = "simulated",
    seed: int = 0,
) -> Trace:
    """A prefill and ``steps`` rounds of draft, prefetch, verify and commit; each layer holds half of its experts."""
    request = _Request(machine, layers, experts, max(per_token, experts // 2), seed)
    request.verify(0, rows=2, per_token=per_token)
    request.mark("commit", step=0, tokens=1, outcome="first")
    for step in range(1, steps + 1):
        request.mark("draft_length", step=step, value=float(draft_length))
        request.draft(step, draft_length, per_token)
        request.verify(step, draft_length + 1, per_token)
        accepted = request.random.randint(0, draft_length)
        request.compute("target", "plan", 0.5, step=step)
        request.mark("commit", step=step, tokens=accepted + 1, value=float(accepted), outcome="step")
    return request.trace.finish()


def make_long_trace(events: int, **options: Any) -> Trace:
    """At least ``events`` events: as many steps as that takes."""
    two, four = len(make_trace(2, **options)), len(make_trace(4, **options))
    trace = make_trace(4 + max(0, 2 * (events - four)) // (four - two), **options)
    while len(trace) < events:
        trace = make_trace(2 + int(trace.events["step"].max() * events / len(trace)), **options)
    return trace
