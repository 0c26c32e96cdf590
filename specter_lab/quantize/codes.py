"""The integers and scales inside a packed weight, whatever class and byte order it is held in."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from optimum.quanto import WeightQBitsTensor, WeightQBytesTensor, qint4, qint8
from optimum.quanto.tensor.weights.tinygemm import TinyGemmPackedTensor, TinyGemmWeightQBitsTensor
from torch import Tensor

CENTRES = {"qint4": 8, "qint8": 0}
"""The code that stands for a group's ``middle`` value: ``value = middle + (code - centre) * scale``."""


def code_format(weight: Any) -> tuple[str, int] | None:
    """("qint4" or "qint8", neighbours in a row that share a scale); None for any other tensor.

    >>> from specter_lab.quantize import Quanto
    >>> code_format(Quanto("qint4", 64).pack(torch.ones(16, 128)))
    ('qint4', 64)
    """
    if not isinstance(weight, (WeightQBitsTensor, WeightQBytesTensor)) or weight.dtype != torch.bfloat16 or weight.ndim != 2:
        return None
    if isinstance(weight, WeightQBitsTensor):
        return ("qint4", int(weight._group_size)) if weight.qtype is qint4 and weight._axis == 0 else None
    return ("qint8", int(weight.shape[1])) if weight.qtype is qint8 and weight._scale.numel() in (1, weight.shape[0]) else None


def write_codes(weight: Any, out: Tensor) -> None:
    """Write the codes of ``weight`` (rows, row length), row after row, into ``out``: (weights,) int8, contiguous.

    >>> from specter_lab.quantize import Quanto
    >>> out = torch.zeros(32, dtype=torch.int8)
    >>> write_codes(Quanto("qint4", 16).pack(torch.arange(32.0).reshape(2, 16)), out)
    >>> out[:4].tolist()
    [0, 1, 2, 3]
    """
    if isinstance(weight, WeightQBytesTensor):
        out.view(weight.shape).copy_(weight._data)
    elif isinstance(weight, TinyGemmWeightQBitsTensor):
        _write_tinygemm(weight._data, out.view(torch.uint8).view(weight.shape))
    else:
        # quanto packs the first half of the groups into the low bits, the second half into the high ones
        packed, groups = weight._data._data, out.view(torch.uint8).view(-1, weight._group_size)
        low, high = groups[: len(packed)], groups[len(packed) :]
        torch.bitwise_and(packed, 15, out=low)
        torch.bitwise_right_shift(packed[: len(high)], 4, out=high)


def scales(weight: Any) -> tuple[Tensor, Tensor]:
    """The scale and the middle value of each group, row after row: two (groups,) float32 tensors of bfloat16 values.

    A plain class and tinygemm's give the same ones: where a shift is held more precisely, it is rounded as tinygemm's.

    >>> from specter_lab.quantize import Quanto
    >>> [part.tolist() for part in scales(Quanto("qint4", 16).pack(torch.arange(16.0).reshape(1, 16)))]
    [[1.0], [8.0]]
    """
    if isinstance(weight, WeightQBytesTensor):
        scale = weight._scale.float().reshape(-1).expand(weight.shape[0])
        return scale, torch.zeros_like(scale)
    if isinstance(weight, TinyGemmWeightQBitsTensor):
        scale, middle = weight._scale_shift.float().unbind(2)
        return scale.t().reshape(-1), middle.t().reshape(-1)
    middle = 8 * weight._scale.float() - weight._shift.float()
    return weight._scale.float().reshape(-1), middle.bfloat16().float().reshape(-1)


def _write_tinygemm(packed: Any, out: Tensor) -> None:
    """(rows, columns) uint8 codes out of tinygemm's bytes; quanto's own unpack multiplies by an identity: 1 s an expert."""
    block = tinygemm_block_rows() if packed.device.type == "cpu" else 0
    if block:
        _write_blocks(packed._data.view(-1), block, out)
    else:
        out.copy_(packed.unpack())


def _write_blocks(data: Tensor, block: int, out: Tensor) -> None:
    rows, columns = out.shape
    whole = rows // block * block
    if whole:  # column after column; row r in the low bits of a byte, row r + block / 2 in the high ones
        pairs = data[: whole * columns // 2].view(-1, columns, block // 2).transpose(1, 2).contiguous()
        blocks = out[:whole].view(-1, block, columns)
        torch.bitwise_and(pairs, 15, out=blocks[:, : block // 2])
        torch.bitwise_right_shift(pairs, 4, out=blocks[:, block // 2 :])
    if rows > whole:  # the rest: rows 2 r and 2 r + 1 in a byte
        pairs = data[whole * columns // 2 :].view(columns, -1).t().contiguous()
        torch.bitwise_and(pairs, 15, out=out[whole::2])
        torch.bitwise_right_shift(pairs, 4, out=out[whole + 1 :: 2])


@cache
def tinygemm_block_rows() -> int:
    """Rows of a block in tinygemm's layout on this CPU, which depends on its vectors; found by trying. 0: an unknown layout.

    >>> tinygemm_block_rows() in (64, 32, 0)
    True
    """
    codes = (torch.arange(176 * 32) ** 2 // 37 % 16).to(torch.uint8).reshape(176, 32)  # 176: whole blocks and a rest
    data, out = TinyGemmPackedTensor.pack(codes)._data.view(-1), torch.empty_like(codes)
    for block in (64, 32):
        _write_blocks(data, block, out)
        if torch.equal(out, codes):
            return block
    return 0
