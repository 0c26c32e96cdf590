"""One layer's residuals: a row of bytes for each expert, and how they come out of its weights and codes."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specter_lab.quantize.bank import ExpertBank
from specter_lab.quantize.frame import Frame
from specter_lab.quantize.layout import ALIGNMENT
from specter_lab.quantize.residual_format import HEADER_BYTES, Header
from specter_lab.quantize.shrink import shrink
from specter_lab.quantize.source import ExpertSource
from specter_lab.records import ExpertKey


@dataclass(frozen=True)
class ResidualLayer:
    """``blobs`` (experts, blob_bytes) uint8 in host memory, the plan of their parts, and what their headers say.

    >>> from specter_lab.quantize import TensorSource
    >>> source = TensorSource([[{"up_proj": torch.ones(16, 128).bfloat16()}] * 2])
    >>> build_layer(source, ExpertBank.pack(source, "qint4"), 0).blobs.shape
    torch.Size([2, 2112])
    """

    frame: Frame
    blobs: Tensor
    headers: tuple[Header, ...]


def build_layer(source: ExpertSource, codes: ExpertBank, layer: int) -> ResidualLayer:
    """The residuals of one layer's experts beside their codes; ValueError as ``Frame.of`` and ``Frame.write`` raise it.

    >>> from specter_lab.quantize import TensorSource
    >>> source = TensorSource([[{"up_proj": torch.ones(16, 128).bfloat16()}] * 2])
    >>> [header.expert for header in build_layer(source, ExpertBank.pack(source, "qint4"), 0).headers]
    [0, 1]
    """
    turned = bool(source.transposed(layer)) if hasattr(source, "transposed") else False
    first = source.tensors(ExpertKey(layer, 0))
    dtype = next((tensor.dtype for tensor in first.values() if tensor.ndim == 2), torch.float32)
    frame = Frame.of(first, codes.tensors(ExpertKey(layer, 0)), dtype, turned)
    found = [_build_expert(frame, source, codes, ExpertKey(layer, expert)) for expert in range(source.experts(layer))]
    size = -(-max(header.used for header, _ in found) // ALIGNMENT) * ALIGNMENT
    with torch.inference_mode(False):
        blobs = torch.zeros(len(found), size, dtype=torch.uint8)
    for row, (header, data) in zip(blobs, found, strict=True):
        row[: header.used] = data
        header.seal(row)
    return ResidualLayer(frame, blobs, tuple(map(Header.of, blobs)))


def _build_expert(frame: Frame, source: ExpertSource, codes: ExpertBank, key: ExpertKey) -> tuple[Header, Tensor]:
    """Its header, still without a checksum, and its blob without padding."""
    whole = torch.zeros(frame.layout.nbytes, dtype=torch.uint8, device=codes.device)
    frame.write(source.tensors(key), whole)
    parts = shrink(*frame.units(codes.tensors(key)), frame.centre, frame.widths, frame.stream(whole), frame.dtype)
    entries = len(parts[2])
    raw = frame.used_bytes(entries) >= frame.raw_bytes
    used = frame.raw_bytes if raw else frame.used_bytes(entries)
    data = torch.zeros(used, dtype=torch.uint8)
    if raw:
        data[HEADER_BYTES:] = whole
    else:
        plane, registers, rest, gaps, values = frame.parts(data, entries)
        for place, part in zip((plane, registers, gaps, values), parts, strict=True):
            place.copy_(part)
        rest.copy_(whole[2 * frame.weights :])
    result = checksum_of(frame.tensors(whole))
    return Header(layer=key.layer, expert=key.expert, raw=raw, entries=0 if raw else entries, used=used, result=result), data


def checksum_of(tensors: Mapping[str, Tensor]) -> int:
    """CRC32 over the tensors' bytes, one after the other.

    >>> checksum_of({"up_proj": torch.zeros(1, 64, dtype=torch.uint8)})
    1972200246
    """
    value = 0
    for tensor in tensors.values():
        value = zlib.crc32(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data, value)
    return value
