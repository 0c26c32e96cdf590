"""All experts of a model as flat blobs, in one number format."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specter_lab.quantize.bankfile import read_bank, write_bank
from specter_lab.quantize.formats import Format, format_named
from specter_lab.quantize.layer import PackedLayer, outline_layer, pack_expert, pack_layer
from specter_lab.quantize.layout import Wrapped
from specter_lab.quantize.report import bytes_report, format_of
from specter_lab.quantize.source import ExpertSource
from specter_lab.quantize.tinygemm import fast, portable
from specter_lab.records import ExpertKey

if TYPE_CHECKING:
    import pandas as pd


class ExpertBank:
    """An ``ExpertStore`` that also packs, reports, saves and loads. Build it with ``pack`` or ``load``.

    A layer is one contiguous (experts, blob_bytes) uint8 tensor. Layers may differ in experts and shapes; the
    experts of one layer are alike. ``name`` is such as "bfloat16", "qint8" or "qint4 group 128" (several group sizes
    are all listed). ``mapped``: the blobs are in a file (see ``load``). A bank is a source itself: a dense one can be
    packed once more, into a draft's.

    >>> from specter_lab.quantize import TensorSource
    >>> bank = ExpertBank.pack(TensorSource([[{"up_proj": torch.ones(16, 128)}] * 4]), "qint8")
    >>> bank
    ExpertBank(qint8, 1 layer, 4 experts, 8.4 kB)
    """

    def __init__(self, format: Format, layers: Sequence[PackedLayer], mapped: bool = False) -> None:
        self.format, self.mapped = format, mapped
        self._layers = tuple(layers)
        self._own: dict[ExpertKey, Mapping[str, Tensor]] = {}
        self._rows: list[list[Tensor]] = []
        groups = [text.rpartition(" ")[2] for text in self._formats() if "group" in text]
        self.name = f"{format.name} group {'/'.join(groups)}" if groups else format.name

    @classmethod
    def pack(cls, source: ExpertSource, format: Format | str, progress: bool = False) -> ExpertBank:
        """Pack every expert of ``source``, one at a time, on the device it is on. ``progress`` shows a bar.

        Biases keep their dtype (``report`` lists them). ValueError if a weight can't be packed (it names layer,
        expert and tensor), if the experts of a layer differ, or if a quantised format would quantise nothing.

        >>> from specter_lab.quantize import TensorSource
        >>> ExpertBank.pack(TensorSource([[{"up_proj": torch.ones(16, 96)}]]), "qint4").name
        'qint4 group 32'
        """
        if isinstance(format, str):
            format = format_named(format)
        if source.layers < 1:
            raise ValueError("A bank needs at least one MoE layer; the source has none: is this a mixture-of-experts model?")
        with _bar(source, format, progress) as done:
            packed = [pack_layer(source, layer, format, done) for layer in range(source.layers)]
        bank = cls(format, packed)
        if format.quantises and not bank._formats():
            names = ", ".join(packed[0].layout.fields)
            raise ValueError(f"{format.name} must quantise something; here is no 2-D float weight ({names}): check the source's tensors")
        return bank

    @classmethod
    def join(cls, banks: Sequence[ExpertBank]) -> ExpertBank:
        """The layers of several banks of one format as one bank; nothing is copied. ValueError if formats differ.

        >>> from specter_lab.quantize import TensorSource
        >>> one = ExpertBank.pack(TensorSource([[{"up_proj": torch.ones(16, 128)}]]), "qint8")
        >>> ExpertBank.join([one, one]).layers
        2
        """
        formats = {bank.format.name for bank in banks}
        if len(formats) != 1:
            raise ValueError(f"Joined banks must share one format; got {', '.join(sorted(formats)) or 'no banks'}: pack them alike")
        return cls(banks[0].format, [layer for bank in banks for layer in bank._layers])

    def split(self) -> list[ExpertBank]:
        """A bank for each layer, over the same bytes: the opposite of ``join``."""
        return [ExpertBank(self.format, [layer]) for layer in self._layers]

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype that activations need; None: their own."""
        return self.format.compute_dtype

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return len(self._layers)

    @property
    def nbytes(self) -> int:
        """Size of all blobs."""
        return sum(layer.blobs.numel() for layer in self._layers)

    @property
    def device(self) -> torch.device:
        """Where the blobs are."""
        return self._layers[0].blobs.device

    def experts(self, layer: int) -> int:
        """Number of experts of that layer."""
        return len(self._layers[layer].blobs)

    def transposed(self, layer: int) -> bool:
        """Whether the layer's weights are (in, out), for ``x @ w``. Quantised ones never are."""
        return self._layers[layer].transposed

    def blob_bytes(self, layer: int) -> int:
        """Size of one expert's blob, a multiple of 64."""
        return self._layers[layer].layout.nbytes

    def blobs(self, layer: int) -> Tensor:
        """(experts, blob_bytes) uint8: the layer's memory itself, contiguous, say to page-lock it."""
        return self._layers[layer].blobs

    def blob(self, key: ExpertKey) -> Tensor:
        """(blob_bytes,) uint8: that expert's row of ``blobs``."""
        if not self._rows:
            self._rows = [list(layer.blobs.unbind()) for layer in self._layers]
        return self._rows[key.layer][key.expert]

    def weights(self, layer: int, blob: Tensor) -> dict[str, Tensor]:
        """Named tensors, dense or quanto's, that alias ``blob``: refilling the blob refills them.

        ``F.linear(x, w)`` computes with a quanto tensor; ``copy_``, ``clone`` and indexing don't do what they say.
        ValueError for a blob of another size, or on another kind of device than the packing is for.
        """
        return self._layers[layer].layout.views(blob)

    def own_weights(self, key: ExpertKey) -> Mapping[str, Tensor]:
        """``weights`` over the expert's own blob, made at the first call and kept."""
        if key not in self._own:
            self._own[key] = self.weights(key.layer, self.blob(key))
        return self._own[key]

    def tensors(self, key: ExpertKey) -> Mapping[str, Tensor]:
        """The same, not kept: a bank is a source."""
        return self.weights(key.layer, self.blob(key))

    def to(self, device: torch.device | str) -> ExpertBank:
        """The bank on ``device``, packed for its kernels; itself if it is there. The outputs stay the same up to rounding."""
        if torch.empty(0, device=device).device == self.device:
            return self
        moved = []
        for layer in self._layers:
            plain = layer.mapped(portable)
            moved.append(PackedLayer(plain.layout, plain.blobs.to(device), plain.transposed, plain.before).mapped(fast))
        return ExpertBank(self.format, moved)

    def page_locked(self) -> ExpertBank:
        """The bank in host memory that a GPU's copy engine reads directly; needs a GPU. Views made before stay on the old one."""
        return ExpertBank(self.format, [replace(layer, blobs=layer.blobs.pin_memory()) for layer in self._layers])

    def report(self) -> pd.DataFrame:
        """Bytes before and after by component: see ``bytes_report``."""
        return bytes_report(self._layers)

    def save(self, folder: str | os.PathLike[str], fingerprint: Mapping[str, Any] | None = None) -> None:
        """Write ``folder``/bank.safetensors, replacing an old one at once or not at all.

        ``fingerprint``: JSON that says what the bank belongs to, such as the model's name; ``load`` compares it.
        """
        plain = [layer.mapped(portable) for layer in self._layers]
        pieces = (((len(layer.blobs), layer.layout.nbytes), [layer.blobs.cpu()]) for layer in plain)
        write_bank(folder, _header(self.format, plain), list(pieces), fingerprint or {})

    @classmethod
    def pack_to(
        cls,
        folder: str | os.PathLike[str],
        source: ExpertSource,
        format: Format | str,
        fingerprint: Mapping[str, Any] | None = None,
        progress: bool = False,
    ) -> None:
        """``pack`` and ``save`` in one, for a bank that memory needn't hold: an expert at a time goes to the file.

        For formats that don't quantise (ValueError): a quantised bank is small, and its file comes from another layout.
        """
        format = format_named(format) if isinstance(format, str) else format
        if format.quantises:
            raise ValueError(f"Only a bank that isn't quantised is packed to a file; got {format.name}: use pack, then save")
        outlines = [outline_layer(source, layer, format) for layer in range(source.layers)]
        with _bar(source, format, progress) as done:

            def pieces(layer: int, outline: PackedLayer) -> Iterator[Tensor]:
                blob = torch.zeros(outline.layout.nbytes, dtype=torch.uint8)
                for expert in range(len(outline.blobs)):
                    outline.layout.write(pack_expert(source, ExpertKey(layer, expert), format), blob)
                    yield blob
                    done()

            layers = [((len(outline.blobs), outline.layout.nbytes), pieces(i, outline)) for i, outline in enumerate(outlines)]
            write_bank(folder, _header(format, outlines), layers, fingerprint or {})

    @classmethod
    def load(cls, folder: str | os.PathLike[str], fingerprint: Mapping[str, Any] | None = None, *, mapped: bool = False) -> ExpertBank:
        """The bank that ``save`` wrote, packed for this CPU: ``F.linear`` gives the same bits on the same machine.

        ``mapped`` leaves the experts in the file: the system reads a blob when it is touched, keeps it while memory
        lasts, and nothing is checked but the header. Writing to such a blob ends the process.
        ValueError if the file is missing, broken or changed, of another version, if ``fingerprint`` is given and
        differs (it names the entries), or if a quantised bank is to be mapped.
        """
        header, stored = read_bank(folder, fingerprint, mapped=mapped)
        if mapped and format_named(**header["format"]).quantises:
            raise ValueError(f"Only a bank that isn't quantised can be mapped; that in {folder} is {header['format']['name']}: load it")
        layers = []
        for i, (data, rows) in enumerate(zip(header["layers"], stored, strict=True)):
            layer = PackedLayer.from_json(data, rows)
            if rows.shape != (data["experts"], layer.layout.nbytes):
                wanted = (data["experts"], layer.layout.nbytes)
                raise ValueError(f"Layer {i} in {folder} must have shape {wanted}; it has {tuple(rows.shape)}: save the bank anew")
            layers.append(layer.mapped(fast))
        return cls(format_named(**header["format"]), layers, mapped)

    def _formats(self) -> list[str]:
        """The quantised formats in use, in order."""
        nodes = [node for layer in self._layers for node in layer.layout.fields.values() if isinstance(node, Wrapped)]
        return list(dict.fromkeys(map(format_of, nodes)))

    def __repr__(self) -> str:
        experts = sum(len(layer.blobs) for layer in self._layers)
        return f"ExpertBank({self.name}, {self.layers} layer{'s' * (self.layers > 1)}, {experts} experts, {_readable(self.nbytes)})"

    def _repr_html_(self) -> str:
        from html import escape

        table = self.report().reset_index().to_html(index=False, float_format="{:.2f}".format, na_rep="", border=0)
        return f"<div>{escape(repr(self))}</div>{table}"


def _header(format: Format, layers: Sequence[PackedLayer]) -> dict[str, Any]:
    group_size = getattr(format, "group_size", None)
    return {"format": {"name": format.name, "group_size": group_size}, "layers": [layer.to_json() for layer in layers]}


@contextmanager
def _bar(source: ExpertSource, format: Format, progress: bool) -> Iterator[Callable[[], Any]]:
    """What to call after each expert."""
    if not progress:
        yield lambda: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=sum(source.experts(layer) for layer in range(source.layers)), desc=f"packing {format.name}", unit="expert") as bar:
        yield bar.update


def _readable(size: float) -> str:
    units = ["B", "kB", "MB", "GB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.1f} {units[0]}"
