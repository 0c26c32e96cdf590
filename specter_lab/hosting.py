"""Where a model's routed experts are: in its modules, or in a host store while pipelines need them out."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from specter_lab.geometry import refuse_absent
from specter_lab.loading.host_memory import available_bytes
from specter_lab.quantize import Dense, ExpertBank, Format, narrowest_exact_dtype
from specter_lab.records import ExpertKey, Geometry
from specter_lab.seam import ExpertsSeam


class HostedExperts:
    """The routed experts of one model: moved to a host ``store`` by ``attach``, put back exactly by ``detach``.

    A source of experts for ``ExpertBank.pack``, attached or not. Each pipeline holds a lease: the first attaches, the
    last detaches, unless the user did either by hand.

    >>> import specter_lab as sl
    >>> with sl.load_moe("tiny-moe") as moe: moe.store.name
    'bfloat16'
    """

    geometry: Geometry
    name: str

    def __init__(self, model: Any, seam: ExpertsSeam) -> None:
        self.model, self.seam = model, seam
        self._parts: list[ExpertBank] = []
        self._store: ExpertBank | None = None
        self._leases = 0
        self._own_attach = False
        self._streamed = False
        self._drafts: Mapping[Format, Callable[[], ExpertBank]] = {}

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return torch.device(self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return self.geometry.layers

    def experts(self, layer: int) -> int:
        """Number of routed experts of that MoE layer."""
        return self.geometry.experts[layer]

    def tensors(self, key: ExpertKey) -> dict[str, Tensor]:
        """One expert's tensors, in the model's dtype."""
        if self._store is None:
            return self.seam.tensors(key)
        return {name: tensor.to(self.dtype) for name, tensor in self._store.own_weights(key).items()}

    def transposed(self, layer: int) -> bool:
        """Whether that layer's weights are (in, out)."""
        return bool(self.seam.modules[layer].is_transposed)

    @property
    def store(self) -> ExpertBank:
        """The host's full-precision experts; there while attached."""
        if self._store is None:
            raise RuntimeError(f"The host store exists while a model is attached; {self!r} isn't. Call attach(), or use it in a pipeline.")
        return self._store

    def attach(self) -> Self:
        """Move the experts out of the model; ``RuntimeError`` if they are out already."""
        self.seam.refuse_second()
        refuse_absent(self.model, self.name, experts=True)
        dtype = narrowest_exact_dtype(self)

        def take(layer: int) -> None:
            part = ExpertBank.pack(_OneLayer(self, layer), Dense(dtype))
            self._parts.append(part.to("cpu").page_locked() if self.device.type == "cuda" else part)

        try:
            self.seam.attach(take)
            self._store = ExpertBank.join(self._parts)
        except BaseException:  # also an interrupt: never a model with half of its experts
            self._put_back()
            raise
        return self

    def adopt(self, store: ExpertBank, drafts: Mapping[Format, Callable[[], ExpertBank]] | None = None) -> Self:
        """Attach with a store that is there already: for a model whose experts are on meta. ``drafts`` load saved draft banks."""
        self._parts = store.split()
        self.seam.attach(lambda layer: None)
        self._store, self._drafts, self._streamed = store, drafts or {}, True
        return self

    def detach(self) -> None:
        """Put every expert back. Idempotent; ``RuntimeError`` while a pipeline still needs them out, or for want of memory."""
        if self._leases:
            raise RuntimeError(f"A model is detached after its pipelines are closed; {self._leases} are open. Call close() on each.")
        needed, available = sum(map(operator.mul, self.geometry.experts, self.geometry.expert_bytes)), available_bytes()
        if self._streamed and needed > available:
            raise RuntimeError(
                f"Detaching puts all experts into the model, beside the store; that takes {needed:,} bytes here, {available:,} are free. "
                "Keep it attached: pipelines need no more than the store."
            )
        self._put_back()

    def lease(self) -> None:
        """A pipeline begins to use the store: attached if it wasn't."""
        if not self.seam.attached:
            self.attach()
            self._own_attach = True
        self._leases += 1

    def release(self) -> None:
        """A pipeline is closed: the last one of an automatic attach detaches."""
        self._leases -= 1
        if not self._leases and self._own_attach:
            self.detach()

    def __enter__(self) -> Self:
        return self if self.seam.attached else self.attach()

    def __exit__(self, *exception: object) -> None:
        if not self._streamed:  # such a model was never whole, and may not fit
            self.detach()

    def _put_back(self) -> None:
        def stacked(layer: int, name: str) -> Tensor:
            part = self._parts[layer]
            return torch.stack([part.own_weights(ExpertKey(0, e))[name] for e in range(part.experts(0))])

        self.seam.detach(stacked)
        self._parts, self._store, self._own_attach, self._streamed = [], None, False, False


class _OneLayer:
    """One layer as a source of its own, so that packing can empty the model layer by layer."""

    layers = 1

    def __init__(self, hosted: HostedExperts, layer: int) -> None:
        self.hosted, self.layer = hosted, layer

    def experts(self, layer: int) -> int:
        return self.hosted.seam.experts(self.layer)

    def tensors(self, key: ExpertKey) -> dict[str, Tensor]:
        return self.hosted.seam.tensors(ExpertKey(self.layer, key.expert))

    def transposed(self, layer: int) -> bool:
        return self.hosted.transposed(self.layer)
