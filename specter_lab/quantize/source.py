"""Where experts come from: anything that names one expert's tensors at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from specter_lab.records import ExpertKey


class ExpertSource(Protocol):
    """Experts to pack, one at a time.

    A source may also have ``transposed(layer) -> bool``: True when that layer's weights are (in, out) and used as
    ``x @ w``, not (out, in) and used as ``F.linear(x, w)``. A bank is a source too.

    >>> source: ExpertSource = TensorSource([[{"up_proj": Tensor(4, 16)}]])
    >>> source.layers
    1
    """

    @property
    def layers(self) -> int:
        """Number of MoE layers."""

    def experts(self, layer: int) -> int:
        """Number of experts of that layer."""

    def tensors(self, key: ExpertKey) -> Mapping[str, Tensor]:
        """That expert's 2-D weights and 1-D biases by name; views are fine."""


class TensorSource:
    """Experts held as plain tensors: ``layers[layer][expert]`` maps names to tensors.

    >>> import torch
    >>> TensorSource([[{"up_proj": torch.ones(4, 16)}]]).experts(0)
    1
    """

    def __init__(self, layers: Sequence[Sequence[Mapping[str, Tensor]]], transposed: bool = False) -> None:
        self._layers = layers
        self._transposed = transposed

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return len(self._layers)

    def experts(self, layer: int) -> int:
        """Number of experts of that layer."""
        return len(self._layers[layer])

    def tensors(self, key: ExpertKey) -> Mapping[str, Tensor]:
        """The tensors themselves."""
        return self._layers[key.layer][key.expert]

    def transposed(self, layer: int) -> bool:
        """The same for all layers."""
        return self._transposed
