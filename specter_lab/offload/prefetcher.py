"""What crosses the link next: demands first, then predictions by deadline and value.

Intents stay in software, since a copy that was issued can't be taken back: the link asks for its next copy only when
it is free. A demand therefore waits for at most one copy. Callers hold the machine's lock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from specter_lab.offload.residency import Residency
from specter_lab.pieces import ExpertStore, Machine
from specter_lab.records import ExpertKey, LayerCall, Prediction, Transfer


@dataclass
class _Intent:
    """A wanted expert and the predictions (by position) that want it; the request is None until a copy is needed."""

    request_id: int | None
    step: int
    position: int
    odds: dict[int, float] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """Expected number of positions that use it."""
        return sum(self.odds.values())


class Prefetcher:
    """The link's source: merges what predictions want with what layers demand, against what is resident or in flight.

    >>> import specter_lab as sl
    >>> sl.Pipeline("tiny-moe", slots=4).prefetcher.next_transfer() is None
    True
    """

    def __init__(self, store: ExpertStore, residency: Residency, machine: Machine) -> None:
        self.store, self.residency, self.machine = store, residency, machine
        self.reset()

    def reset(self) -> None:
        """Drop everything that waits; nothing may be in flight."""
        self._intents: list[dict[int, _Intent]] = [{} for _ in range(self.store.layers)]
        self._demands: dict[ExpertKey, _Intent] = {}
        self._protected: set[ExpertKey] = set()
        self._flying: dict[ExpertKey, int] = {}
        self._next_id = 0
        self._rate = 12e3
        self._issued_us = 0.0

    def slots(self, layer: int) -> int:
        """Device slots of that layer."""
        return self.residency.slots[layer]

    def absent(self, key: ExpertKey) -> bool:
        """Neither resident nor on the link."""
        return self.residency.state(key) == "absent"

    def wanted(self, key: ExpertKey) -> bool:
        """Whether a prediction for a pass still to come wants it."""
        return key.expert in self._intents[key.layer]

    def blob_bytes(self, layer: int) -> int:
        """What one expert of that layer moves."""
        return self.store.blob_bytes(layer)

    def now_us(self) -> float:
        """The machine's time."""
        return self.machine.now_us()

    def link_rate(self) -> float:
        """Bytes a microsecond: a moving average (0.75 old, 0.25 new) over copies, from 12 GB/s.

        Source: Specter's artifact, the estimates of its chunk schedule.
        """
        return self._rate

    @property
    def planned(self) -> tuple[ExpertKey, int] | None:
        """A copy that is on the link, with its request; None when all have arrived (an idle link was notified before)."""
        return next(iter(self._flying.items()), None)

    @property
    def waiting(self) -> bool:
        """Whether anything may be worth a look from an idle link."""
        return bool(self._demands) or any(self._intents)

    def want(self, predictions: Iterable[Prediction]) -> None:
        """Add predictions; an expert already resident, loading or wanted is only wanted more (and kept from prefetches)."""
        for p in predictions:
            intent = self._intents[p.key.layer].setdefault(p.key.expert, _Intent(None, p.step, p.position))
            intent.odds[p.position] = max(p.probability, intent.odds.get(p.position, 0.0))
            state = self.residency.state(p.key)
            request_id = self.residency.request_of(p.key)
            if state == "absent":
                request_id = intent.request_id = self._new_id() if intent.request_id is None else intent.request_id
            self.machine.mark(
                "predict", step=p.step, position=p.position, layer=p.key.layer, expert=p.key.expert, tokens=p.horizon,
                request_id=request_id, reason=state, value=p.probability,
            )  # fmt: skip

    def open(self, step: int, position: int, call: LayerCall, hosted: Collection[ExpertKey] = ()) -> None:
        """A layer begins: judge each needed expert (hit, late, miss), demand the absent ones, drop the layer's intents.

        A needed expert that was only intended is a miss: nothing of it was on its way. ``hosted`` ones are computed on
        the host and never demanded.
        """
        self.machine.trace.needed(step, call.layer, call.needed)
        later = {expert: intent for expert, intent in self._intents[call.layer].items() if intent.step > step}
        intents = {expert: intent for expert, intent in self._intents[call.layer].items() if intent.step <= step}
        self._intents[call.layer] = later
        for expert, rows in zip(call.needed, call.rows, strict=True):
            key = ExpertKey(call.layer, expert)
            state = self.residency.state(key)
            intent = None if key in hosted else intents.pop(expert, None)
            request_id = self.residency.request_of(key)
            if key in hosted:
                request_id = -1
            elif state == "absent":
                request_id = self._new_id() if intent is None or intent.request_id is None else intent.request_id
                self._demands[key] = _Intent(request_id, step, position)
            if key not in hosted:
                self._protected.add(key)
            self.machine.mark(
                "need", step=step, position=position, layer=key.layer, expert=expert, tokens=rows,
                request_id=request_id, reason="host" if key in hosted else "",
                outcome={"resident": "hit", "loading": "late", "absent": "miss"}[state],
            )  # fmt: skip
        if step > 0:
            for row, picked in enumerate(call.experts.tolist()):
                for expert in picked:
                    self.machine.mark("route", step=step, position=position + row, layer=call.layer, expert=expert)
        self._drop(call.layer, intents, "not needed")

    def cancel(self, step: int, reason: str) -> None:
        """Drop all intents of passes up to ``step``: their tokens are decided."""
        for layer, intents in enumerate(self._intents):
            self._drop(layer, {e: i for e, i in intents.items() if i.step <= step}, reason)

    def _drop(self, layer: int, dropped: dict[int, _Intent], reason: str) -> None:
        for expert, intent in dropped.items():
            self._intents[layer].pop(expert, None)
            if intent.request_id is not None:
                self.machine.mark(
                    "cancel",
                    step=intent.step,
                    position=intent.position,
                    layer=layer,
                    expert=expert,
                    request_id=intent.request_id,
                    reason=reason,
                )

    def ready(self, pending: Iterable[ExpertKey]) -> ExpertKey | None:
        """The first of ``pending`` that can be computed with now."""
        return next((key for key in pending if self.residency.state(key) == "resident"), None)

    def first_to_come(self, pending: Collection[ExpertKey]) -> tuple[ExpertKey, int]:
        """Which of ``pending`` (none resident) arrives first, and its request: the one in flight, else the first demanded."""
        for key, request_id in self._flying.items():
            if key in pending:
                return key, request_id
        return next((key, demand.request_id) for key, demand in self._demands.items() if key in pending and demand.request_id is not None)

    def done(self, key: ExpertKey) -> None:
        """The layer has used ``key``: its slot may go."""
        self.residency.release(key)
        self._protected.discard(key)

    def next_transfer(self) -> Transfer | None:
        """The most urgent copy that has a slot. A blocked demand holds the link back: a slot is about to be free."""
        for key, demand in self._demands.items():
            transfer = self._issue(key, demand, "demand", self._protected, spare=0)
            if transfer is not None:
                del self._demands[key]
            return transfer
        for layer, intents in enumerate(self._intents):
            transfer = self._best(layer, intents) if intents else None
            if transfer is not None:
                return transfer
        return None

    def _best(self, layer: int, intents: dict[int, _Intent]) -> Transfer | None:
        keys = {expert: ExpertKey(layer, expert) for expert in intents}
        absent = [e for e, key in keys.items() if self.residency.state(key) == "absent"]
        if not absent:
            return None
        expert = min(absent, key=lambda e: (intents[e].step, -intents[e].value, e))
        # the last slot that a demand could use stays out of reach, and what is wanted isn't evicted for what is wanted
        return self._issue(keys[expert], intents[expert], "prefetch", self._protected | set(keys.values()), spare=1)

    def arrived(self, transfer: Transfer) -> None:
        """The link is done with ``transfer``."""
        del self._flying[transfer.key]
        taken_us = max(self.machine.now_us() - self._issued_us, 1e-3)
        self._rate = 0.75 * self._rate + 0.25 * transfer.bytes / taken_us
        self.residency.arrived(transfer.key)

    def _issue(self, key: ExpertKey, intent: _Intent, reason: str, protected: set[ExpertKey], *, spare: int) -> Transfer | None:
        if intent.request_id is None:
            intent.request_id = self._new_id()
        request_id = intent.request_id
        placed = self.residency.place(key, request_id, protected, spare=spare)
        if placed is None:
            return None
        slot, victim = placed
        intent.request_id = None  # spent: should this expert be forgotten and wanted again, that is another copy
        size = self.store.blob_bytes(key.layer)
        if victim is not None:
            self.machine.mark("evict", layer=victim.layer, expert=victim.expert, bytes=size, request_id=request_id, reason=reason)
        self._flying[key] = request_id
        self._issued_us = self.machine.now_us()
        return Transfer(
            request_id, key, size, reason, intent.step, slot, intent.position,
            source=self.store.blob(key), destination=self.residency.destination(key.layer, slot),
            mapped=getattr(self.store, "mapped", False),
        )  # fmt: skip

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1
