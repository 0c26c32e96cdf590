"""The target as its own draft, with copied weights and a KV cache of its own instead of shared ones."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specter_lab.pieces import Compute, ExpertStore
from specter_lab.records import ExpertKey, LayerCall
from specter_lab.seam import ExpertsSeam, experts_modules
from specter_lab.speculate.follower import Follower
from specter_lab.speculate.separate import SeparateDrafter
from specter_lab.speculate.vocabulary import SharedTokens

if TYPE_CHECKING:
    from specter_lab.models import MoE
    from specter_lab.replay import ReplayTarget


class CopiedDrafter(SeparateDrafter):
    """The target with the low-bit experts of ``bank``, a copy of every other weight, and a KV cache of its own.

    What ``SelfDrafter`` shares is there twice here, and counts twice: non-expert weights and KV. Since its own experts
    read the whole text, the prompt too, in the first step, its proposals aren't quite those of ``SelfDrafter``. With a
    ``ReplayTarget`` it only counts as memory: reading the prompt is not charged there.

    Source: the separate draft of SpecMoEOff (arXiv 2508.21706) in Specter's artifact.

    >>> import specter_lab as sl
    >>> with sl.load_moe("tiny-moe") as moe: CopiedDrafter(moe, moe.quantize("qint4")).name
    'copied self-draft (qint4 group 128)'
    """

    def __init__(self, target: MoE | ReplayTarget, bank: ExpertStore) -> None:
        self.target, self.bank, self.name = target, bank, f"copied self-draft ({bank.name})"
        geometry = target.geometry
        self.weight_bytes, self.kv_bytes_per_token = geometry.non_expert_bytes, geometry.kv_bytes_per_token
        self.no_routing, self.most_positions = "", geometry.max_positions
        model: Any = getattr(target, "model", None)
        if model is None:
            self.follower: Any = _Replayed()
        else:
            self.tokens = SharedTokens(torch.arange(geometry.vocab_size, device=model.device))
            self.follower = _follower(model, target.seam, bank)  # type: ignore[union-attr]


def _follower(model: nn.Module, seam: ExpertsSeam, bank: ExpertStore) -> Follower:
    """Over a copy of ``model`` without its experts, which come from ``bank``."""
    twin = copy_without_experts(model)
    own = ExpertsSeam(twin)
    own.attach(lambda layer: None)
    own.sum_dtypes = dict(seam.sum_dtypes)
    server = _Resident(bank)

    def run(**inputs: Any) -> Any:
        with own.serving(server):
            return twin(**inputs)

    return Follower(twin, run)


def copy_without_experts(model: nn.Module) -> nn.Module:
    """A deep copy whose routed experts are on the meta device, attached or not, and which nobody watches.

    >>> import specter_lab as sl
    >>> twin = copy_without_experts(sl.load_moe("tiny-moe").model)
    >>> sum(p.is_meta for p in twin.parameters())
    16
    """
    memo: dict[int, Any] = {}
    for module in experts_modules(model).values():
        memo.update(
            {id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False) for p in module.parameters(recurse=False)}
        )
        if "_specter_place" in vars(module):
            memo[id(module._specter_place)] = object()
    for module in model.modules():
        memo.update({id(hooks): OrderedDict() for name, hooks in vars(module).items() if "_hooks" in name and isinstance(hooks, dict)})
    twin = copy.deepcopy(model, memo)
    for module in experts_modules(twin).values():
        vars(module).pop("_specter_place", None)
    return twin


class _Resident:
    """Serves a bank that is wholly on the device; the follower stamps its time."""

    def __init__(self, bank: ExpertStore) -> None:
        self.bank = bank

    def serve(self, call: LayerCall, compute: Compute) -> None:
        for expert in call.needed:
            compute(expert, self.bank.own_weights(ExpertKey(call.layer, expert)))


class _Replayed:
    """Stands for a follower in a replay, where the text at hand says what was drafted."""

    def forget(self) -> None:
        """Nothing was read."""
