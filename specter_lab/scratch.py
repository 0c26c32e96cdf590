"""What one draft of a decoded text sees and leaves behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from specter_lab.offload.server import ResidentServer
from specter_lab.offload.slots_first import SlotsFirstServer
from specter_lab.pieces import Compute, ExpertServer, ExpertStore
from specter_lab.records import DraftToken, LayerCall, Routing
from specter_lab.speculate.stream import LONGEST

if TYPE_CHECKING:
    from specter_lab.decoding import Decoding


class Scratch:
    """The ``DraftContext`` of one draft: the committed ids as they were when it began, and ``tokens`` entries in ``cache``.

    ``step``: what its compute is stamped with. ``pause``: called after each layer's experts.
    """

    def __init__(
        self, decoding: Decoding, cache: DynamicCache | None, step: Callable[[], int], pause: Callable[[], None] | None = None
    ) -> None:
        self.decoding, self.cache, self.step, self.pause = decoding, cache, step, pause
        self.ids, self.end_tokens, self.generator, self.tokens = decoding.ids, decoding.end_tokens, decoding.generator, 0

    def forward(self, token: int, bank: ExpertStore, *, slots_first: bool = False) -> tuple[Tensor, DraftToken]:
        """One scratch token through the shared skeleton with ``bank``'s experts, or those in the slots."""
        decoding, position = self.decoding, int(self.ids.shape[1]) - 1 + self.tokens
        lane = (decoding.machine, "draft", self.step())
        server: ExpertServer = SlotsFirstServer(bank, decoding.residency, *lane) if slots_first else ResidentServer(bank, *lane)
        if self.pause is not None:
            server = _Pausing(server, self.pause)
        with decoding.seam.serving(server) as calls:
            out = decoding.model(input_ids=self.ids.new_tensor([[token]]), cache=self.cache, use_cache=True)
        self.tokens += 1
        self.spent("head")
        return out.logits[0, -1], DraftToken(-1, position, routing=self._routing(position, calls))

    def choose(self, logits: Tensor, prefix: Sequence[int]) -> tuple[int, Tensor | None]:
        """The request's own choice after the drafted ``prefix``."""
        return self.decoding.chooser.choose(self.ids, prefix, logits)

    def spent(self, kind: str, *, layer: int = -1, tokens: int = 1, experts: int = 1) -> None:
        """A segment of the draft's lane."""
        self.decoding.machine.compute("draft", kind, step=self.step(), layer=layer, tokens=tokens, experts=experts)

    def _routing(self, position: int, calls: Sequence[LayerCall]) -> Routing:
        """One row's experts a MoE layer: of all its calls, where a model loops over layers; without ids of skipped experts."""
        seam = self.decoding.seam
        experts: list[list[Tensor]] = [[] for _ in seam.modules]
        weights: list[list[Tensor]] = [[] for _ in seam.modules]
        for call in calls:
            assert call.weights is not None  # only a replay has none
            ids, odds = call.experts, call.weights
            if len(call.needed) < ids.shape[1]:
                there = ids[0] < seam.experts(call.layer)
                ids, odds = ids[:, there], odds[:, there]
            experts[call.layer].append(ids)
            weights[call.layer].append(odds)
        joined = ((parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) for parts in lists) for lists in (experts, weights))
        return Routing(position, *map(tuple, joined))


def branch(cache: DynamicCache) -> DynamicCache:
    """A cache that goes its own way from here on, while ``cache`` may grow and be cropped back to what it holds now.

    Plain layers keep only what comes from now on. Others (sliding windows, linear attention) are copied: most share keys and
    values with the original until either is updated, since updates don't write into them.

    >>> cache = DynamicCache(); _ = cache.update(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2), 0)
    >>> own = branch(cache); _ = own.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), 0)
    >>> own.get_seq_length(), own.layers[0].keys.shape[-2], cache.get_seq_length()
    (4, 1, 3)
    """
    shared: dict[int, Any] = {}
    for layer in cache.layers:
        if type(layer) is DynamicLayer and layer.is_initialized:
            shared[id(layer)] = _BranchLayer(layer)
        elif not isinstance(layer, LinearAttentionCacheLayerMixin):  # its states are written in place
            shared |= {id(value): value for value in vars(layer).values() if isinstance(value, Tensor)}
    return copy.deepcopy(cache, shared)


def scratch_bytes(target: Any, context: int) -> int:
    """What a branch holds beside the cache at most: entries of ``LONGEST`` tokens, and the window of sliding layers, if any; where
    layers are copied as a whole (``target.cache_copied``), all of ``context`` tokens once more, and what doesn't grow.
    """
    config = target.model.config.get_text_config() if hasattr(target, "model") else None
    copied, fixed = getattr(target, "cache_copied", (False, 0))
    tokens = LONGEST + (context if copied else getattr(config, "sliding_window", None) or 0)
    return int(tokens * target.geometry.kv_bytes_per_token + fixed)


class _BranchLayer(DynamicLayer):
    """The first ``length`` entries are those of ``trunk``, wherever that keeps them at the moment; the others are its own."""

    def __init__(self, trunk: DynamicLayer) -> None:
        super().__init__()
        assert trunk.keys is not None and trunk.values is not None
        self.trunk, self.length = trunk, trunk.get_seq_length()
        self.lazy_initialization(trunk.keys, trunk.values)
        self.keys, self.values = trunk.keys[..., :0, :].clone(), trunk.values[..., :0, :].clone()  # views would keep the trunk's

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As a dynamic layer's; what is joined for attention isn't kept."""
        keys, values = super().update(key_states, value_states)
        own, trunk = slice(self.length), self.trunk
        assert trunk.keys is not None and trunk.values is not None
        return torch.cat([trunk.keys[..., own, :], keys], dim=-2), torch.cat([trunk.values[..., own, :], values], dim=-2)

    def get_seq_length(self) -> int:
        """Entries of both."""
        assert self.keys is not None
        return self.length + self.keys.shape[-2]


class _Pausing:
    """Serves as another server does, and pauses after each layer."""

    def __init__(self, server: ExpertServer, pause: Callable[[], None]) -> None:
        self.server, self.pause = server, pause

    def serve(self, call: LayerCall, compute: Compute) -> None:
        self.server.serve(call, compute)
        self.pause()
