"""One MoE layer's packed experts: a row of bytes each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
        experts = ({name: change(tensor) for name, tensor in self.layout.views(row).items()} for row in self.blobs)
        first = next(experts)
        if BlobLayout.of(first) == self.layout:
            return self
        return replace(self, **_filled(first, experts, len(self.blobs)))

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
    count = source.experts(layer)
    if count < 1:
        raise ValueError(f"A MoE layer needs experts; layer {layer} of the source has {count}: leave dense layers out of it")
    turned = bool(source.transposed(layer)) if hasattr(source, "transposed") else False
    first = source.tensors(ExpertKey(layer, 0))

    def experts() -> Iterator[dict[str, Tensor]]:
        for expert in range(count):
            tensors = source.tensors(ExpertKey(layer, expert)) if expert else first
            yield {name: pack(f"layer {layer} expert {expert} {name!r}", tensor) for name, tensor in tensors.items()}
            done()

    def pack(where: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or (format.quantises and tensor.ndim < 2):
            return tensor.detach()
        try:
            return format.pack(tensor.T if format.quantises and turned and tensor.ndim == 2 else tensor)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    before = {name: (tensor.numel(), tensor.numel() * tensor.element_size()) for name, tensor in first.items()}
    packed = experts()
    return PackedLayer(**_filled(next(packed), packed, count), transposed=turned and not format.quantises, before=before)


def _filled(first: Mapping[str, Tensor], others: Iterator[Mapping[str, Tensor]], count: int) -> dict[str, Any]:
    layout = BlobLayout.of(first)
    device = next(iter(first.values())).device
    with torch.inference_mode(False):  # blobs are refilled and viewed in every mode
        blobs = torch.zeros(count, layout.nbytes, dtype=torch.uint8, device=device)  # zeros: padding is saved too
    layout.write(first, blobs[0])
    for row, tensors in zip(blobs[1:], others, strict=True):
        layout.write(tensors, row)
    return {"layout": layout, "blobs": blobs}
