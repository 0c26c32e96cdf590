"""Exact weights out of codes and residuals, in plain torch: the same bits on every device, by ``residual_format``.

On a CPU a few tiles at a time, so that what is made on the way stays in the cache; elsewhere all at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specter_lab.quantize.residual_format import STEPS, TILE, Widths, tiles

_CPU_TILES, _OTHER_TILES = 12, 64  # with fewer, calls cost more than the cache saves; 64 take 29 MB of scratch


def unit_parameters(scale: Tensor, middle: Tensor, centre: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each unit's scale and base (float32), turn and zero (int8), all shaped like ``scale`` and ``middle`` (float32).

    >>> [part.tolist() for part in unit_parameters(torch.tensor([2.0]), torch.tensor([1.0]), centre=8)]
    [[2.0], [2.0], [8], [8]]
    """
    offset = centre - torch.nan_to_num(middle / scale, nan=0.0)
    turn = offset.ceil().clamp_(-100, 100)
    base = (turn - (centre - 0.5)).mul_(scale).add_(middle)
    small = base.abs().add_(scale.abs(), alpha=256) < 2.0**127  # else an edge could be NaN, whose bits differ between computers
    scale, base = torch.where(small, scale, 0), torch.where(small, base, 0)
    return scale, base, turn.to(torch.int8), offset.round_().clamp_(-100, 100).to(torch.int8)


def near_and_zero(codes: Tensor, zero: Tensor, radius: int, out: Tensor) -> tuple[Tensor, Tensor]:
    """Two rows of ``out`` (2, ...) int8: 1 where a code is within ``radius`` of its unit's zero code, 1 where it is that code.

    >>> codes, zero = torch.tensor([8, 9, 10], dtype=torch.int8), torch.tensor([8], dtype=torch.int8)
    >>> [part.tolist() for part in near_and_zero(codes, zero, 1, torch.empty(2, 3, dtype=torch.int8))]
    [[1, 1, 0], [1, 0, 0]]
    """
    near, same = out
    # sums and clamps, since torch compares bytes ten times slower than it adds them
    torch.sub(codes, zero, out=same)
    torch.neg(same.abs_(), out=near).add_(radius + 1).clamp_(0, 1)
    same.neg_().add_(1).clamp_(min=0)
    return near, same


def bits_before(extra: Tensor, out: Tensor) -> Tensor:
    """(tiles, 16 steps, lanes): the sum of the earlier steps' ``extra`` in each lane, in ``out``.

    >>> extra = torch.ones(1, 16, 1, dtype=torch.int8)
    >>> bits_before(extra, torch.empty_like(extra)).flatten()[-1].item()
    15
    """
    count, _, lanes = out.copy_(extra).shape
    for half in (1, 2, 4, 8):  # the second half of each stretch takes on the first half's sum
        stretches = out.view(count, -1, 2 * half, lanes)
        stretches[:, :, half:] += stretches[:, :, half - 1 : half]
    return out.sub_(extra)


def rebuild(
    codes: Tensor, scale: Tensor, middle: Tensor, centre: int, widths: Widths, parts: tuple[Tensor, ...], out: Tensor, dtype: torch.dtype
) -> None:
    """Write the bits of ``dtype`` weights into ``out``: (weights,) int16.

    ``codes`` (weights,) int8, ``scale`` and ``middle`` (units,) float32, ``parts``: plane, registers, gaps, values.

    >>> codes, ones, out = torch.full((256,), 10, dtype=torch.int8), torch.ones(16), torch.zeros(256, dtype=torch.int16)
    >>> parts = tuple(torch.zeros(n, dtype=t) for n, t in ((224, torch.uint8), (16, torch.int16), (0, torch.uint8), (0, torch.uint8)))
    >>> rebuild(codes, ones, 0 * ones, 8, Widths(7, 1, 1, 3), parts, out, torch.bfloat16)
    >>> out.view(torch.bfloat16)[0].item()  # the outer edge of what 10 stands for
    2.5
    """
    plane, registers, gaps, values = parts
    parameters = unit_parameters(scale, middle, centre)
    weights, unit = len(codes), len(codes) // len(scale)
    chunk = min(weights, TILE * (_CPU_TILES if codes.device.type == "cpu" else _OTHER_TILES))
    marks, edges = (torch.empty(n, chunk, dtype=t, device=codes.device) for n, t in ((3, torch.int8), (1, torch.float32)))
    for start, count, lanes in tiles(weights):
        end = start + count * STEPS * lanes
        for first in range(start, end, chunk):
            last = min(first + chunk, end)
            shape = ((last - first) // STEPS // lanes, STEPS, lanes)
            units = [part[first // unit : last // unit].view(-1, STEPS, lanes // unit, 1) for part in parameters]
            _rebuild_tiles(
                codes[first:last].view(-1, STEPS, lanes // unit, unit),
                units,
                plane[first * widths.plane // 8 : last * widths.plane // 8],
                registers[first // STEPS : last // STEPS].view(-1, 1, lanes),
                widths,
                marks[:, : last - first].view(3, *shape),
                edges[0, : last - first],
                out[first:last].view(shape),
                dtype,
            )
    add_escapes(gaps, values, widths.plane, out)


def _rebuild_tiles(
    codes: Tensor,
    units: list[Tensor],
    plane: Tensor,
    registers: Tensor,
    widths: Widths,
    marks: Tensor,
    edge: Tensor,
    bits: Tensor,
    dtype: torch.dtype,
) -> None:
    """``codes`` (tiles, 16, units, unit), ``units`` (tiles, 16, units, 1) each, ``bits`` (tiles, 16, lanes); scratch."""
    scale, base, turn, zero = units
    near, same, mask = marks
    k = torch.sub(codes, turn, out=near.view(codes.shape))
    k += torch.bitwise_right_shift(k, 7, out=same.view(codes.shape))
    bits.view(dtype).view(codes.shape).copy_(edge.view(codes.shape).copy_(k).mul_(scale).add_(base))

    near_and_zero(codes, zero, widths.radius, marks[:2].view(2, *codes.shape))
    torch.mul(near, (1 << widths.near) - 1, out=mask).add_(same, alpha=(1 << widths.zero) - (1 << widths.near))
    extra = near.mul_(widths.near).add_(same, alpha=widths.zero - widths.near)
    x, sign = edge.view(torch.int16).view(2, *bits.shape)  # the edges are done with
    x.copy_(bits_before(extra, same).clamp_(max=15))
    torch.bitwise_right_shift(registers, x, out=x).bitwise_and_(sign.copy_(mask))
    torch.bitwise_and(x, 1 << (widths.zero - 1), out=sign)
    bits -= x.mul_(1 << widths.plane)
    bits.sub_(sign, alpha=(1 << (16 - widths.zero)) - (1 << widths.plane))  # it counts 2^15, not what it counted just now
    _take_plane(plane, widths.plane, mask.view(torch.uint8), x, bits)


def _take_plane(plane: Tensor, width: int, low: Tensor, x: Tensor, bits: Tensor) -> None:
    """Subtract from ``bits`` (tiles, 16, lanes) what their planes hold of E; ``low`` (uint8) and ``x`` (int16) are scratch."""
    count, _, lanes = bits.shape
    if width == 4:
        pairs = plane.view(count, 8, lanes)
        torch.bitwise_and(pairs, 15, out=low[:, :8])
        torch.bitwise_right_shift(pairs, 4, out=low[:, 8:])
    elif width == 7:
        rows, eighths = plane.view(count, 7, 2 * lanes), low.view(count, 8, 2 * lanes)
        tops = torch.bitwise_right_shift(rows, 7, out=eighths[:, :7])
        tops *= 2 ** torch.arange(7, dtype=torch.uint8, device=plane.device).view(7, 1)
        torch.sum(tops, 1, dtype=torch.uint8, out=eighths[:, 7])
        torch.bitwise_and(rows, 127, out=eighths[:, :7])
    else:
        rows = plane.view(count, -1)
        low.copy_(rows[:, : STEPS * lanes].view(low.shape))
        quarters = rows[:, STEPS * lanes :].view(count, 4, lanes)
        for i in range(4):
            bits[:, 4 * i : 4 * i + 4] -= (quarters >> 2 * i & 3).short() << 8
    bits -= x.copy_(low)


def add_escapes(gaps: Tensor, values: Tensor, plane: int, out: Tensor) -> None:
    """Subtract the escapes' share of E from ``out`` (weights,) int16: two positions may be the same.

    >>> out = torch.zeros(3, dtype=torch.int16)
    >>> add_escapes(torch.tensor([1, 0], dtype=torch.uint8), torch.tensor([2, 129], dtype=torch.uint8), 7, out)
    >>> out.tolist()
    [0, -768, 0]
    """
    amounts = values.short()
    amounts = torch.where(amounts < 128, amounts << plane, (amounts - 128) << 9)
    out.index_add_(0, torch.cumsum(gaps, 0, dtype=torch.int64), amounts, alpha=-1)
