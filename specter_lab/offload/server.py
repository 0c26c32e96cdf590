"""Runs a layer's experts: from a bank that is wholly on the device, from slots filled over the link, or on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from specter_lab.offload.prefetcher import Prefetcher
from specter_lab.pieces import Compute, ExpertStore, Machine
from specter_lab.records import ExpertKey, LayerCall, Prediction


class ResidentServer:
    """Serves a bank whose experts are all on the device: no transfers, one compute segment a layer."""

    def __init__(self, bank: ExpertStore, machine: Machine, lane: str, step: int) -> None:
        self.bank, self.machine, self.lane, self.step = bank, machine, lane, step

    def serve(self, call: LayerCall, compute: Compute) -> None:
        """Each needed expert in id order."""
        self.machine.compute(self.lane, "attention", step=self.step, layer=call.layer, tokens=call.experts.shape[0])
        for expert in call.needed:
            compute(expert, self.bank.own_weights(ExpertKey(call.layer, expert)))
        self.machine.compute(self.lane, "expert", step=self.step, layer=call.layer, tokens=sum(call.rows), experts=len(call.needed))


class MissSplit(Protocol):
    """Decides which of a layer's missing experts the host computes instead of the link fetching them."""

    name: str

    def on_host(
        self, missing: dict[ExpertKey, int], moved: Callable[[ExpertKey], int], read: Callable[[ExpertKey], int], machine: Machine
    ) -> set[ExpertKey]:
        """A subset of ``missing`` (key -> rows that use it, those least worth keeping first).

        ``moved`` and ``read``: an expert's bytes on link and host. 0 are moved of one that is on the link already: it is there
        when the link's backlog is over.
        """


class OffloadServer:
    """Serves a pass of the target: residents first, missing experts while those compute, each fetched at most once.

    More needed experts than slots run in waves: a used expert's slot is free for the next. With a ``split``, some of
    the missing run on the host beside the device, with the full-precision experts of ``host_store``. Where it would wait, it
    calls ``meanwhile`` with the time in us that it has; True if something was done in it.
    """

    def __init__(
        self,
        prefetcher: Prefetcher,
        machine: Machine,
        step: int,
        position: int,
        predict: Callable[[LayerCall], Iterable[Prediction]],
        split: MissSplit | None = None,
        host_store: ExpertStore | None = None,
        meanwhile: Callable[[float], bool] | None = None,
    ) -> None:
        self.prefetcher, self.machine, self.split, self.meanwhile = prefetcher, machine, split, meanwhile
        self.host_store = host_store or prefetcher.store
        self.step, self.position, self.predict = step, position, predict
        self.needed: dict[ExpertKey, int] = {}
        self.layer = -1

    def serve(self, call: LayerCall, compute: Compute) -> None:
        """Each needed expert as soon as it is resident; it can't be evicted while it computes."""
        machine, prefetcher, residency = self.machine, self.prefetcher, self.prefetcher.residency
        machine.compute("target", "attention", step=self.step, layer=call.layer, tokens=call.experts.shape[0])
        self.layer = call.layer
        pending = {ExpertKey(call.layer, e): rows for e, rows in zip(call.needed, call.rows, strict=True)}
        self.needed |= pending
        with machine.lock:
            hosted = self._hosted(pending)
            prefetcher.open(self.step, self.position, call, hosted)
            prefetcher.refill(hosted)
            if prefetcher.waiting:
                machine.notify()
        for key in sorted(hosted):
            work = partial(compute, key.expert, self.host_store.own_weights(key))
            machine.on_host(key, self.host_store.blob_bytes(key.layer), work, step=self.step, tokens=pending.pop(key))
        predictions = list(self.predict(call))
        if predictions:
            with machine.lock:
                prefetcher.want(predictions)
                machine.notify()
        while pending:
            self._serve_one(pending, compute)
        if hosted:
            while self.meanwhile is not None and self.meanwhile(machine.host_backlog_us()):
                pass
            machine.join_host(step=self.step, layer=call.layer)
            for key in sorted(hosted):
                residency.eviction.used(key)  # popularity doesn't ask where an expert was computed

    def _hosted(self, pending: dict[ExpertKey, int]) -> set[ExpertKey]:
        """What the host computes: absent experts, and one that is on the link if the host is sooner (it lands all the same)."""
        if self.split is None:
            return set()
        residency = self.prefetcher.residency
        missing = {key: rows for key, rows in pending.items() if residency.state(key) != "resident"}
        if not missing:
            return set()
        frequency = getattr(residency.eviction, "frequency", None)
        if frequency is not None:  # those worth keeping are worth fetching
            missing = dict(sorted(missing.items(), key=lambda item: frequency(item[0])))

        def moved(key: ExpertKey) -> int:
            return 0 if residency.state(key) == "loading" else self.prefetcher.blob_bytes(key.layer)

        return self.split.on_host(missing, moved, lambda key: self.host_store.blob_bytes(key.layer), self.machine)

    def _serve_one(self, pending: dict[ExpertKey, int], compute: Compute) -> None:
        machine, prefetcher, residency = self.machine, self.prefetcher, self.prefetcher.residency
        with machine.lock:
            key = prefetcher.ready(pending)
            if key is None:
                awaited, request_id = prefetcher.first_to_come(pending)
            else:
                weights, request_id = residency.acquire(key), residency.request_of(key)
        if key is None:
            if self.meanwhile is None or not self.meanwhile(machine.link_backlog_us()):
                machine.wait(awaited, request_id, step=self.step)
            return
        machine.trace.use(request_id)
        if residency.to_rebuild(key):
            weights = residency.rebuild(key)
            machine.compute("target", "rebuild", step=self.step, layer=key.layer, expert=key.expert, request_id=request_id)
        compute(key.expert, weights)
        machine.compute(
            "target", "expert", step=self.step, layer=key.layer, expert=key.expert, tokens=pending.pop(key), request_id=request_id
        )
        with machine.lock:
            prefetcher.done(key)
            if prefetcher.waiting:  # waking the link for nothing costs the compute thread
                machine.notify()
