"""MXFP4 weights of a checkpoint (gpt-oss), kept packed: 4 bits a weight, and an exponent for every 32 of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors


class Mxfp4Tensor(Tensor):
    """One expert's weight (in, out), packed. ``to(dtype)`` unpacks it: the numbers that transformers' own unpacking gives.

    ``_blocks`` (out, in / 32, 16) uint8 hold two weights a byte, ``_scales`` (out, in / 32) uint8 powers of two. Every
    other operation unpacks too; its ``dtype`` is bfloat16, which holds all of these numbers.

    >>> weight = Mxfp4Tensor(torch.full((2, 1, 16), 0x22, dtype=torch.uint8), torch.full((2, 1), 128, dtype=torch.uint8))
    >>> weight.shape, weight.to(torch.float32)[0, 0].item()
    (torch.Size([32, 2]), 2.0)
    """

    _blocks: Tensor
    _scales: Tensor

    @staticmethod
    def __new__(cls, blocks: Tensor, scales: Tensor) -> Mxfp4Tensor:
        """Over those very bytes."""
        shape = (2 * blocks.shape[1] * blocks.shape[2], blocks.shape[0])
        tensor = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, device=blocks.device)
        tensor._blocks, tensor._scales = blocks, scales
        return tensor

    def to(self, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        """A plain (in, out) tensor."""
        return convert_moe_packed_tensors(self._blocks[None], self._scales[None], dtype=dtype)[0]

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, str]]:
        return ["_blocks", "_scales"], {"qtype": "mxfp4"}

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, meta: Any, outer_size: Any, outer_stride: Any) -> Mxfp4Tensor:
        return Mxfp4Tensor(inner_tensors["_blocks"], inner_tensors["_scales"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return Mxfp4Tensor(args[0]._blocks, args[0]._scales)
        unpack = torch.utils._pytree.tree_map_only(Mxfp4Tensor, lambda weight: weight.to(weight.dtype), (args, kwargs or {}))
        return func(*unpack[0], **unpack[1])


@dataclass(frozen=True)
class Mxfp4:
    """Packed weights as they are, with the biases beside them: a format that is read from checkpoints, never made.

    >>> Mxfp4().name
    'mxfp4'
    """

    name: ClassVar[str] = "mxfp4"
    quantises: ClassVar[bool] = False
    compute_dtype: ClassVar[None] = None

    def pack(self, weight: Tensor) -> Tensor:
        """``weight`` itself: an ``Mxfp4Tensor``, or a 1-D bias. ValueError for a 2-D weight that isn't packed."""
        if weight.ndim > 1 and not isinstance(weight, Mxfp4Tensor):
            raise ValueError(
                f"mxfp4 is kept from a checkpoint that has it; this {tuple(weight.shape)} weight is {weight.dtype}: "
                "quantise it to 'qint4' instead"
            )
        return weight.detach()
