"""One MoE layer's packed experts: a row of bytes each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specter_lab.quantize.formats import Format
from specter_lab.quantize.layout import BlobLayout
from specter_lab.quantize.source import ExpertSource
from specter_lab.records import ExpertKey


@dataclass(frozen=True)
class PackedLayer:
    """``blobs`` (experts, layout.nbytes) uint8, contiguous, each row laid out as ``layout`` says.

    ``before`` gives for each tensor name its weights and bytes in the source, for one expert.

    >>> from specter_lab.quantize import TensorSource, format_named
    >>> pack_layer(TensorSource([[{"up_proj": torch.ones(16, 128)}]]), 0, format_named("qint8")).blobs.shape
    torch.Size([1, 2112])
    """

    layout: BlobLayout
    blobs: Tensor
    transposed: bool
    before: Mapping[str, tuple[int, int]]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> PackedLayer:
        """The layer with ``change`` applied to each tensor; itself if that leaves the layout as it is."""

        def expert(index: int) -> dict[str, Tensor]:
            return {name: change(tensor) for name, tensor in self.layout.views(self.blobs[index]).items()}

        layout = BlobLayout.of(expert(0))
        if layout == self.layout:
            return self
        return replace(self, layout=layout, blobs=_filled(layout, len(self.blobs), self.blobs.device, expert))

    def to_json(self) -> dict[str, Any]:
        """All but the bytes."""
        return {
            "experts": len(self.blobs),
            "transposed": self.transposed,
            "before": {name: list(pair) for name, pair in self.before.items()},
            "layout": self.layout.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], blobs: Tensor) -> PackedLayer:
        """What ``to_json`` gave, with its bytes."""
        before = {name: (weights, size) for name, (weights, size) in data["before"].items()}
        return cls(BlobLayout.from_json(data["layout"]), blobs, data["transposed"], before)


def pack_layer(source: ExpertSource, layer: int, format: Format, done: Callable[[], Any] = lambda: None) -> PackedLayer:
    """Pack one layer of ``source``, an expert at a time; ``done`` is called after each.

    Dense formats take every float tensor, quantised ones the 2-D weights, turned to (out, in) first if the source is
    transposed; what is left keeps its dtype. Errors name layer, expert and tensor.

    >>> from specter_lab.quantize import TensorSource, format_named
    >>> source = TensorSource([[{"up_proj": torch.ones(32, 16)}]], transposed=True)
    >>> pack_layer(source, 0, format_named("qint8")).transposed
    False
    """
    outline = outline_layer(source, layer, format)

    def expert(index: int) -> dict[str, Tensor]:
        packed = pack_expert(source, ExpertKey(layer, index), format)
        done()
        return packed

    return replace(outline, blobs=_filled(outline.layout, len(outline.blobs), outline.blobs.device, expert))


def outline_layer(source: ExpertSource, layer: int, format: Format) -> PackedLayer:
    """What ``pack_layer`` gives, but for the bytes: its ``blobs`` are all zeros and take no memory. Reads the first expert.

    >>> from specter_lab.quantize import TensorSource, format_named
    >>> outline_layer(TensorSource([[{"up_proj": torch.ones(16, 128)}] * 4]), 0, format_named("qint8")).blobs.shape
    torch.Size([4, 2112])
    """
    count = source.experts(layer)
    if count < 1:
        raise ValueError(f"A MoE layer needs experts; layer {layer} of the source has {count}: leave dense layers out of it")
    first = source.tensors(ExpertKey(layer, 0))
    before = {name: (tensor.numel(), tensor.numel() * tensor.element_size()) for name, tensor in first.items()}
    packed = _pack(first, ExpertKey(layer, 0), format, _turned(source, layer))
    layout, device = BlobLayout.of(packed), next(iter(packed.values())).device
    nothing = torch.zeros((), dtype=torch.uint8, device=device).expand(count, layout.nbytes)
    return PackedLayer(layout, nothing, transposed=_turned(source, layer) and not format.quantises, before=before)


def pack_expert(source: ExpertSource, key: ExpertKey, format: Format) -> dict[str, Tensor]:
    """One expert's tensors, packed; errors name layer, expert and tensor.

    >>> from specter_lab.quantize import TensorSource, format_named
    >>> pack_expert(TensorSource([[{"up_proj": torch.ones(16, 128)}]]), ExpertKey(0, 0), format_named("bfloat16"))["up_proj"].dtype
    torch.bfloat16
    """
    return _pack(source.tensors(key), key, format, _turned(source, key.layer))


def _pack(tensors: Mapping[str, Tensor], key: ExpertKey, format: Format, turned: bool) -> dict[str, Tensor]:
    def pack(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or (format.quantises and tensor.ndim < 2):
            return tensor.detach()
        try:
            return format.pack(tensor.T if format.quantises and turned and tensor.ndim == 2 else tensor)
        except ValueError as error:
            raise ValueError(f"layer {key.layer} expert {key.expert} {name!r}: {error}") from error

    return {name: pack(name, tensor) for name, tensor in tensors.items()}


def _turned(source: ExpertSource, layer: int) -> bool:
    return bool(source.transposed(layer)) if hasattr(source, "transposed") else False


def _filled(layout: BlobLayout, count: int, device: torch.device, expert: Callable[[int], Mapping[str, Tensor]]) -> Tensor:
    with torch.inference_mode(False):  # blobs are refilled and viewed in every mode
        blobs = torch.zeros(count, layout.nbytes, dtype=torch.uint8, device=device)  # zeros: padding is saved too
    for index in range(count):  # not an iterator: it would hold one expert while the next is made
        layout.write(expert(index), blobs[index])
    return blobs
