"""qint4 weights in the layout of torch's fast kernel ("tinygemm"), and back to quanto's portable one.

The fast layout depends on the device and even on the CPU's vector width, so bytes that leave this process must be
portable. quanto itself uses the kernel for groups of 128 only; torch's kernel takes 64 and 32 as well, and so do we.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from optimum.quanto import qint4
from optimum.quanto.tensor.packed import PackedTensor
from optimum.quanto.tensor.weights.tinygemm import TinyGemmPackedTensor, TinyGemmWeightQBitsTensor

from specter_lab.quantize.plain import PlainQBitsTensor
from specter_lab.quantize.unpack import use_plain_unpack

GROUP_SIZES = (128, 64, 32)
"""Weights that share a scale, where torch's kernel can do it."""


def fast(weight: Any) -> Any:
    """``weight`` for torch's int4 kernel where that fits and works here; otherwise ``weight`` itself.

    It fits a bfloat16 qint4 (out, in) with groups of 128, 64 or 32 and ``out`` a multiple of 16. If torch's packing
    or its kernel fails or computes something else, one UserWarning for each kind of device says so.

    >>> fast(torch.ones(2, 2)).shape
    torch.Size([2, 2])
    """
    if type(weight) is not PlainQBitsTensor or weight.qtype is not qint4 or weight.dtype != torch.bfloat16:
        return weight
    if weight._group_size not in GROUP_SIZES or weight.shape[0] % 16:
        return weight
    try:
        _probe(weight.device.type)
        return _tinygemm(weight)
    except Exception as error:  # whatever torch changed: the plain class computes the same, only slower
        reason = f"{type(error).__name__}: {error}"
    _warn_once(weight.device.type, reason)
    return weight


def portable(weight: Any) -> Any:
    """``weight`` in the plain class when it is in tinygemm's, otherwise ``weight`` itself.

    Its shift stays in float32: in bfloat16 it would be rounded, and ``fast(portable(w))`` would no longer be ``w``.

    >>> portable(torch.ones(2, 2)).shape
    torch.Size([2, 2])
    """
    if type(weight) is not TinyGemmWeightQBitsTensor:
        return weight
    use_plain_unpack()
    codes = weight._data.unpack().reshape(-1, weight._group_size)
    scale, shift = (part.t().reshape(-1, 1) for part in weight._scale_shift.unbind(2))
    return PlainQBitsTensor(
        qint4, 0, weight._group_size, weight.size(), weight.stride(), PackedTensor.pack(codes), scale, 8 * scale.float() - shift.float()
    )


def tinygemm_path(device: str = "cpu") -> str:
    """What qint4 weights compute with on ``device`` ("cpu", "cuda"): torch's fast kernel, or why not (for a doctor).

    >>> tinygemm_path().split(":")[0] in ("torch's int4 kernel", "the plain class")
    True
    """
    try:
        _probe(device)
    except Exception as error:
        return f"the plain class: {type(error).__name__}: {error}"
    return f"torch's int4 kernel: groups of {', '.join(map(str, GROUP_SIZES))}"


def _tinygemm(weight: Any) -> Any:
    use_plain_unpack()
    out, group = weight.shape[0], weight._group_size
    packed = TinyGemmPackedTensor.pack(weight._data.unpack().reshape(weight.shape))
    # the kernel computes (code - 8) * scale + shift, the plain class code * scale - shift
    middle = 8 * weight._scale.float() - weight._shift.float()
    parts = [part.reshape(out, -1) for part in (weight._scale, middle.to(weight.dtype))]
    scale_shift = torch.stack(parts, 2).transpose(0, 1).contiguous()  # (in / group, out, 2)
    return TinyGemmWeightQBitsTensor(qint4, 0, group, weight.size(), weight.stride(), packed, scale_shift)


@cache
def _probe(device: str) -> None:
    """Raise unless the kernel gives what the codes say. Only a success is remembered."""
    codes = (torch.arange(32 * 32, device=device) ** 2 // 37 % 16).to(torch.uint8).reshape(32, 32)
    scale = torch.tensor([0.5, 1, 2, 4] * 8, dtype=torch.bfloat16, device=device)[:, None]  # so that nothing is rounded
    plain = PlainQBitsTensor(qint4, 0, 32, codes.shape, codes.stride(), PackedTensor.pack(codes), scale, 6 * scale)
    rows = torch.eye(32, dtype=torch.bfloat16, device=device)
    want = (codes.float() - 6) * scale.float()
    if not torch.equal(F.linear(rows, _tinygemm(plain)).float().t(), want):
        raise RuntimeError("torch's int4 kernel computes other values than its codes say")


@cache
def _warn_once(device: str, reason: str) -> None:
    warnings.warn(
        f"torch's int4 kernel does not work on {device} here ({reason}); qint4 weights use the plain class: right, but slow",
        stacklevel=3,
    )
