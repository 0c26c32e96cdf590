"""A model that reads along with a text on a KV cache of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specter_lab.pieces import DraftContext
from specter_lab.records import Routing
from specter_lab.seam import experts_modules


class Follower:
    """``rewind`` takes back what a text no longer says, ``advance`` reads what is new; ``read``: ids that the cache holds.

    ``run`` calls the model (the model itself, if not given). What it computes is stamped on the draft's lane: attention and
    experts of each MoE layer, or each decoder layer of a dense model as one attention segment; then the head.

    >>> from transformers import AutoConfig, AutoModelForCausalLM
    >>> model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_hidden_layers=1, hidden_size=32, vocab_size=9))
    >>> Follower(model).read
    []
    """

    def __init__(self, model: Any, run: Callable[..., Any] | None = None) -> None:
        self.model, self.run = model, run or model
        self.experts = list(experts_modules(model).values())
        self.counts = [int(next(module.parameters(recurse=False)).shape[0]) for module in self.experts]
        self.layers = () if self.experts else _decoder_layers(model)
        self.forget()

    def forget(self) -> None:
        """An empty cache."""
        self.cache: Any = None
        self.read: list[int] = []
        self._firm = 0  # so many first entries can't be taken back: sliding layers forgot what came before them

    def rewind(self, ids: Sequence[int]) -> None:
        """Crop the cache to what it shares with the committed ``ids``, less their last one, which must be read to go on.

        Once a step, also with nothing to take back: sliding layers then forget what slid out, for good.
        """
        most = min(len(self.read), len(ids) - 1)
        kept = most if self.read[:most] == list(ids[:most]) else next(i for i in range(most) if self.read[i] != ids[i])
        if kept <= 0 or kept < self._firm:
            self.forget()
        else:
            self.cache.crop(kept - len(self.read))
            del self.read[kept:]
            self._firm = kept

    def advance(self, ids: Sequence[int], context: DraftContext, position: int) -> tuple[Tensor, Routing | None]:
        """Read ``ids`` (one or more) on: logits (vocabulary,) after the last, and its routing, which stands at ``position``."""
        with self._watched(context, len(ids)) as picked:
            out = self.run(
                input_ids=torch.tensor([list(ids)], device=self.model.device), cache=self.cache, use_cache=True, logits_to_keep=1
            )
        context.spent("head", tokens=1)
        if self.cache is None:
            out.cache.activate_past_recording()  # from now on sliding layers keep what a rejection may bring back
            self._firm = len(ids)
        self.cache = out.cache
        self.read += ids
        return out.logits[0, -1], self._routing(picked, position) if self.experts else None

    @contextmanager
    def _watched(self, context: DraftContext, tokens: int) -> Iterator[list[list[tuple[Tensor, Tensor]]]]:
        """Inside, layers are stamped as they run; yields ids and weights of each call of each MoE layer."""
        picked: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.experts]

        def called(layer: int, module: nn.Module, args: tuple[Any, ...]) -> None:
            context.spent("attention", layer=layer, tokens=tokens)
            picked[layer].append(args[1:3])  # every model passes hidden states, ids and weights by place

        def done(layer: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            used = args[1][args[1] < self.counts[layer]]
            context.spent("expert", layer=layer, tokens=used.numel(), experts=used.unique().numel())

        def passed(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            context.spent("attention", tokens=tokens)

        handles = [module.register_forward_pre_hook(partial(called, layer)) for layer, module in enumerate(self.experts)]
        handles += [module.register_forward_hook(partial(done, layer)) for layer, module in enumerate(self.experts)]
        handles += [module.register_forward_hook(passed) for module in self.layers]
        try:
            yield picked
        finally:
            for handle in handles:
                handle.remove()

    def _routing(self, picked: list[list[tuple[Tensor, Tensor]]], position: int) -> Routing:
        """The last row's experts: of all calls of a layer, where a model loops over layers; without ids of skipped experts."""
        experts, weights = [], []
        for count, calls in zip(self.counts, picked, strict=True):
            rows = [(ids[-1:], odds[-1:]) for ids, odds in calls]
            # some routers hand on a weight for every expert instead of the picked ones
            odds = torch.cat([o if o.shape == i.shape else o.gather(1, i.clamp(max=o.shape[1] - 1)) for i, o in rows], dim=1)
            ids = torch.cat([i for i, _ in rows], dim=1)
            experts.append(ids[:, ids[0] < count])
            weights.append(odds[:, ids[0] < count])
        return Routing(position, tuple(experts), tuple(weights))


def _decoder_layers(model: Any) -> Sequence[nn.Module]:
    count = model.config.get_text_config().num_hidden_layers
    return next((tuple(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count), ())
