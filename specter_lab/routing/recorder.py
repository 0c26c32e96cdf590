"""Watch the routers of a transformers MoE at work, and keep what they picked."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from specter_lab.routing.log import RoutingLog
from specter_lab.seam import experts_modules

__all__ = ["RouterRecorder", "RoutingLog"]


class RouterRecorder:
    """While the ``with`` block runs, each finished forward of ``model`` adds its tokens to ``log``.

    ``model`` is a transformers MoE or an object that holds one as ``.model``; requests have a batch size of 1. The
    picks are taken where the model hands them to its experts, so they are the routers' own, whatever kind of router,
    and shared experts don't appear. A forward that fails leaves nothing. Recorders nest.

    Raises ``TypeError`` for something that is no model, ``ValueError`` for a model without experts in transformers'
    registry and for a batch, ``RuntimeError`` when the block ends and nothing was recorded.

    >>> from transformers import AutoModelForCausalLM
    >>> model = AutoModelForCausalLM.from_pretrained("data/tiny-moe")
    >>> with RouterRecorder(model) as recorder:
    ...     output = model(torch.tensor([[5, 7, 11]]))
    >>> recorder.log
    RoutingLog(qwen3_moe: 3 tokens, 1 forward, 8 MoE layers, 24 experts, up to 4 a token)
    """

    def __init__(self, model: Any) -> None:
        inner = model if isinstance(model, nn.Module) else getattr(model, "model", None)
        if not isinstance(inner, nn.Module):
            raise TypeError(
                f"A recorder watches a torch module, or an object that holds one as .model; this is a {type(model).__name__}. "
                "Pass the model that AutoModelForCausalLM.from_pretrained returned."
            )
        self.model: nn.Module = inner
        modules = experts_modules(inner)
        if not modules:
            raise ValueError(
                f"A recorder needs experts that transformers dispatches through its registry; {type(inner).__name__} has 0 such "
                "modules. Either it is dense, or its family is not in the registry: pass a mixture-of-experts model that is."
            )
        self._modules = list(modules.values())
        self._expert_counts = tuple(int(next(m.parameters(recurse=False)).shape[0]) for m in self._modules)
        self._decoder_layers = tuple(_decoder_layer(name, place) for place, name in enumerate(modules))
        self._argument_names = list(inspect.signature(inner.forward).parameters)
        self._handles: list[RemovableHandle] = []
        # the running forward of each stack: a pipeline that drafts ahead leaves one halfway while another runs
        self._running: WeakKeyDictionary[greenlet, _Forward] = WeakKeyDictionary()
        self._started = 0
        self._done: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # experts, weights, tokens, positions of each forward

    def __enter__(self) -> RouterRecorder:
        if self._handles:
            raise RuntimeError("A recorder watches once at a time; this one is watching already. Nest a second RouterRecorder instead.")
        self._handles = [
            self.model.register_forward_pre_hook(self._forward_begins, with_kwargs=True),
            self.model.register_forward_hook(self._forward_ends),
            *(m.register_forward_pre_hook(self._experts_hook(layer)) for layer, m in enumerate(self._modules)),
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._running.clear()
        if kind is None and not self._done:  # an error on its way out says more than this one would
            raise RuntimeError(
                f"A recorder should see the model run; {len(self._modules)} experts modules were watched through {self._started} forwards "
                "and none was called. Call this model, not a copy or a part of it, inside the with block."
            )

    @property
    def log(self) -> RoutingLog:
        """Everything recorded so far, also inside the block."""
        ranks = self._done[0][0].shape[2] if self._done else 0  # a model's routers pick equally many in every forward
        no_picks, no_rows = torch.empty(0, len(self._modules), ranks), torch.empty(0, dtype=torch.int64)
        return RoutingLog(
            experts=torch.cat([no_picks.long(), *(experts for experts, *_ in self._done)]),
            weights=torch.cat([no_picks, *(weights for _, weights, *_ in self._done)]),
            tokens=torch.cat([no_rows, *(tokens for _, _, tokens, _ in self._done)]),
            positions=torch.cat([no_rows, *(positions for *_, positions in self._done)]),
            forwards=torch.cat([no_rows, *(torch.full_like(tokens, i) for i, (_, _, tokens, _) in enumerate(self._done))]),
            expert_counts=self._expert_counts,
            decoder_layers=self._decoder_layers,
            model_type=str(getattr(getattr(self.model, "config", None), "model_type", type(self.model).__name__)),
        )

    def _forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(self._argument_names, args, strict=False)) | kwargs
        ids, embeddings = given.get("input_ids"), given.get("inputs_embeds")
        source = ids if ids is not None else embeddings
        if source is not None and source.shape[0] != 1:
            raise ValueError(
                f"A routing log follows one sequence at a time; this forward has a batch of {source.shape[0]}. Run them one by one."
            )
        if source is None:
            tokens = torch.empty(0, dtype=torch.int64)
        elif ids is not None:
            tokens = ids[0].detach().to("cpu", torch.int64)
        else:
            tokens = torch.full((source.shape[1],), -1)
        cache = given.get("cache", given.get("past_key_values"))
        self._running[getcurrent()] = _Forward(tokens, int(cache.get_seq_length()) if cache is not None else 0)
        self._started += 1

    def _experts_hook(self, layer: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        """A closure for each layer: the module doesn't know its own number."""

        def picked(module: nn.Module, args: tuple[Any, ...]) -> None:
            # every model passes hidden states, ids and weights by place; the names differ
            _, ids, weights = args[:3]
            running = self._running.get(getcurrent())
            if running is None:
                raise RuntimeError(
                    f"A recorder expects each experts module inside a forward of the watched {type(self.model).__name__}; "
                    f"that of MoE layer {layer} was called outside one. Call the whole model that you passed to RouterRecorder."
                )
            if len(ids) != len(running.tokens):
                raise ValueError(
                    f"A recorder expects a row of picks for each input token; MoE layer {layer} got {len(ids)} rows "
                    f"for {len(running.tokens)} tokens. Feed one unpadded sequence."
                )
            if weights.shape != ids.shape:  # some routers hand on a weight for every expert instead of the picked ones
                weights = weights.gather(1, ids.clamp(max=weights.shape[1] - 1))
            skipped = ids >= self._expert_counts[layer]  # a router may send a token to no expert by an id past the last
            picks = (ids.detach().masked_fill(skipped, -1), weights.detach().masked_fill(skipped, 0))
            before = running.picks.get(layer)  # a model may run through a layer several times: all its picks there count
            running.picks[layer] = picks if before is None else (torch.cat([before[0], picks[0]], 1), torch.cat([before[1], picks[1]], 1))

        return picked

    def _forward_ends(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        running = self._running.pop(getcurrent(), None)
        if running is None or not running.picks:
            return
        rows, picks = len(running.tokens), running.picks
        ranks = max(ids.shape[1] for ids, _ in picks.values())
        experts, weights = torch.full((rows, len(self._modules), ranks), -1), torch.zeros(rows, len(self._modules), ranks)
        for layer, (ids, scale) in picks.items():
            experts[:, layer, : ids.shape[1]] = ids.to("cpu")
            weights[:, layer, : ids.shape[1]] = scale.to("cpu", torch.float32)
        self._done.append((experts, weights, running.tokens, torch.arange(running.start, running.start + rows)))


@dataclass
class _Forward:
    """A running forward: its tokens, the first one's position, and ids and weights by layer."""

    tokens: Tensor
    start: int
    picks: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


def _decoder_layer(name: str, place: int) -> int:
    """ "model.layers.3.mlp.experts" -> 3; a module outside a numbered list counts by its place."""
    numbers = re.findall(r"\.(\d+)\.", name)
    return int(numbers[0]) if numbers else place
