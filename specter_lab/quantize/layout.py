"""How one expert's named tensors lie in one flat blob of bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from optimum.quanto import WeightQBytesTensor
from optimum.quanto.tensor.packed import PackedTensor
from optimum.quanto.tensor.weights.tinygemm import TinyGemmPackedTensor, TinyGemmWeightQBitsTensor
from torch import Tensor

from specter_lab.quantize.mxfp4 import Mxfp4Tensor
from specter_lab.quantize.plain import PlainQBitsTensor
from specter_lab.quantize.unpack import use_plain_unpack

ALIGNMENT = 64
"""Every inner tensor starts at a multiple of this many bytes: a cache line, and enough for any kernel."""

_TINYGEMM = (TinyGemmWeightQBitsTensor, TinyGemmPackedTensor)
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (WeightQBytesTensor, PlainQBitsTensor, PackedTensor, Mxfp4Tensor, *_TINYGEMM)}


@dataclass(frozen=True)
class Leaf:
    """A plain tensor's place: its dtype's name, its shape and its first byte.

    >>> Leaf("bfloat16", (4, 16), 0).bytes
    128
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        """Its size without padding."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize

    def view(self, blob: Tensor) -> Tensor:
        """The tensor in ``blob`` (uint8), as an alias."""
        return blob[self.offset : self.offset + self.bytes].view(getattr(torch, self.dtype)).view(self.shape)


@dataclass(frozen=True)
class Wrapped:
    """A quanto tensor: its class, its description and the places of its inner tensors.

    >>> Wrapped("PackedTensor", {"bits": "4"}, {"_data": Leaf("uint8", (2, 16), 0)}).bytes
    32
    """

    kind: str
    meta: Mapping[str, str]
    inner: Mapping[str, Leaf | Wrapped]

    @property
    def bytes(self) -> int:
        """The sum over its inner tensors."""
        return sum(node.bytes for node in self.inner.values())

    def view(self, blob: Tensor) -> Tensor:
        """The quanto tensor whose inner tensors alias ``blob``."""
        inner = {name: node.view(blob) for name, node in self.inner.items()}
        return _KINDS[self.kind].__tensor_unflatten__(inner, self.meta, None, None)


@dataclass(frozen=True)
class BlobLayout:
    """Where each tensor of an expert lies in its blob of ``nbytes`` bytes (a multiple of 64).

    ``device_type`` is "cpu" or "cuda" when the bytes make sense on that kind of device only, otherwise None.

    >>> layout = BlobLayout.of({"up_proj": torch.ones(3, 16)})
    >>> layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))["up_proj"].shape
    torch.Size([3, 16])
    """

    fields: Mapping[str, Leaf | Wrapped]
    nbytes: int
    device_type: str | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> BlobLayout:
        """The layout for tensors like these, dense or quanto's. TypeError for any other tensor class."""
        end, device_type = 0, None

        def place(name: str, tensor: Any) -> Leaf | Wrapped:
            nonlocal end, device_type
            if type(tensor) in (Tensor, torch.nn.Parameter):
                leaf = Leaf(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end)
                end += -(-leaf.bytes // ALIGNMENT) * ALIGNMENT
                return leaf
            _kind(name, type(tensor).__name__)
            if isinstance(tensor, _TINYGEMM):
                device_type = tensor.device.type
            names, meta = tensor.__tensor_flatten__()
            return Wrapped(type(tensor).__name__, meta, {inner: place(f"{name}.{inner}", getattr(tensor, inner)) for inner in names})

        fields = {name: place(name, tensor) for name, tensor in tensors.items()}
        return cls(fields, end, device_type)

    def write(self, tensors: Mapping[str, Tensor], blob: Tensor) -> None:
        """Copy ``tensors`` into ``blob``: (nbytes,) uint8. ValueError if they aren't laid out like this."""
        self._check(blob)
        other = BlobLayout.of(tensors)
        if other != self:
            names = [name for name in {**self.fields, **other.fields} if self.fields.get(name) != other.fields.get(name)]
            what = repr(names[0]) if names else f"made for {other.device_type}"
            raise ValueError(
                "A blob's tensors must have the names, shapes, dtypes and classes of its layout; not so: "
                f"{what}: experts of one layer must be alike, others need a layout of their own"
            )
        with torch.no_grad():
            for name, tensor in tensors.items():
                _copy(self.fields[name], tensor, blob)

    def views(self, blob: Tensor) -> dict[str, Tensor]:
        """The named tensors in ``blob``: (nbytes,) uint8. They alias it: refilling the blob refills them."""
        self._check(blob)
        with torch.inference_mode(False):  # views that are kept must work in every mode
            return {name: node.view(blob) for name, node in self.fields.items()}

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers; ``from_json`` takes them back."""
        return {"nbytes": self.nbytes, "device_type": self.device_type, "fields": {n: _to_json(node) for n, node in self.fields.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BlobLayout:
        """The layout that ``to_json`` gave. ValueError if ``data`` isn't one."""
        try:
            layout = cls({name: _from_json(name, node) for name, node in data["fields"].items()}, data["nbytes"], data["device_type"])
            leaves = [leaf for node in layout.fields.values() for leaf in _leaves(node)]
            sound = all(leaf.offset % ALIGNMENT == 0 and 0 <= leaf.offset <= layout.nbytes - leaf.bytes for leaf in leaves)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"A layout must be what BlobLayout.to_json gave; {type(error).__name__}: {error}: write it again") from error
        if not sound or layout.nbytes % ALIGNMENT:
            raise ValueError(f"A layout's tensors must lie aligned in its {layout.nbytes} bytes; these don't: write it again")
        return layout

    def _check(self, blob: Tensor) -> None:
        if blob.dtype != torch.uint8 or blob.shape != (self.nbytes,) or not blob.is_contiguous():
            raise ValueError(
                f"A blob must be contiguous uint8 of shape ({self.nbytes},); got {blob.dtype} {tuple(blob.shape)}: "
                "take it from a bank, or torch.zeros(layout.nbytes, dtype=torch.uint8)"
            )
        if blob.storage_offset() % ALIGNMENT:
            offset = blob.storage_offset()
            raise ValueError(f"A blob must start at a multiple of {ALIGNMENT} bytes; got {offset}: place slots at multiples of nbytes")
        if self.device_type not in (None, blob.device.type):
            raise ValueError(
                f"This packing makes sense on {self.device_type} only; the blob is on {blob.device}: use bank.to({blob.device.type!r})"
            )


def _kind(name: str, kind: str) -> Any:
    if kind not in _KINDS:
        raise TypeError(
            f"A blob holds plain tensors and {', '.join(_KINDS)}; {name!r} is a {kind}: "
            "pack the weight with a format of specter_lab.quantize"
        )
    if kind == "PackedTensor":
        use_plain_unpack()
    return _KINDS[kind]


def _copy(node: Leaf | Wrapped, tensor: Tensor, blob: Tensor) -> None:
    if isinstance(node, Leaf):
        node.view(blob).copy_(tensor)
    else:  # never copy_ a quanto tensor itself: that copies nothing and says nothing
        for name, inner in node.inner.items():
            _copy(inner, getattr(tensor, name), blob)


def _leaves(node: Leaf | Wrapped) -> list[Leaf]:
    return [node] if isinstance(node, Leaf) else [leaf for inner in node.inner.values() for leaf in _leaves(inner)]


def _to_json(node: Leaf | Wrapped) -> dict[str, Any]:
    if isinstance(node, Leaf):
        return {"dtype": node.dtype, "shape": list(node.shape), "offset": node.offset}
    return {"kind": node.kind, "meta": dict(node.meta), "inner": {name: _to_json(inner) for name, inner in node.inner.items()}}


def _from_json(name: str, data: Mapping[str, Any]) -> Leaf | Wrapped:
    if "kind" not in data:
        return Leaf(data["dtype"], tuple(data["shape"]), data["offset"])
    _kind(name, data["kind"])
    return Wrapped(data["kind"], dict(data["meta"]), {inner: _from_json(f"{name}.{inner}", node) for inner, node in data["inner"].items()})
