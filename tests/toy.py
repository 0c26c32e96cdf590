"""Small stand-ins that need no model: a store of numbered blobs, and layer calls driven through the real server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from specter_lab.machines.simulated import CostTable, LaneCosts, SimulatedMachine
from specter_lab.observe.trace import Trace
from specter_lab.offload.eviction import LRU
from specter_lab.offload.prefetcher import Prefetcher
from specter_lab.offload.residency import Residency
from specter_lab.offload.server import OffloadServer
from specter_lab.pieces import EvictionPolicy, Machine
from specter_lab.records import ExpertKey, LayerCall, Prediction


class ToyStore:
    """``layers`` x ``experts`` blobs of ``size`` bytes; expert e of layer l is filled with the byte 10 l + e + 1."""

    name = "toy"

    def __init__(self, layers: int, experts: int, size: int = 64) -> None:
        self.layers, self._experts, self.size = layers, experts, size
        values = 10 * torch.arange(layers)[:, None] + torch.arange(experts) + 1
        self._blobs = values.to(torch.uint8)[:, :, None].expand(-1, -1, size).contiguous()

    def experts(self, layer: int) -> int:
        return self._experts

    def blob_bytes(self, layer: int) -> int:
        return self.size

    def blob(self, key: ExpertKey) -> Tensor:
        return self._blobs[key.layer, key.expert]

    def weights(self, layer: int, blob: Tensor) -> Mapping[str, Tensor]:
        return {"all": blob}

    def own_weights(self, key: ExpertKey) -> Mapping[str, Tensor]:
        return {"all": self.blob(key)}


def call(layer: int, *rows: Sequence[int]) -> LayerCall:
    """A layer call with one list of experts a position."""
    experts = torch.tensor(rows)
    counts = experts.flatten().bincount()
    needed = tuple(experts.unique().tolist())
    return LayerCall(layer, experts, torch.ones(experts.shape), torch.zeros(len(rows), 1), needed, tuple(int(counts[e]) for e in needed))


class ToyRun:
    """Drives passes of layer calls through prefetcher, residency and server on a machine, as a pipeline would."""

    def __init__(
        self,
        store: ToyStore,
        slots: Sequence[int],
        machine: Machine | None = None,
        eviction: EvictionPolicy | None = None,
        poison: bool = True,
        device: str = "cpu",
    ) -> None:
        costs = LaneCosts(attention_us=10, expert_us=5, head_us=3)
        self.store = store
        self.machine: Machine = machine or SimulatedMachine(link_gb_s=store.size / 20_000, latency_us=0, costs=CostTable(costs, costs))
        self.residency = Residency(store, slots, eviction or LRU(), poison=poison, device=device)
        self.prefetcher = Prefetcher(store, self.residency, self.machine)
        self.served: list[tuple[int, int, int]] = []
        self.machine.start(self.prefetcher)

    def want(self, step: int, *keys: tuple[int, int], probability: float = 1.0, position: int = 0) -> None:
        """Predict these (layer, expert) for ``step``."""
        with self.machine.lock:
            self.prefetcher.want(Prediction(step, position, ExpertKey(*key), probability) for key in keys)
            self.machine.notify()

    def run_pass(self, step: int, calls: Iterable[LayerCall], ahead: Mapping[int, Sequence[tuple[int, int]]] | None = None) -> None:
        """One pass; ``ahead[layer]`` is predicted when that layer is called. Each expert's bytes are checked at use."""

        def predict(layer_call: LayerCall) -> list[Prediction]:
            return [Prediction(step, 0, ExpertKey(*key), 1.0) for key in (ahead or {}).get(layer_call.layer, ())]

        server = OffloadServer(self.prefetcher, self.machine, step, 0, predict)
        for layer_call in calls:

            def compute(expert: int, weights: Mapping[str, Tensor], layer: int = layer_call.layer) -> None:
                assert set(weights["all"].tolist()) == {10 * layer + expert + 1}, "a slot held other bytes than its expert's"
                self.served.append((step, layer, expert))

            server.serve(layer_call, compute)
        self.machine.compute("target", "head", step=step, tokens=1)
        with self.machine.lock:
            self.prefetcher.cancel(step, "decided")

    def finish(self) -> Trace:
        """Stop the machine and return the trace."""
        self.machine.stop()
        return self.machine.trace.finish()


def log(trace: Trace) -> list[tuple[str, str, float, float]]:
    """(lane, name, start, end) of everything with a duration, by start: ``kind`` or ``kind layer.expert``."""
    timed = trace.events[trace.events["end_us"] > trace.events["start_us"]].sort_values(["start_us", "lane"], kind="stable")
    return [(e.lane, e.kind if e.expert < 0 else f"{e.kind} {e.layer}.{e.expert}", e.start_us, e.end_us) for e in timed.itertuples()]
