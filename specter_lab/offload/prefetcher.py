"""What crosses the link next: demands first, then predictions by deadline and value, then what fills free slots.

Intents stay in software, since a copy that was issued can't be taken back: the link asks for its next copy only when
it is free. A demand therefore waits for at most one copy. Callers hold the machine's lock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from specter_lab.offload.intents import Intent, Intents
from specter_lab.offload.residency import Residency
from specter_lab.pieces import ExpertStore, Machine
from specter_lab.records import ExpertKey, LayerCall, Prediction, Transfer


class Prefetcher:
    """The link's source: merges what predictions want with what layers demand, against what is resident or in flight.

    >>> import specter_lab as sl
    >>> sl.Pipeline("tiny-moe", slots=4).prefetcher.next_transfer() is None
    True
    """

    def __init__(self, store: ExpertStore, residency: Residency, machine: Machine, *, host_store: ExpertStore | None = None) -> None:
        self.store, self.residency, self.machine, self.host_store = store, residency, machine, host_store
        self.reset()

    def reset(self) -> None:
        """Drop everything that waits; nothing may be in flight."""
        self._intents = Intents(self.store.layers, self.residency.state)
        self._demands: dict[ExpertKey, Intent] = {}
        self._protected: set[ExpertKey] = set()
        self._refills: dict[ExpertKey, None] = {}
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
        return key in self._intents

    def expected_uses(self, key: ExpertKey) -> float:
        """How many positions of the coming pass are expected to use it."""
        return self._intents.value(key)

    def experts(self, layer: int) -> int:
        """Experts of that layer, wherever they are."""
        return self.store.experts(layer)

    def blob_bytes(self, layer: int) -> int:
        """What one expert of that layer moves."""
        return self.store.blob_bytes(layer)

    def missing_us(self) -> float:
        """What link and host together need for all that is wanted and absent; of each layer's size, as if all moved at once."""
        waiting = ((layer, self._intents.missing(layer)) for layer in range(self.store.layers))
        copies = sum(count * self.machine.copy_us(self.store.blob_bytes(layer)) for layer, count in waiting if count)
        return copies * (1 - self._host_share)

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
        return bool(self._demands or self._intents or self._refills)

    def want(self, predictions: Iterable[Prediction]) -> None:
        """Add predictions; an expert already resident, loading or wanted is only wanted more (and kept from prefetches)."""
        for p in predictions:
            intent = self._intents.want(p)
            state = self.residency.state(p.key)
            request_id = self.residency.request_of(p.key)
            if state == "absent" and intent is not None:
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
        intents = self._intents.drop(call.layer, step)
        for expert, rows in zip(call.needed, call.rows, strict=True):
            key = ExpertKey(call.layer, expert)
            state = self.residency.state(key)
            intent = None if key in hosted else intents.pop(expert, None)
            request_id = self.residency.request_of(key)
            if key in hosted:
                request_id = -1
            elif state == "absent":
                request_id = self._new_id() if intent is None or intent.request_id is None else intent.request_id
                self._demands[key] = Intent(request_id, step, position)
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
        self._dropped(call.layer, intents, "not needed")

    def refill(self, hosted: Iterable[ExpertKey]) -> None:
        """The host computes these: an idle link may bring them for later, if their layer has free slots (none is evicted)."""
        for key in sorted(hosted, reverse=True):
            self._refills.pop(key, None)  # the latest go first, of a layer the lowest id
            if self.residency.free(key.layer) and self.absent(key):
                self._refills[key] = None

    def cancel(self, step: int, reason: str) -> None:
        """Drop all intents of passes up to ``step``: their tokens are decided."""
        for layer in range(self.store.layers):
            self._dropped(layer, self._intents.drop(layer, step), reason)

    def _dropped(self, layer: int, intents: dict[int, Intent], reason: str) -> None:
        for expert, intent in intents.items():
            if intent.request_id is not None:
                where = {"step": intent.step, "position": intent.position, "layer": layer, "expert": expert}
                self.machine.mark("cancel", **where, request_id=intent.request_id, reason=reason)

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
        for key in self._intents.urgent(self._host_share):
            # the last slot that a demand could use stays out of reach, and what is wanted isn't evicted for what is wanted
            protected = self._protected.union(self._intents.wanted(key.layer))
            transfer = self._issue(key, self._intents[key], "prefetch", protected, spare=1)
            if transfer is not None:
                return transfer
        while self._refills:
            key, _ = self._refills.popitem()
            if self.residency.free(key.layer) and self.absent(key):
                return self._issue(key, Intent(None, step=0, position=-1), "fill", self._protected, spare=0)
        return None

    @property
    def _host_share(self) -> float:
        """Of misses, what the host computes while the link brings the others; 0 without ``host_store``."""
        if self.host_store is None:
            return 0.0
        copy, host = self.machine.copy_us(self.store.blob_bytes(0)), self.machine.host_us(self.host_store.blob_bytes(0))
        return copy / (copy + host)

    def arrived(self, transfer: Transfer) -> None:
        """The link is done with ``transfer``."""
        del self._flying[transfer.key]
        taken_us = max(self.machine.now_us() - self._issued_us, 1e-3)
        self._rate = 0.75 * self._rate + 0.25 * transfer.bytes / taken_us
        self.residency.arrived(transfer.key)

    def _issue(self, key: ExpertKey, intent: Intent, reason: str, protected: set[ExpertKey], *, spare: int) -> Transfer | None:
        if intent.request_id is None:
            intent.request_id = self._new_id()
        request_id = intent.request_id
        placed = self.residency.place(key, request_id, protected, spare=spare)
        if placed is None:
            return None
        slot, victim = placed
        self._intents.moved(key)
        intent.request_id = None  # spent: should this expert be forgotten and wanted again, that is another copy
        size = self.store.blob_bytes(key.layer)
        if victim is not None:
            self._intents.moved(victim)
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
