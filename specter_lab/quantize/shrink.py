"""Residuals out of weights and codes: the inverse of ``rebuild``, run once when a bank is built."""

from __future__ import annotations

import torch
from torch import Tensor

from specter_lab.quantize.rebuild import bits_before, near_and_zero, rebuild, unit_parameters
from specter_lab.quantize.residual_format import STEPS, Widths, tiles

_TILES = 16  # about a million weights at a time


def shrink(
    codes: Tensor, scale: Tensor, middle: Tensor, centre: int, widths: Widths, wanted: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Plane (uint8), registers (int16), gaps and values (uint8) from which ``rebuild`` makes ``wanted``: (weights,) int16.

    >>> codes, ones = torch.full((256,), 10, dtype=torch.int8), torch.ones(16)
    >>> wanted, out = torch.arange(256, dtype=torch.int16), torch.zeros(256, dtype=torch.int16)
    >>> parts = shrink(codes, ones, 0 * ones, 8, Widths(7, 1, 1, 3), wanted, torch.bfloat16)
    >>> rebuild(codes, ones, 0 * ones, 8, Widths(7, 1, 1, 3), parts, out, torch.bfloat16)
    >>> torch.equal(out, wanted)
    True
    """
    weights, device = len(codes), codes.device
    plane = torch.zeros(weights * widths.plane // 8, dtype=torch.uint8, device=device)
    registers = torch.zeros(weights // STEPS, dtype=torch.int16, device=device)
    nothing = torch.zeros(0, dtype=torch.uint8, device=device)
    missing = torch.empty_like(wanted)
    rebuild(codes, scale, middle, centre, widths, (plane, registers, nothing, nothing), missing, dtype)  # the edges
    missing -= wanted
    zero = unit_parameters(scale, middle, centre)[3]
    unit = weights // len(scale)
    for start, count, lanes in tiles(weights):
        for first in range(start, start + count * STEPS * lanes, _TILES * STEPS * lanes):
            last = min(first + _TILES * STEPS * lanes, start + count * STEPS * lanes)
            e = (missing[first:last].int() & 0xFFFF).view(-1, STEPS, lanes)
            grouped = codes[first:last].view(-1, unit)
            zeros, scratch = zero[first // unit : last // unit, None], grouped.new_empty(2, *grouped.shape)
            near, same = near_and_zero(grouped, zeros, widths.radius, scratch)
            extra = near * widths.near + same * (widths.zero - widths.near)
            x, register = _registers(e, extra.int().view(e.shape), widths)
            registers[first // STEPS : last // STEPS] = register.view(-1)
            low = e & ((1 << widths.plane) - 1)
            plane[first * widths.plane // 8 : last * widths.plane // 8] = _plane(low, widths.plane).view(-1)
            sign = x >> (widths.zero - 1)
            held = low + ((x - (sign << (widths.zero - 1))) << widths.plane) + (sign << 15)
            missing[first:last] = _int16(e - held & 0xFFFF).view(-1)
    return plane, registers, *_escapes(missing, widths.plane)


def _registers(e: Tensor, extra: Tensor, widths: Widths) -> tuple[Tensor, Tensor]:
    """What each weight of ``e`` (tiles, 16, lanes) int32 has in its register, and the registers: int32 and int16."""
    ordinary = e >> widths.plane & (1 << extra) - 1
    small = (e & 0x7FFF) >> widths.plane & (1 << widths.zero - 1) - 1
    x = torch.where(extra == widths.zero, small + (e >> 15 << widths.zero - 1), ordinary)
    before = bits_before(extra, torch.empty_like(extra))
    end = before + extra
    # bit 15 repeats when a lane reads on: it must be 0 there
    fits = end <= torch.where(end[:, -1:] <= 16, 16, 15)
    x = torch.where(fits, x, 0)
    return x, _int16((x << torch.where(fits, before, 0)).sum(1).int())


def _plane(low: Tensor, width: int) -> Tensor:
    """(tiles, bytes) uint8 out of (tiles, 16, lanes) int32."""
    count, _, lanes = low.shape
    if width == 4:
        return (low[:, :8] + (low[:, 8:] << 4)).to(torch.uint8).view(count, -1)
    if width == 7:
        rows = low.view(count, 8, 2 * lanes)
        bit = torch.arange(7, device=low.device).view(7, 1)
        return (rows[:, :7] + ((rows[:, 7:] >> bit & 1) << 7)).to(torch.uint8).view(count, -1)
    high = low.view(count, 4, 4, lanes) >> 8
    quarters = high[:, 0] + (high[:, 1] << 2) + (high[:, 2] << 4) + (high[:, 3] << 6)
    return torch.cat([(low & 255).view(count, -1), quarters.view(count, -1)], 1).to(torch.uint8)


def _escapes(missing: Tensor, plane: int) -> tuple[Tensor, Tensor]:
    """Gaps and values for what is still missing: (weights,) int16, multiples of 2^plane."""
    places = missing.nonzero().squeeze(1)
    amounts = missing[places].int() & 0xFFFF
    one = amounts < 128 << plane
    first = torch.where(one, amounts >> plane, 128 + (amounts >> 9))
    second = torch.where(one, 0, (amounts & 511) >> plane)
    needed = torch.stack([torch.ones_like(one), second > 0], 1)
    places = torch.stack([places, places], 1)[needed]
    found = torch.stack([first, second], 1)[needed]
    distances = torch.diff(places, prepend=places.new_zeros(1))
    bridges = (distances - 1).clamp_(min=0) // 255
    at = torch.cumsum(bridges + 1, 0) - 1
    entries = int(at[-1]) + 1 if len(at) else 0
    gaps = torch.full((entries,), 255, dtype=torch.uint8, device=missing.device)
    values = torch.zeros_like(gaps)
    gaps[at] = (distances - 255 * bridges).to(torch.uint8)
    values[at] = found.to(torch.uint8)
    return gaps, values


def _int16(values: Tensor) -> Tensor:
    """int32 in 0..65535 to the int16 with the same bits."""
    return (values - ((values & 0x8000) << 1)).short()
