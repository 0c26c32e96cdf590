"""Experts as residuals: what is missing beside a low-bit code to rebuild the full-precision weights bit for bit."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specter_lab.quantize.bank import ExpertBank
from specter_lab.quantize.bankfile import read_bank, write_bank
from specter_lab.quantize.compiled import CompiledRebuild
from specter_lab.quantize.frame import Frame
from specter_lab.quantize.rebuild import rebuild
from specter_lab.quantize.residual_format import HEADER_BYTES, VERSION, Header, checksum
from specter_lab.quantize.residual_layer import ResidualLayer, build_layer, checksum_of
from specter_lab.quantize.source import ExpertSource
from specter_lab.records import ExpertKey

if TYPE_CHECKING:
    import pandas as pd

FILE = "residual.safetensors"


class ResidualBank:
    """The blobs of an ``ExpertStore`` for a target whose draft's codes (qint4, qint8) are at hand: about 8.5 bits a weight.

    A blob alone is no expert: ``rebuild`` needs its key as well, and with it the codes. Blobs of one layer have one size.
    Build it with ``build`` or ``load``. ``codes`` may be on another device, where blobs are then copied to be rebuilt.

    >>> from specter_lab.quantize import TensorSource
    >>> source = TensorSource([[{"up_proj": torch.randn(64, 128).bfloat16()}] * 4])
    >>> bank = ResidualBank.build(source, ExpertBank.pack(source, "qint4"), compiled=False)
    >>> torch.equal(bank.own_weights(ExpertKey(0, 3))["up_proj"], source.tensors(ExpertKey(0, 3))["up_proj"])
    True
    """

    def __init__(self, codes: ExpertBank, layers: Sequence[ResidualLayer], compiled: bool | str = "auto") -> None:
        self.codes = codes
        self._layers = tuple(layers)
        self._compiled = CompiledRebuild.load(compiled)
        self._described: dict[ExpertKey, tuple[ctypes.Array[Any], ...]] = {}
        self._device = codes.device
        self.name = f"{str(layers[0].frame.dtype).removeprefix('torch.')} residual of {codes.name}"

    @classmethod
    def build(cls, source: ExpertSource, codes: ExpertBank, compiled: bool | str = "auto") -> ResidualBank:
        """The residuals of ``source`` (such as ``moe.store``: bfloat16 or float16) beside ``codes``, the same experts' codes.

        Tensors that ``codes`` doesn't hold as qint4 or qint8 are stored raw, and so is an expert whose residual would be
        no smaller. Any bits come back, NaN and infinity too: for a weight that has them, which quanto refuses, pack
        ``codes`` from a copy where they are 0. ``compiled``: rebuild by compiled C ("auto": where that works).

        ValueError if ``codes`` can't be the same experts', if the experts of a layer differ, or if nothing is coded.
        """
        if [source.experts(i) for i in range(source.layers)] != [codes.experts(i) for i in range(codes.layers)]:
            raise ValueError(
                f"Residuals need codes of the same experts; the source has {source.layers} layers and the codes {codes.layers}, or their "
                "experts differ in number: pack the code bank from this very source"
            )
        bank = cls(codes, [build_layer(source, codes, layer) for layer in range(source.layers)], compiled)
        for layer in range(bank.layers):
            for expert in range(bank.experts(layer)):
                bank.verify(ExpertKey(layer, expert))  # whatever this computer does differently, nobody shall find out later
        return bank

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return len(self._layers)

    @property
    def nbytes(self) -> int:
        """Size of all blobs."""
        return sum(layer.blobs.numel() for layer in self._layers)

    def experts(self, layer: int) -> int:
        """Number of experts of that layer."""
        return len(self._layers[layer].headers)

    def transposed(self, layer: int) -> bool:
        """Whether the layer's rebuilt weights are (in, out), for ``x @ w``."""
        return self._layers[layer].frame.transposed

    def blob_bytes(self, layer: int) -> int:
        """Size of one expert's blob: that of the layer's largest residual, up to a multiple of 64."""
        return self._layers[layer].blobs.shape[1]

    def rebuilt_bytes(self, layer: int) -> int:
        """Size of the memory that ``rebuild`` writes an expert to."""
        return self._layers[layer].frame.layout.nbytes

    def blobs(self, layer: int) -> Tensor:
        """(experts, blob_bytes) uint8: the layer's memory itself, contiguous, say to page-lock it."""
        return self._layers[layer].blobs

    def blob(self, key: ExpertKey) -> Tensor:
        """(blob_bytes,) uint8: that expert's row of ``blobs``."""
        return self._layers[key.layer].blobs[key.expert]

    def rebuild(self, key: ExpertKey, blob: Tensor, out: Tensor | None = None) -> dict[str, Tensor]:
        """The expert's exact dense tensors, out of its codes and ``blob``: a copy of ``self.blob(key)`` where the codes are.

        ``out``: (rebuilt_bytes(layer),) uint8 to write them to; they alias it, and the next rebuild there replaces them.
        Nothing is checked but the size (``verify`` does): a blob of another expert gives other numbers.
        """
        layer, header = self._layers[key.layer], self._layers[key.layer].headers[key.expert]
        frame = layer.frame
        if out is None:
            out = torch.empty(frame.layout.nbytes, dtype=torch.uint8, device=self._device)
        for what, tensor, size in (("blob", blob, layer.blobs.shape[1]), ("out", out, frame.layout.nbytes)):
            if tensor.shape != (size,) or tensor.dtype != torch.uint8 or not tensor.is_contiguous() or tensor.device != self._device:
                raise ValueError(
                    f"For layer {key.layer}, {what} must be contiguous uint8 of shape ({size},) on {self._device} like the codes; "
                    f"got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: allocate it by blob_bytes or rebuilt_bytes"
                )
        if header.raw:
            out.copy_(blob[HEADER_BYTES : frame.raw_bytes])
        elif self._compiled is not None and self._device.type == "cpu":
            if key not in self._described:
                self._described[key] = self._compiled.describe(frame, self.codes.own_weights(key), header.entries)
            self._compiled(frame, self._described[key], blob, out)
            frame.copy_rest(blob, out)
        else:
            plane, registers, _, gaps, values = frame.parts(blob, header.entries)
            units = frame.units(self.codes.own_weights(key))
            rebuild(*units, frame.centre, frame.widths, (plane, registers, gaps, values), frame.stream(out), frame.dtype)
            frame.copy_rest(blob, out)
        return frame.tensors(out)

    def own_weights(self, key: ExpertKey) -> dict[str, Tensor]:
        """``rebuild`` from the expert's own blob: anew at each call, since keeping them would cost what residuals save."""
        return self.rebuild(key, self.blob(key).to(self._device))

    def weights(self, layer: int, blob: Tensor) -> dict[str, Tensor]:
        """A blob alone gives no tensors: ``rebuild`` needs its key as well."""
        return {}

    def verify(self, key: ExpertKey, blob: Tensor | None = None) -> None:
        """Check the checksums of ``blob`` (the expert's own by default, or a copy of it anywhere), and what is rebuilt from it.

        ValueError if a bit of the blob has changed, if it is another expert's, or if the codes aren't those it was built with.
        """
        wanted, given = self._layers[key.layer].headers[key.expert], self.blob(key) if blob is None else blob
        host = given.cpu()
        if Header.of(host) != wanted or checksum(host) != wanted.checksum:
            raise ValueError(
                f"The residual of layer {key.layer} expert {key.expert} must be as it was built; its checksum is {checksum(host):#010x} "
                f"instead of {wanted.checksum:#010x}: copy the blob anew, or load the bank again"
            )
        result = checksum_of(self.rebuild(key, given.to(self._device)))
        if result != wanted.result:
            raise ValueError(
                f"Residuals need the codes they were built with; those of layer {key.layer} expert {key.expert} give weights of checksum "
                f"{result:#010x} instead of {wanted.result:#010x}: build the residuals anew for this code bank"
            )

    def report(self) -> pd.DataFrame:
        """A row for each layer: bits a weight (mean as used, and as padded to one size), escapes a weight, experts stored raw."""
        import pandas as pd

        rows = []
        for layer in self._layers:
            weights, count = layer.frame.numbers, len(layer.headers)
            rows.append(
                {
                    "experts": count,
                    "weights": weights,
                    "bits_per_weight": 8 * sum(header.used for header in layer.headers) / count / weights,
                    "padded_bits_per_weight": 8 * layer.blobs.shape[1] / weights,
                    "escapes_per_weight": sum(header.entries for header in layer.headers) / count / weights,
                    "raw_experts": sum(header.raw for header in layer.headers),
                }
            )
        return pd.DataFrame(rows).rename_axis("layer")

    def save(self, folder: str | os.PathLike[str], fingerprint: Mapping[str, Any] | None = None) -> None:
        """Write ``folder``/residual.safetensors, replacing an old one at once or not at all; the codes are saved apart.

        ``fingerprint``: JSON that says what the bank belongs to, such as the model's name; ``load`` compares it.
        """
        header = {"residual_version": VERSION, "layers": [layer.frame.to_json() for layer in self._layers]}
        write_bank(
            folder, header, [((len(layer.blobs), layer.blobs.shape[1]), [layer.blobs]) for layer in self._layers], fingerprint or {}, FILE
        )

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        codes: ExpertBank,
        fingerprint: Mapping[str, Any] | None = None,
        compiled: bool | str = "auto",
    ) -> ResidualBank:
        """The bank that ``save`` wrote, for the codes it was built with.

        All bytes are checked, and one expert a layer is rebuilt. ValueError if the file is missing, broken, changed or
        of another version, if ``fingerprint`` is given and differs, or if ``codes`` are others.
        """
        header, stored = read_bank(folder, fingerprint, name=FILE)
        if header.get("residual_version") != VERSION:
            raise ValueError(
                f"{FILE} in {folder} must have residual version {VERSION}; it has {header.get('residual_version')}: build and save it anew"
            )
        layers = []
        for i, (data, blobs) in enumerate(zip(header["layers"], stored, strict=True)):
            frame = Frame.from_json(data)
            if i >= codes.layers or len(blobs) != codes.experts(i) or not frame.fits(codes.tensors(ExpertKey(i, 0))):
                raise ValueError(f"Residuals need the codes they were built with; layer {i} of {codes!r} is unlike them: load those codes")
            layers.append(ResidualLayer(frame, blobs, tuple(map(Header.of, blobs))))
        bank = cls(codes, layers, compiled)
        for i in range(bank.layers):
            bank.verify(ExpertKey(i, 0))
        return bank

    def __repr__(self) -> str:
        experts = sum(map(self.experts, range(self.layers)))
        size = self.nbytes / 1e6
        return f"ResidualBank({self.name}, {self.layers} layer{'s' * (self.layers > 1)}, {experts} experts, {size:.1f} MB)"
