"""The residual format, version 1: what an expert's full-precision weights need beside its codes. Little-endian.

**Prediction.** The weights of an expert's coded tensors, row after row, form one stream. It is cut into units of
neighbours that share a ``scale`` and a ``middle`` (``codes.scales``; float32, of bfloat16 values): as many as the greatest
common divisor of 128 and all group sizes. A tensor starts at a multiple of a unit and of 32 weights, the stream ends at
one of 16 units; what pads has code, scale and middle 0. With ``centre`` = 8 (qint4) or 0 (qint8), and q = middle / scale
or 0 if that is NaN, all in float32::

    turn = ceil(centre - q), zero = round(centre - q) half to even, each clamped to -100..100
    base = middle + (turn - centre + 1/2) scale; if not abs(base) + 256 abs(scale) < 2^127, base = scale = 0
    k    = code - turn; k = k - 1 if k < 0      in 8 bits, wrapping
    edge = base + k scale                       rounded once to the target dtype, half to even

``edge`` is the border, on the side away from zero, of the interval of values that the code stands for. Every product
here is exact, so a fused multiply-add gives the same bits.

**Residual.** ``E = bits(edge) - bits(weight)`` modulo 2^16: both dtypes order a sign's values like their bits, so E
counts the representable values between the edge and the weight, plus 2^15 if the signs differ. It says how to get
*any* 16 bits, NaN payloads and zeros' signs included. Counted from the edge it is not negative and mostly small: 7, 8, 9
bits of it cover the 1, 2, 4 topmost binades of an interval in bfloat16.

**Planes.** The stream is cut into tiles of 65 536 weights; the last may be shorter. Weight w of a tile of n weights is
step w // lanes of lane w % lanes, with lanes = n / 16. The low ``plane`` bits of E lie in the tile's plane::

    plane  4: 8 x lanes bytes; byte [i]: step i in bits 0-3, step i + 8 in bits 4-7
    plane  7: 7 x 2 lanes bytes; byte [i]: steps 2 i and 2 i + 1 in bits 0-6; its bit 7 is bit i of steps 14 and 15
    plane 10: 16 x lanes bytes with bits 0-7, then 4 x lanes bytes; byte [i]: bits 8-9 of steps i, i + 4, i + 8, i + 12

**Registers.** Small weights need more bits, and the codes say which: with d = abs(code - zero) (in 8 bits, wrapping),
``near`` bits if 0 < d <= ``radius``, ``far`` = 0 bits beyond, ``zero_bits`` if d = 0. Each lane has one 16-bit register
for its 16 weights, read from the low end, step after step; past its end, bit 15 repeats. The bits of a near weight
are added to E at bit ``plane``; of a zero weight's the last one counts 2^15 and the others likewise. Nobody has to
count through other lanes to know where a lane's bits are.

**Escapes.** What is still missing of E is added by (gap, value) pairs of bytes, in the order of weights. The position
is the sum of the gaps so far; values below 128 add value * 2^plane, others (value - 128) * 512. A weight may have two,
the second with gap 0; value 0 bridges a gap longer than 255.

**Blob.** 64 bytes of header (``Header``: uint32 words), then planes, registers, the other tensors raw (each at a multiple of 64), all
gaps, all values, zeros up to a multiple of 64. With ``raw`` = 1: the header and all weights as they are.

Derivation: most codes' intervals span less than a binade (128 bfloat16 values: 7 bits), the two next to zero one or
two, and only the one around zero many.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

MAGIC, VERSION, HEADER_BYTES = 0x31524C53, 1, 64  # "SLR1"
STEPS, TILE = 16, 65_536


@dataclass(frozen=True)
class Widths:
    """Bits of E: in the plane for all, in the registers for codes within ``radius`` of the zero code, and for that one.

    >>> Widths(plane=7, radius=1, near=1, zero=3).plane
    7
    """

    plane: int
    radius: int
    near: int
    zero: int


WIDTHS = {
    # found by counting bits on Gaussian weights: plane + 1 for the register + 16 for each escape
    ("qint4", torch.bfloat16): Widths(7, 1, 1, 3),
    ("qint4", torch.float16): Widths(10, 1, 1, 3),
    ("qint8", torch.bfloat16): Widths(4, 8, 3, 5),
    ("qint8", torch.float16): Widths(7, 8, 3, 5),
}
"""By code and target dtype."""


def tiles(weights: int) -> Iterator[tuple[int, int, int]]:
    """(first weight, tiles, lanes) of the whole tiles and of the short one, for a multiple of 16 weights.

    >>> list(tiles(2 * 65536 + 32))
    [(0, 2, 4096), (131072, 1, 2)]
    """
    whole = weights // TILE
    if whole:
        yield 0, whole, TILE // STEPS
    if weights % TILE:
        yield whole * TILE, 1, weights % TILE // STEPS


@dataclass(frozen=True, kw_only=True)
class Header:
    """The first words (uint32) of a blob. ``checksum``: CRC32 of all its other bytes; ``result``: of the rebuilt weights.

    >>> blob = torch.zeros(64, dtype=torch.uint8)
    >>> Header(layer=0, expert=3, raw=0, entries=10, used=64, result=1).seal(blob)
    >>> Header.of(blob).expert, Header.of(blob).checksum == checksum(blob)
    (3, True)
    """

    magic: int = MAGIC
    version: int = VERSION
    checksum: int = 0
    layer: int
    expert: int
    raw: int
    entries: int
    used: int
    result: int

    @classmethod
    def of(cls, blob: Tensor) -> Header:
        """The header of ``blob``: (bytes,) uint8 in host memory. ValueError if it isn't a residual of this version."""
        names = [field.name for field in fields(cls)]
        words = np.frombuffer(blob[:HEADER_BYTES].numpy().tobytes(), "<u4")[: len(names)]
        header = cls(**dict(zip(names, words.tolist(), strict=True)))
        if (header.magic, header.version) != (MAGIC, VERSION):
            raise ValueError(
                f"A residual blob must start with magic {MAGIC:#x} and version {VERSION}; this one has {header.magic:#x} and "
                f"{header.version}: build the residuals again, or copy the blob anew"
            )
        return header

    def seal(self, blob: Tensor) -> None:
        """Write this header into ``blob`` with the checksum of what is in it."""
        blob[:HEADER_BYTES] = self._bytes()
        blob[:HEADER_BYTES] = replace(self, checksum=checksum(blob))._bytes()

    def _bytes(self) -> Tensor:
        words = np.zeros(HEADER_BYTES // 4, "<u4")
        words[: len(fields(self))] = [getattr(self, field.name) for field in fields(self)]
        return torch.from_numpy(words.view(np.uint8))


def checksum(blob: Tensor) -> int:
    """CRC32 of ``blob`` (host memory) without the four bytes that hold it.

    >>> checksum(torch.zeros(64, dtype=torch.uint8))
    68323592
    """
    data = blob.numpy()
    return zlib.crc32(data[12:].data, zlib.crc32(data[:8].data))
