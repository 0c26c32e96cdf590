"""Number formats for expert weights: immutable values that pack one weight."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import ClassVar, Protocol

import optimum.quanto as quanto
import torch
from torch import Tensor

from specter_lab.quantize.exact import holds_exactly
from specter_lab.quantize.mxfp4 import Mxfp4
from specter_lab.quantize.plain import PlainQBitsTensor
from specter_lab.quantize.tinygemm import fast
from specter_lab.quantize.unpack import use_plain_unpack

GROUP_SIZES = (128, 64, 32, 16)
"""How many neighbours in a row may share a scale in qint4 and qint2."""

_BITS = {"qint8": 8, "qfloat8": 8, "qint4": 4, "qint2": 2}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Format(Protocol):
    """What packs a weight.

    >>> formats: list[Format] = [Dense(torch.bfloat16), Quanto("qint8")]
    >>> [format.name for format in formats]
    ['bfloat16', 'qint8']
    """

    quantises: ClassVar[bool]
    """Whether 2-D weights come out as (out, in) quantised tensors; other tensors are then left as they are."""

    @property
    def name(self) -> str:
        """As ``format_named`` takes it."""

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype that activations need; None: their own (the caller brings both sides to one dtype)."""

    def pack(self, weight: Tensor) -> Tensor:
        """``weight`` in this format."""


@dataclass(frozen=True)
class Dense:
    """A tensor as it is, in ``dtype`` (bfloat16, float16 or float32), never rounded.

    >>> Dense(torch.bfloat16).pack(torch.ones(2, 16)).dtype
    torch.bfloat16
    """

    dtype: torch.dtype
    quantises: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES.values():
            raise ValueError(f"A dense format must be one of {', '.join(_DTYPES)}; got {self.dtype}: use one of them")

    @property
    def name(self) -> str:
        """Such as "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def compute_dtype(self) -> None:
        """None: the activations keep their dtype, and the caller converts a weight that is held narrower."""

    def pack(self, weight: Tensor) -> Tensor:
        """``weight`` (any shape) in ``dtype``, with the same values. ValueError if a value would change."""
        _check_plain(weight, self.name)
        if not holds_exactly(weight, self.dtype):
            raise ValueError(
                f"A dense format never rounds; this {weight.dtype} weight {tuple(weight.shape)} has values that {self.name} cannot hold: "
                "take Dense(narrowest_exact_dtype(source)), or a quantised format such as 'qint8'"
            )
        return weight.detach().to(self.dtype)


@dataclass(frozen=True)
class Quanto:
    """A weight quantised by optimum-quanto: ``name`` is "qint8", "qint4", "qint2" or "qfloat8".

    8-bit formats have one scale a row. qint4 and qint2 have a scale and a shift for each ``group_size`` neighbours
    in a row: 128, 64, 32 or 16; None takes the largest that divides the row length. Activations are bfloat16: the
    quick kernels (qint8; qint4 with groups of 32 or more and a multiple of 16 rows) exist for that only.

    >>> Quanto("qint4").pack(torch.ones(16, 96))._group_size
    32
    """

    name: str
    group_size: int | None = None
    quantises: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.name not in _BITS:
            raise ValueError(_unknown(self.name, list(_BITS)))
        if self.bits == 8:
            object.__setattr__(self, "group_size", None)  # so that equal formats compare equal
        elif self.group_size not in (None, *GROUP_SIZES):
            raise ValueError(f"group_size must be one of {_listed(GROUP_SIZES)}; got {self.group_size}: leave it out")

    @property
    def bits(self) -> int:
        """Bits of one code, without scales."""
        return _BITS[self.name]

    @property
    def compute_dtype(self) -> torch.dtype:
        """bfloat16."""
        return torch.bfloat16

    def pack(self, weight: Tensor) -> Tensor:
        """``weight`` (out, in) as a frozen quanto tensor on the same device.

        ValueError if it isn't a 2-D float weight, holds NaN or infinity, or its row length fits no group size.
        """
        _check_plain(weight, self.name)
        if weight.ndim != 2:
            raise ValueError(f"{self.name} packs 2-D weights (out, in); got shape {tuple(weight.shape)}: pass one expert's own matrix")
        group = self._group(weight.shape[1])
        with torch.inference_mode(False), torch.no_grad():  # what is packed here must work in every mode later
            # float32 finds better codes than bfloat16 would (qint8: a tenth less error)
            base = weight.detach().to(torch.float32).contiguous()
            if not base.numel() or not bool(torch.isfinite(base).all()):
                bad = f"{int((~torch.isfinite(base)).sum())} of {base.numel()} are NaN or infinite"
                raise ValueError(f"{self.name} needs finite weights; {bad}: check the checkpoint, or convert it from float16 to bfloat16")
            return self._pack_bytes(base) if group is None else self._pack_groups(base, group)

    def _group(self, row_length: int) -> int | None:
        if self.name == "qfloat8":
            return None
        sizes = GROUP_SIZES if self.group_size is None else (self.group_size,)
        fitting = [size for size in sizes if row_length % size == 0 and row_length]
        if not fitting:  # for qint8 too: torch 2.13's int8 kernel reads past the end of rows that 16 does not divide, and crashes
            rule = f"a multiple of {sizes[-1]}" if len(sizes) == 1 or self.bits == 8 else f"divisible by a group size ({_listed(sizes)})"
            raise ValueError(f"{self.name} needs a row length {rule}; got {row_length}: use 'qfloat8' or a dense format for this model")
        return None if self.bits == 8 else fitting[0]

    def _pack_bytes(self, base: Tensor) -> Tensor:
        qtype = getattr(quanto, self.name)
        scale = (base.abs().amax(1, keepdim=True) / qtype.qmax).bfloat16()
        scale = torch.where(scale == 0, 1, scale)  # a row of zeros: 0 / 0 would be NaN
        if len(base) == 1:
            scale = scale.reshape(())  # quanto's way for a single row
        return quanto.quantize_weight(base, qtype, 0, scale, optimized=False)

    def _pack_groups(self, base: Tensor, group: int) -> Tensor:
        use_plain_unpack()
        low, high = base.reshape(-1, group).aminmax(dim=1, keepdim=True)
        scale = ((high - low) / (2**self.bits - 1)).bfloat16()
        low = low.bfloat16()
        # a group of equal values needs some scale; these ones keep the value exact in the plain class and in tinygemm
        scale = torch.where(scale == 0, torch.where(low == 0, 1, low.abs() / 8), scale)
        packed = quanto.quantize_weight(base, getattr(quanto, self.name), 0, scale, -low, group, optimized=False)
        return fast(PlainQBitsTensor.of(packed))


def format_named(name: str, group_size: int | None = None) -> Format:
    """The format called ``name``: "bfloat16", "float16", "float32", "qint8", "qint4", "qint2" or "qfloat8".

    "mxfp4" is that of a bank which keeps a checkpoint's packed weights. Raises ValueError, with the nearest name, for any other.

    >>> format_named("qint4", group_size=64)
    Quanto(name='qint4', group_size=64)
    """
    if name in _BITS:
        return Quanto(name, group_size)
    if name == Mxfp4.name:
        return Mxfp4()
    if name not in _DTYPES:
        raise ValueError(_unknown(name, [*_DTYPES, *_BITS]))
    if group_size is not None:
        raise ValueError(f"Only qint4 and qint2 have a group size; got {name!r} with group_size={group_size}: leave it out")
    return Dense(_DTYPES[name])


def _check_plain(weight: Tensor, name: str) -> None:
    if type(weight) not in (Tensor, torch.nn.Parameter) or not weight.is_floating_point() or weight.is_meta:
        what = f"{type(weight).__name__} of {weight.dtype} on {weight.device}"
        raise ValueError(f"{name} packs a plain float tensor that holds its numbers; got a {what}: pass the loaded model's own weight")


def _unknown(name: str, names: list[str]) -> str:
    near = get_close_matches(str(name), names, n=1)
    return f"A format must be one of {', '.join(names)}; got {name!r}: " + (f"did you mean {near[0]!r}?" if near else "choose one of them")


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))
