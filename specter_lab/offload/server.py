"""Hands experts to a layer's loop: from a bank that is wholly on the device, or from slots filled over the link."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor

from specter_lab.offload.prefetcher import Prefetcher
from specter_lab.pieces import ExpertStore, Machine
from specter_lab.records import ExpertKey, LayerCall, Prediction


class ResidentServer:
    """Serves a bank whose experts are all on the device: no transfers, one compute segment a layer."""

    def __init__(self, bank: ExpertStore, machine: Machine, lane: str, step: int) -> None:
        self.bank, self.machine, self.lane, self.step = bank, machine, lane, step

    def serve(self, call: LayerCall) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """Each needed expert in id order."""
        rows = call.experts.shape[0]
        self.machine.compute(self.lane, "attention", step=self.step, layer=call.layer, tokens=rows)
        for expert in call.needed:
            yield expert, self.bank.own_weights(ExpertKey(call.layer, expert))
        self.machine.compute(self.lane, "expert", step=self.step, layer=call.layer, tokens=sum(call.rows), experts=len(call.needed))


class OffloadServer:
    """Serves a pass of the target: residents first, missing experts while those compute, each fetched at most once.

    More needed experts than slots run in waves: a used expert's slot is free for the next.
    """

    def __init__(
        self,
        prefetcher: Prefetcher,
        machine: Machine,
        step: int,
        position: int,
        predict: Callable[[LayerCall], Iterable[Prediction]],
    ) -> None:
        self.prefetcher, self.machine = prefetcher, machine
        self.step, self.position, self.predict = step, position, predict

    def serve(self, call: LayerCall) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """Each needed expert as soon as it is resident; it can't be evicted until the next is asked for."""
        machine, prefetcher, residency = self.machine, self.prefetcher, self.prefetcher.residency
        machine.compute("target", "attention", step=self.step, layer=call.layer, tokens=call.experts.shape[0])
        with machine.lock:
            prefetcher.open(self.step, self.position, call)
            if prefetcher.waiting:
                machine.notify()
        predictions = list(self.predict(call))
        if predictions:
            with machine.lock:
                prefetcher.want(predictions)
                machine.notify()
        pending = {ExpertKey(call.layer, e): rows for e, rows in zip(call.needed, call.rows, strict=True)}
        while pending:
            with machine.lock:
                key = prefetcher.ready(pending)
                if key is None:
                    awaited, request_id = prefetcher.first_to_come(pending)
                else:
                    weights = residency.acquire(key)
                    request_id = residency.request_of(key)
            if key is None:
                machine.wait(awaited, request_id, step=self.step)
                continue
            machine.trace.use(request_id)
            yield key.expert, weights
            rows = pending.pop(key)
            machine.compute("target", "expert", step=self.step, layer=key.layer, expert=key.expert, tokens=rows, request_id=request_id)
            with machine.lock:
                prefetcher.done(key)
                if prefetcher.waiting:  # waking the link for nothing costs the compute thread
                    machine.notify()
