"""Experts losslessly compressed by themselves: no draft's code beside them, about 11.2 bits a weight instead of 16."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specter_lab.quantize.bank import ExpertBank
from specter_lab.quantize.compiled import library
from specter_lab.records import ExpertKey

HEADER_BYTES, ALIGNMENT, WINDOW = 64, 64, 7


class CompressedBank:
    """The blobs of a bfloat16 ``ExpertBank``, each exponent in 3 bits where it is one of seven neighbours.

    Format, version 1, for the n 16-bit words of an expert's dense blob: 64 bytes of header (uint32 words: version, the top
    exponent t, number of escapes, CRC32 of the dense blob), n bytes of sign and mantissa, n / 4 bytes with the low two
    bits of i = t - exponent (word w in byte w % (n / 4), bits 2 (w // (n / 4))), n / 8 bytes with the third (word w in byte
    w % (n / 8), bit w // (n / 8)), and for each word with i = 7, in order, its exponent as a byte. Each expert takes the t
    that leaves the fewest escapes. Any 16 bits come back, NaN included.

    Source: exponents of trained weights hold 2.6 bits of information (DFloat11, arXiv 2504.11651); fixed widths instead
    of its Huffman codes cost half a bit and need no table.

    >>> from specter_lab.quantize import TensorSource
    >>> bank = CompressedBank(ExpertBank.pack(TensorSource([[{"up_proj": torch.randn(64, 128).bfloat16()}] * 4]), "bfloat16"))
    >>> torch.equal(bank.own_weights(ExpertKey(0, 3))["up_proj"], bank.dense.own_weights(ExpertKey(0, 3))["up_proj"])
    True
    """

    def __init__(self, dense: ExpertBank) -> None:
        if dense.name != "bfloat16":
            raise ValueError(
                f"Exponents are compressed in bfloat16 experts; these are {dense.name}. Load the model with dtype='bfloat16', or use "
                "residuals beside a draft's codes (they take float16 too)."
            )
        self.dense, self.name = dense, "bfloat16 compressed"
        self._blobs = []
        for layer in range(dense.layers):
            rows = [compress(dense.blob(ExpertKey(layer, expert))) for expert in range(dense.experts(layer))]
            size = -(-max(map(len, rows)) // ALIGNMENT) * ALIGNMENT
            with torch.inference_mode(False):
                blobs = torch.zeros(len(rows), size, dtype=torch.uint8)
            for row, blob in zip(rows, blobs, strict=True):
                blob[: len(row)] = row
            self._blobs.append(blobs)

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return self.dense.layers

    @property
    def nbytes(self) -> int:
        """Size of all blobs."""
        return sum(blobs.numel() for blobs in self._blobs)

    @property
    def bits_per_weight(self) -> float:
        """16 for the dense blobs; padding counts."""
        return 16 * self.nbytes / self.dense.nbytes

    def experts(self, layer: int) -> int:
        """Number of experts of that layer."""
        return self.dense.experts(layer)

    def transposed(self, layer: int) -> bool:
        """Whether the layer's rebuilt weights are (in, out), for ``x @ w``."""
        return self.dense.transposed(layer)

    def blob_bytes(self, layer: int) -> int:
        """Size of one expert's blob: that of the layer's largest, up to a multiple of 64."""
        return int(self._blobs[layer].shape[1])

    def rebuilt_bytes(self, layer: int) -> int:
        """Size of the memory that ``rebuild`` writes an expert to."""
        return self.dense.blob_bytes(layer)

    def blobs(self, layer: int) -> Tensor:
        """(experts, blob_bytes) uint8: the layer's memory itself, contiguous, say to page-lock it."""
        return self._blobs[layer]

    def blob(self, key: ExpertKey) -> Tensor:
        """(blob_bytes,) uint8: that expert's row of ``blobs``."""
        return self._blobs[key.layer][key.expert]

    def rebuild(self, key: ExpertKey, blob: Tensor, out: Tensor | None = None) -> Mapping[str, Tensor]:
        """The expert's exact tensors out of a copy of its blob; they alias ``out``, (rebuilt_bytes(layer),) uint8."""
        if out is None:
            out = torch.empty(self.rebuilt_bytes(key.layer), dtype=torch.uint8, device=blob.device)
        decompress(blob, out)
        return self.dense.weights(key.layer, out)

    def own_weights(self, key: ExpertKey) -> Mapping[str, Tensor]:
        """``rebuild`` from the expert's own blob, anew at each call."""
        return self.rebuild(key, self.blob(key))

    def weights(self, layer: int, blob: Tensor) -> dict[str, Tensor]:
        """A blob alone has no tensors: ``rebuild`` makes them."""
        return {}

    def verify(self, key: ExpertKey, blob: Tensor | None = None) -> None:
        """``ValueError`` if a bit of ``blob`` (the expert's own by default, or a copy of it) has changed."""
        given = (self.blob(key) if blob is None else blob).cpu()
        out = torch.empty(self.rebuilt_bytes(key.layer), dtype=torch.uint8)
        try:
            decompress(given, out)
            again = compress(out)  # with the checksum of what was decompressed
            sound = torch.equal(given[: len(again)], again)
        except (IndexError, RuntimeError):  # a changed count of escapes
            sound = False
        if not sound:
            raise ValueError(f"A compressed expert must be as it was built; {key} differs from its checksum: copy its blob anew.")

    def __repr__(self) -> str:
        return f"CompressedBank({self.layers} layers, {self.bits_per_weight:.2f} bits a weight, {self.nbytes / 1e6:.1f} MB)"


def compress(dense: Tensor) -> Tensor:
    """(2 n,) uint8, n a multiple of 8 -> header, planes and escapes; see ``CompressedBank`` for the format.

    >>> words = torch.randn(64).bfloat16().view(torch.uint8)
    >>> out = torch.empty_like(words); decompress(compress(words), out); torch.equal(words, out)
    True
    """
    words = dense.cpu().view(torch.int16)
    exponents = (words >> 7 & 255).to(torch.uint8)
    counts = torch.bincount(exponents.int(), minlength=256)
    top = int(counts.unfold(0, WINDOW, 1).sum(1).argmax()) + WINDOW - 1
    top = max(top, WINDOW)
    distance = top - exponents.short()
    index = torch.where((distance >= 0) & (distance < WINDOW), distance, WINDOW).to(torch.uint8)
    escapes = exponents[index == WINDOW]
    quarters, eighths = index.view(4, -1), index.view(8, -1)
    two = torch.stack([(quarters[q] & 3) << 2 * q for q in range(4)]).sum(0, dtype=torch.uint8)
    one = torch.stack([(eighths[e] >> 2) << e for e in range(8)]).sum(0, dtype=torch.uint8)
    low = ((words >> 8 & 128) | (words & 127)).to(torch.uint8)
    header = torch.zeros(HEADER_BYTES // 4, dtype=torch.int32)
    header[:4] = torch.tensor([1, top, len(escapes), _crc(dense.cpu())], dtype=torch.int32)
    return torch.cat([header.view(torch.uint8), low, two, one, escapes])


def decompress(blob: Tensor, out: Tensor) -> None:
    """Write the dense bytes, (2 n,) uint8, out of what ``compress`` made; what follows it in ``blob`` is ignored.

    >>> words = torch.zeros(16, dtype=torch.uint8)
    >>> out = torch.ones_like(words); decompress(compress(words), out); int(out.sum())
    0
    """
    words = out.view(torch.int16)
    n = len(words)
    _, top, count, _ = blob[:16].cpu().view(torch.int32).tolist()
    low, two, one, escapes = blob[HEADER_BYTES : HEADER_BYTES + n + n // 4 + n // 8 + count].split([n, n // 4, n // 8, count])
    compiled = _compiled() if out.device.type == "cpu" else None
    if compiled is not None:
        compiled(low.data_ptr(), two.data_ptr(), one.data_ptr(), escapes.data_ptr(), count, n, top, words.data_ptr())
    else:
        _decompress(low, two, one, escapes, top, words)


def _decompress(low: Tensor, two: Tensor, one: Tensor, escapes: Tensor, top: int, words: Tensor) -> None:
    """The same in plain torch, for any device."""
    index = torch.empty(len(words), dtype=torch.uint8, device=low.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=low.device)[:, None]
    torch.bitwise_right_shift(two, shifts[::2], out=index.view(4, -1)).bitwise_and_(3)
    index.view(8, -1).add_(torch.bitwise_right_shift(one, shifts).bitwise_and_(1), alpha=4)
    words.copy_(low.view(torch.int8)).bitwise_and_(-32641)  # sign and mantissa to their place: 0x807f
    words.bitwise_or_((top - index.short()) << 7)
    words[(index == WINDOW).nonzero().flatten()] += (escapes.short() - (top - WINDOW)) << 7


@cache
def _compiled() -> Any:
    """C's ``decompress`` where it can be had and gives the same bits; else None."""
    function = getattr(library()[0], "decompress", None)
    if function is not None:
        function.restype, function.argtypes = None, [*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 3, ctypes.c_void_p]
        words = torch.randint(0, 256, (2, 4096), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)[0]
        parts = compress(words)[HEADER_BYTES:].split([2048, 512, 256, len(compress(words)) - HEADER_BYTES - 2816])
        top, got = int(compress(words)[4:8].view(torch.int32)), torch.empty_like(words)
        function(*(part.data_ptr() for part in parts), len(parts[3]), 2048, top, got.data_ptr())
        if not torch.equal(got, words):
            return None
    return function


def _crc(dense: Tensor) -> int:
    value = zlib.crc32(dense.numpy().data)
    return value - (1 << 32) if value >= 1 << 31 else value
