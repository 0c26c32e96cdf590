"""The experts seam: the one place where a transformers MoE asks for its experts.

transformers dispatches the experts of a layer through a registry. Registering an implementation of our own shows, for
every architecture, ``(hidden_states, top_k_index, top_k_weights)``: routing, residency and compute hang there, while
attention, routers, norms and caches stay transformers' own. No ``forward`` is replaced and no per-model code exists.

The implementation is chosen in a *copy* of the config that only the experts modules see, so a model that shares its
config with another, or is switched by ``generate``, isn't disturbed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from specter_lab.pieces import ExpertServer
from specter_lab.records import ExpertKey, LayerCall
from specter_lab.routers import Routers

IMPLEMENTATION = "specter_offload"


def experts_modules(model: nn.Module) -> dict[str, Any]:
    """The modules whose experts go through the registry, by name, in layer order."""
    return {name: m for name, m in model.named_modules() if hasattr(m, "is_transposed") and hasattr(m, "has_gate")}


def expert_forward(module: Any, rows: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """One expert on its rows, by the flags that transformers' decorator puts on ``module``.

    ``rows``: (rows, hidden). ``weights``: the expert's tensors; dense ones are brought to the dtype of ``rows``
    (exact when they were stored narrower), quantized ones bring ``rows`` to theirs. Returns (rows, hidden).
    """
    up_name = "gate_up_proj" if module.has_gate else "up_proj"
    up, down = weights[up_name], weights["down_proj"]
    quantized = hasattr(up, "qtype")  # quanto's; MXFP4 is unpacked by the ``to`` below, as dense ones are widened
    dtype = up.dtype if quantized else rows.dtype
    hidden = rows.to(dtype)

    def project(x: Tensor, name: str, weight: Tensor) -> Tensor:
        if quantized:
            y = functional.linear(x, weight)
        elif module.is_transposed:
            y = x @ weight.to(dtype)
        else:
            y = functional.linear(x, weight.to(dtype))
        return y + weights[name + "_bias"].to(dtype) if module.has_bias else y

    hidden = project(hidden, up_name, up)
    hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
    hidden = project(hidden, "down_proj", down)
    if module.has_post_expert_norm:
        hidden = module.post_expert_norm(hidden)
    return hidden.to(rows.dtype)


@dataclass(frozen=True)
class _Place:
    """What an attached experts module knows of itself."""

    seam: ExpertsSeam
    layer: int


def _offload_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The registered implementation: (positions, hidden), (positions, k), (positions, k) -> (positions, hidden)."""
    place: _Place = module._specter_place
    if top_k_weights.shape != top_k_index.shape:  # some routers hand on a weight for every expert instead of the picked ones
        top_k_weights = top_k_weights.gather(1, top_k_index.clamp(max=top_k_weights.shape[1] - 1))
    return place.seam.run_layer(place.layer, module, hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _offload_experts)


class ExpertsSeam:
    """Attaches to the experts modules of one model and runs them from whatever server is set.

    >>> import specter_lab as sl
    >>> with sl.load_moe("tiny-moe") as moe: sum(p.device.type == "meta" for p in moe.model.parameters())
    16
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: tuple[Any, ...] = tuple(experts_modules(model).values())
        self.routers: Routers | None = None
        self.sum_dtypes: dict[int, torch.dtype] = {}
        self.attached = False
        self._server: ExpertServer | None = None
        self._calls: list[LayerCall] = []
        self._probed: dict[int, tuple[Tensor, Tensor, Tensor]] | None = None
        self._originals: list[tuple[Any, dict[str, nn.Parameter]]] = []

    def experts(self, layer: int) -> int:
        """Number of routed experts of that MoE layer."""
        return int(next(iter(self.modules[layer]._parameters.values())).shape[0])

    def tensors(self, key: ExpertKey) -> dict[str, Tensor]:
        """One expert's own slices of the module's stacked parameters (views, while not attached)."""
        return {name: p.data[key.expert] for name, p in self.modules[key.layer]._parameters.items()}

    def refuse_second(self) -> None:
        """``RuntimeError`` if this model's experts are out already, whoever took them."""
        if any(hasattr(m, "_specter_place") for m in self.modules):
            raise RuntimeError(
                "A model can be attached once: its experts have left it already. "
                "Use the MoE object that holds them, or call its detach() first."
            )

    def attach(self, take_layer: Callable[[int], None]) -> None:
        """Empty each layer after ``take_layer(layer)`` has copied its experts, then dispatch to this seam.

        Parameters turn into ``meta`` ones, so that nothing but a server can serve them. If ``take_layer`` raises,
        the model is left to ``detach``, which the caller must run with what was taken.
        """
        self.refuse_second()
        self.attached = True
        for layer, module in enumerate(self.modules):
            take_layer(layer)
            originals = dict(module._parameters)
            self._originals.append((module.config, originals))
            for name, parameter in originals.items():
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
                if parameter.is_meta:  # a streamed model's: what detach puts there is made now
                    device = next(p.device for p in self.model.parameters() if not p.is_meta)
                    originals[name] = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=device))
                else:
                    parameter.data = parameter.data.new_empty(0)
            self._dispatch(layer, module)
        if self.routers is not None:
            self.routers.watch()

    def _dispatch(self, layer: int, module: Any) -> None:
        module.config = copy.copy(module.config)
        module.config._experts_implementation = IMPLEMENTATION
        module._specter_place = _Place(self, layer)

    def detach(self, give_back: Callable[[int, str], Tensor]) -> None:
        """Put every parameter object back with the values ``give_back(layer, name)``, and every config. Idempotent."""
        for layer, (config, originals) in enumerate(self._originals):
            module = self.modules[layer]
            for name, parameter in originals.items():
                parameter.data = give_back(layer, name).to(parameter)  # its dtype and device
                module._parameters[name] = parameter
            module.config = config
            del module._specter_place
        self._originals.clear()
        self.attached = False
        if self.routers is not None:
            self.routers.unwatch()

    @contextmanager
    def probed(self) -> Iterator[dict[int, tuple[Tensor, Tensor, Tensor]]]:
        """Inside, experts give zeros without being read; yields the first arguments that each layer is called with."""
        before = [(module.config, vars(module).get("_specter_place")) for module in self.modules]
        self._probed = {}
        try:
            for layer, module in enumerate(self.modules):
                self._dispatch(layer, module)
            yield self._probed
        finally:
            self._probed = None
            for module, (config, place) in zip(self.modules, before, strict=True):
                module.config = config
                vars(module).pop("_specter_place", None)
                if place is not None:
                    module._specter_place = place

    @contextmanager
    def serving(self, server: ExpertServer) -> Iterator[list[LayerCall]]:
        """While inside, ``server`` hands out the experts; yields the list that the layer calls are collected in."""
        before = (self._server, self._calls)
        calls: list[LayerCall] = []
        self._server, self._calls = server, calls
        try:
            yield calls
        finally:
            self._server, self._calls = before
            if self.routers is not None:
                self.routers.last = None  # it holds the states of a whole prompt

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, another forward of this model may run, or go on, or stop halfway; afterwards this one's goes on as if it hadn't."""
        before = (self._server, self._calls)
        with self.routers.lent() if self.routers is not None else nullcontext():
            try:
                yield
            finally:
                self._server, self._calls = before

    def run_layer(self, layer: int, module: Any, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """One layer's experts, served in any order, summed in id order as eager transformers does."""
        if self._probed is not None:
            self._probed.setdefault(layer, (hidden, experts, weights))
            return torch.zeros_like(hidden)
        if self._server is None:
            raise RuntimeError(
                f"An attached model runs its experts from a pipeline: MoE layer {layer} was called without one. "
                "Use Pipeline.generate(), or detach() the model first."
            )
        call, groups = _group(layer, hidden, experts, weights, self.experts(layer))
        self._calls.append(replace(call, hidden=hidden.new_empty(0)))  # a long prompt's states of all layers at once would be large
        asked = self.routers.last if self.routers is not None else None
        if asked is not None and asked[0] == layer:
            call = replace(call, hidden=asked[1].states)
        parts: dict[int, Tensor] = {}

        def compute(expert: int, tensors: Mapping[str, Tensor]) -> None:
            token, rank = groups[expert]
            rows = expert_forward(module, hidden if token is None else hidden[token], tensors)
            scale = weights[:, rank, None] if token is None else weights[token, rank, None]
            parts[expert] = rows * scale

        self._server.serve(call, compute)
        out = torch.zeros_like(hidden, dtype=self.sum_dtypes.get(layer, hidden.dtype))
        for expert in call.needed:
            token = groups[expert][0]
            if token is None:
                out += parts[expert].to(out.dtype)
            else:
                out.index_add_(0, token, parts[expert].to(out.dtype))
        return out.to(hidden.dtype)


_Groups = dict[int, tuple[Tensor | None, Any]]


def _group(layer: int, hidden: Tensor, experts: Tensor, weights: Tensor, count: int) -> tuple[LayerCall, _Groups]:
    """Which rows and ranks use each expert, in eager's order (rank first). Ids >= count (skip experts) are left out."""
    groups: _Groups = {}
    if experts.shape[0] == 1 and len(set(picked := experts[0].tolist())) == len(picked):  # decoding: the rows are the one row
        for rank, expert in enumerate(picked):
            if expert < count:
                groups[expert] = (None, rank)
        needed = tuple(sorted(groups))
        return LayerCall(layer, experts, weights, hidden, needed, (1,) * len(needed)), groups
    flat = experts.T.reshape(-1)
    order = torch.argsort(flat, stable=True)
    ids, sizes = torch.unique_consecutive(flat[order], return_counts=True)
    positions = experts.shape[0]
    needed_rows = {}
    for expert, index in zip(ids.tolist(), order.split(sizes.tolist()), strict=True):
        if expert < count:
            groups[expert] = (index % positions, index // positions)
            needed_rows[expert] = index.numel()
    return LayerCall(layer, experts, weights, hidden, tuple(needed_rows), tuple(needed_rows.values())), groups
