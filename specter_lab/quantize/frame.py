"""Where one layer's experts lie: their weights in the stream that is rebuilt, their residuals in a blob."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specter_lab.quantize.codes import CENTRES, code_format, scales, write_codes
from specter_lab.quantize.layout import ALIGNMENT, BlobLayout, Leaf, Wrapped
from specter_lab.quantize.residual_format import HEADER_BYTES, STEPS, WIDTHS, Widths

_MOST_UNIT = 128  # a tile's lanes must be whole units


@dataclass(frozen=True)
class Frame:
    """One layer's plan, the same for all its experts.

    ``layout``: the rebuilt expert, coded tensors first (in their code's shape), so that its first ``weights`` 16-bit
    words are the stream. ``coded``: their names. ``unit``: neighbours that share a scale. ``code``: "qint4" or "qint8".

    >>> from specter_lab.quantize import Quanto
    >>> weight = torch.ones(16, 128, dtype=torch.bfloat16)
    >>> frame = Frame.of({"up_proj": weight}, {"up_proj": Quanto("qint4").pack(weight)}, torch.bfloat16, transposed=False)
    >>> frame.weights, frame.unit
    (2048, 128)
    """

    layout: BlobLayout
    coded: tuple[str, ...]
    weights: int
    unit: int
    code: str
    dtype: torch.dtype
    transposed: bool

    @classmethod
    def of(cls, dense: Mapping[str, Tensor], packed: Mapping[str, Any], dtype: torch.dtype, transposed: bool) -> Frame:
        """The plan for experts like these. ValueError if they aren't the same expert's, or nothing is coded as int4 or int8."""
        formats: dict[str, tuple[str, int]] = {}
        for name, tensor in dense.items():
            found = code_format(packed.get(name)) if tensor.ndim == 2 and tensor.dtype == dtype else None
            if found is None or (found[0], dtype) not in WIDTHS or (formats and found[0] != next(iter(formats.values()))[0]):
                continue  # stored raw
            if tuple(packed[name].shape) != (shape := tuple(tensor.T.shape if transposed else tensor.shape)):
                raise ValueError(
                    f"Codes must have their weight's shape; {name!r} is {shape} and its code {tuple(packed[name].shape)}: "
                    "pack the code bank from this very model"
                )
            formats[name] = found
        if not formats:
            kinds = ", ".join(sorted({type(tensor).__name__ for tensor in packed.values()}))
            raise ValueError(
                "Residuals need bfloat16 or float16 weights that the code bank holds as qint4 or qint8; here are "
                f"{dtype} weights {', '.join(dense)} and {kinds} codes: keep the dense bank for this model"
            )
        unit = math.gcd(_MOST_UNIT, *(group for _, group in formats.values()))
        fields: dict[str, Leaf | Wrapped] = {}
        end = 0
        for name in formats:
            fields[name] = Leaf(str(dtype).removeprefix("torch."), tuple(packed[name].shape), end)
            end = _up(end + fields[name].bytes, max(2 * unit, ALIGNMENT))
        end = _up(end, 2 * STEPS * unit)
        weights = end // 2
        for name, tensor in dense.items():
            if name not in formats:
                fields[name] = Leaf(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end)
                end = _up(end + fields[name].bytes, ALIGNMENT)
        code = next(iter(formats.values()))[0]
        return cls(BlobLayout(fields, end), tuple(formats), weights, unit, code, dtype, transposed)

    def leaf(self, name: str) -> Leaf:
        """That tensor's place in the rebuilt expert."""
        node = self.layout.fields[name]
        assert isinstance(node, Leaf), f"{name!r} is {node}: a rebuilt expert has dense tensors only"
        return node

    @property
    def numbers(self) -> int:
        """How many numbers an expert has, padding not counted."""
        return sum(math.prod(self.leaf(name).shape) for name in self.layout.fields)

    def fits(self, packed: Mapping[str, Any]) -> bool:
        """Whether these packed tensors have the codes, shapes and groups that the plan was made for."""
        for name in self.coded:
            found = code_format(packed.get(name))
            if found is None or found[0] != self.code or found[1] % self.unit or tuple(packed[name].shape) != self.leaf(name).shape:
                return False
        return True

    @property
    def widths(self) -> Widths:
        """How many bits lie where."""
        return WIDTHS[self.code, self.dtype]

    @property
    def centre(self) -> int:
        """The code of a group's middle value."""
        return CENTRES[self.code]

    @property
    def padded(self) -> bool:
        """Whether some units of the stream only pad; their codes, scales and middles are 0."""
        return 2 * self.weights > sum(self.layout.fields[name].bytes for name in self.coded)

    def units(self, packed: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """The stream's codes (weights,) int8, and each unit's scale and middle, (units,) float32, out of packed tensors."""
        make = torch.zeros if self.padded else torch.empty
        device = packed[self.coded[0]].device
        codes = make(self.weights, dtype=torch.int8, device=device)
        both = make(2, self.weights // self.unit, device=device)
        for name in self.coded:
            first, size = self.leaf(name).offset // 2, self.leaf(name).bytes // 2
            write_codes(packed[name], codes[first : first + size])
            for row, part in zip(both, scales(packed[name]), strict=True):
                row[first // self.unit : (first + size) // self.unit].view(len(part), -1).copy_(part[:, None])
        return codes, both[0], both[1]

    def stream(self, out: Tensor) -> Tensor:
        """The coded weights' bits in ``out`` (laid out as ``layout`` says): (weights,) int16, an alias."""
        return out[: 2 * self.weights].view(torch.int16)

    def copy_rest(self, blob: Tensor, out: Tensor) -> None:
        """Copy the tensors that are no part of the stream from a blob to ``out``."""
        if 2 * self.weights < self.layout.nbytes:
            start, end = self.places(0)[2]
            out[2 * self.weights :].copy_(blob[start:end])

    def tensors(self, out: Tensor) -> dict[str, Tensor]:
        """The rebuilt expert's tensors in ``out``, as the dense bank has them. They alias it."""
        views = self.layout.views(out)
        return {name: view.T if self.transposed and name in self.coded else view for name, view in views.items()}

    def write(self, dense: Mapping[str, Tensor], out: Tensor) -> None:
        """Copy an expert's dense tensors into ``out``. ValueError if they aren't like those the frame was made from."""
        views = self.tensors(out)
        ours, given = ({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} for tensors in (views, dense))
        if ours != given:
            raise ValueError(f"Experts of one layer must be alike; got {given} after {ours}: give each kind a layer of its own")
        for name, view in views.items():
            view.copy_(dense[name])

    def places(self, entries: int) -> tuple[tuple[int, int], ...]:
        """First byte and end of a blob's plane, registers, raw rest, gaps and values, for that many escapes."""
        plane = HEADER_BYTES + self.weights * self.widths.plane // 8
        registers = plane + 2 * self.weights // STEPS
        rest = _up(registers, ALIGNMENT) + self.layout.nbytes - 2 * self.weights
        gaps = rest + entries
        return (HEADER_BYTES, plane), (plane, registers), (_up(registers, ALIGNMENT), rest), (rest, gaps), (gaps, gaps + entries)

    def parts(self, blob: Tensor, entries: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """A blob's plane, registers (int16), raw rest, gaps and values, as aliases."""
        plane, registers, rest, gaps, values = (blob[start:end] for start, end in self.places(entries))
        return plane, registers.view(torch.int16), rest, gaps, values

    def used_bytes(self, entries: int) -> int:
        """What a blob with that many escapes holds, header included, padding not."""
        return self.places(entries)[-1][1]

    @property
    def raw_bytes(self) -> int:
        """What a blob holds whose weights are stored as they are."""
        return HEADER_BYTES + self.layout.nbytes

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``from_json`` takes them back."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {**vars(self), "layout": self.layout.to_json(), "coded": list(self.coded), "dtype": dtype}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Frame:
        """The plan that ``to_json`` gave."""
        layout, dtype = BlobLayout.from_json(data["layout"]), getattr(torch, data["dtype"])
        return cls(**{**data, "layout": layout, "coded": tuple(data["coded"]), "dtype": dtype})


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
