"""Runs a draft's experts from the slots where they hold the exact one, and from the draft's codes elsewhere."""

from __future__ import annotations

from specter_lab.offload.residency import Residency
from specter_lab.offload.server import ResidentServer
from specter_lab.pieces import Compute, ExpertStore, Machine
from specter_lab.records import ExpertKey, LayerCall


class SlotsFirstServer(ResidentServer):
    """Serves a layer with ``residency``'s exact experts and, for what isn't resident, with ``bank``'s: no transfers.

    A slot can't be evicted while the draft computes with it; being drafted with is no use that eviction counts. Segments
    of exact experts name their expert, so that a simulated machine charges them like the target's.
    """

    def __init__(self, bank: ExpertStore, residency: Residency, machine: Machine, lane: str, step: int) -> None:
        super().__init__(bank, machine, lane, step)
        self.residency = residency

    def serve(self, call: LayerCall, compute: Compute) -> None:
        """The coded ones in id order, then the exact ones."""
        machine = self.machine
        machine.compute(self.lane, "attention", step=self.step, layer=call.layer, tokens=call.experts.shape[0])
        rows = {ExpertKey(call.layer, expert): n for expert, n in zip(call.needed, call.rows, strict=True)}
        with machine.lock:
            held = {key: self.residency.acquire(key) for key in rows if self.residency.state(key) == "resident"}
        try:
            coded = [key for key in rows if key not in held]
            for key in coded:
                compute(key.expert, self.bank.own_weights(key))
            if coded:
                count = sum(map(rows.__getitem__, coded))
                machine.compute(self.lane, "expert", step=self.step, layer=call.layer, tokens=count, experts=len(coded))
            for key, weights in held.items():
                segment = {"step": self.step, "layer": key.layer, "expert": key.expert, "request_id": self.residency.request_of(key)}
                if self.residency.to_rebuild(key):
                    weights = self.residency.rebuild(key)
                    machine.compute(self.lane, "rebuild", **segment)
                compute(key.expert, weights)
                machine.compute(self.lane, "expert", tokens=rows[key], **segment)
        finally:
            with machine.lock:
                for key in held:
                    self.residency.release(key, used=False)
                machine.notify()  # a copy may have waited for one of these slots
