"""Specter's lookahead: a count table of the draft's routing, planned in chunks while drafting."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from specter_lab.pieces import DeviceView
from specter_lab.records import DraftToken, ExpertKey, Prediction
from specter_lab.routing.predictors import NoPrediction, routing_of

Schedule = str | tuple[float, ...]
SCHEDULES = ("adaptive", "none", "early", "late")


class ChunkedLookahead(NoPrediction):
    """After each draft step the draft's experts of every layer are counted; at a boundary the top M of each layer are planned.

    M is the layer's slots. ``schedule``: "adaptive" is Specter's (the first boundary after a fifth of the draft; the
    next when the chunk issued has had time to cross the link: ceil(new bytes / (link rate x time of a draft step))
    steps later; over when every layer's plan fills its slots or the next boundary is the end), "early" one boundary after a
    fifth, "late" one when drafting is over, "none" never, or a tuple of fractions of the draft length (SpecMoEOff
    at batch 1: (0.2, 0.6)).

    A plan is for the whole window: its predictions have no position.

    Differs from the artifact: copies wait in software until the link is free, instead of being queued on it.

    Source: Specter's artifact, the adaptive chunk schedule; for the fractions its adaptation of SpecMoEOff (arXiv 2508.21706).

    >>> ChunkedLookahead("early").boundaries(draft_length=10)
    [2]
    """

    reads_routing = True

    def __init__(self, schedule: Schedule = "adaptive", first_draft_us: float = 1000.0) -> None:
        if isinstance(schedule, str) and schedule not in SCHEDULES:
            raise ValueError(
                f"A chunk schedule is one of {', '.join(SCHEDULES)} or a tuple of fractions; got {schedule!r}. Give one of these."
            )
        self.schedule, self.first_draft_us = schedule, first_draft_us
        self.new_request()
        self.name = f"chunked lookahead ({schedule})"
        self.view: DeviceView | None = None

    def new_request(self) -> None:
        """No draft step has been timed."""
        self.draft_us = self.first_draft_us

    def bind(self, view: DeviceView) -> None:
        """Given by the pipeline: slots, what is absent, the link's rate."""
        self.view = view

    def boundaries(self, draft_length: int) -> list[int]:
        """The boundaries known before drafting, in draft steps (for "adaptive" the first only)."""
        first = max(1, math.floor(0.2 * draft_length))
        if isinstance(self.schedule, tuple):
            return sorted({max(1, math.ceil(fraction * draft_length)) for fraction in self.schedule})
        return {"adaptive": [first], "early": [first], "late": [draft_length], "none": []}[self.schedule]

    def step_begins(self, step: int, position: int, length: int) -> Iterable[Prediction]:
        """An empty count table; nothing is predicted before drafting."""
        assert self.view is not None, "a pipeline binds its pieces"
        self._counts: dict[int, Counter[int]] = {}
        self._length, self._boundaries = length, self.boundaries(length)
        self._planned: set[ExpertKey] = set()
        self._last_us = self.view.now_us()
        return ()

    def drafted(self, step: int, token: DraftToken, horizon: int) -> Iterable[Prediction]:
        """Count; at a boundary, the top M of every layer in layer order."""
        assert self.view is not None
        now = self.view.now_us()
        self.draft_us = 0.75 * self.draft_us + 0.25 * (now - self._last_us)
        self._last_us = now
        for layer, experts in enumerate(routing_of(token).experts):
            self._counts.setdefault(layer, Counter()).update(experts[0].tolist())
        done = horizon + 1
        if done not in self._boundaries:
            return ()
        plan, new_bytes, full = self._plan(step, horizon)
        if self.schedule == "adaptive" and not full:
            following = done + max(1, math.ceil(new_bytes / max(self.view.link_rate() * self.draft_us, 1e-9)))
            if following < self._length:
                self._boundaries.append(following)
        return plan

    def _plan(self, step: int, horizon: int) -> tuple[list[Prediction], int, bool]:
        """The top M by count (then by id) of each layer, the bytes that are newly missing, and whether all plans are full."""
        assert self.view is not None
        plan, new_bytes, full = [], 0, True
        for layer, counts in sorted(self._counts.items()):
            slots = self.view.slots(layer)
            top = sorted(counts, key=lambda e: (-counts[e], e))[:slots]
            full = full and len(top) == slots
            for expert in top:
                key = ExpertKey(layer, expert)
                plan.append(Prediction(step, -1, key, counts[expert] / (horizon + 1), horizon))
                if key not in self._planned and self.view.absent(key):
                    new_bytes += self.view.blob_bytes(layer)
                self._planned.add(key)
        return plan, new_bytes, full
