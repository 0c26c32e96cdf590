"""quanto's plain qint4 and qint2 weight, made to compute in every grad mode."""

from __future__ import annotations

from ast import literal_eval
from typing import Any

import torch.nn.functional as F
from optimum.quanto import WeightQBitsTensor, qtypes
from torch import Tensor


class PlainQBitsTensor(WeightQBitsTensor):
    """A ``WeightQBitsTensor`` whose ``F.linear`` dequantises, then multiplies: the same numbers as quanto's own.

    quanto transposes the packed tensor instead. Under ``torch.inference_mode()`` that raises "Cannot set
    version_counter for inference tensor" for any weight made outside of it (quanto issue 304).

    >>> from specter_lab.quantize import Quanto
    >>> type(Quanto("qint2").pack(Tensor(16, 16).zero_())).__name__
    'PlainQBitsTensor'
    """

    @classmethod
    def of(cls, weight: WeightQBitsTensor) -> PlainQBitsTensor:
        """The same inner tensors in this class."""
        inner = (weight._data, weight._scale, weight._shift)
        return cls(weight._qtype, weight._axis, weight._group_size, weight.size(), weight.stride(), *inner)

    def weight_qbits_tensor(self) -> WeightQBitsTensor:
        """The same inner tensors in quanto's class, which asks for this."""
        inner = (self._data, self._scale, self._shift)
        return WeightQBitsTensor(self._qtype, self._axis, self._group_size, self.size(), self.stride(), *inner)

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, meta: Any, outer_size: Any, outer_stride: Any) -> PlainQBitsTensor:
        axis, group_size, size, stride = (literal_eval(meta[name]) for name in ("axis", "group_size", "size", "stride"))
        inner = (inner_tensors[name] for name in ("_data", "_scale", "_shift"))
        return PlainQBitsTensor(qtypes[meta["qtype"]], axis, group_size, size, stride, *inner)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _linear(input: Tensor, weight: PlainQBitsTensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(input, weight.dequantize(), bias)
