"""The experts of a checkpoint as a source: read, converted and handed on one at a time."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from specter_lab.loading.checkpoint import Checkpoint
from specter_lab.loading.origins import Origin, PackedOrigin, find_origins
from specter_lab.loading.skeleton import incomplete
from specter_lab.quantize import Dense, Format, Mxfp4, Mxfp4Tensor
from specter_lab.records import ExpertKey
from specter_lab.seam import experts_modules


class CheckpointExperts:
    """The routed experts of ``checkpoint`` for the model that ``twin`` (on meta) stands for: an ``ExpertSource``.

    A tensor comes in the dtype it is stored in if the model's holds it exactly, otherwise in the model's (rounded, as
    ``from_pretrained`` does). MXFP4 weights come packed, or unpacked with ``dequantize``. ``names`` are the model's
    parameters, ``keys`` the checkpoint's. Raises ``ValueError`` for missing experts, other shapes, and conversions
    that need all experts at once.

    >>> from transformers import AutoConfig; from specter_lab.bundled import bundled_model
    >>> from specter_lab.loading.skeleton import meta_twin
    >>> twin = meta_twin(AutoConfig.from_pretrained(bundled_model()), "float32")
    >>> with Checkpoint(bundled_model()) as checkpoint: CheckpointExperts(checkpoint, twin).tensors(ExpertKey(0, 3))["down_proj"].dtype
    torch.bfloat16
    """

    def __init__(self, checkpoint: Checkpoint, twin: Any, dequantize: bool = False) -> None:
        self.checkpoint, self.dtype, self.dequantize = checkpoint, twin.dtype, dequantize
        modules = experts_modules(twin)
        self._transposed = [bool(module.is_transposed) for module in modules.values()]
        self._shapes = [{name: tuple(p.shape) for name, p in module._parameters.items()} for module in modules.values()]
        self.names = {f"{path}.{name}" for path, shapes in zip(modules, self._shapes, strict=True) for name in shapes}
        origins = find_origins(twin, checkpoint)
        missing = [name for name in sorted(self.names) if name not in origins]
        found = [origins[name] for name in self.names if name in origins]
        faults = [origin.fault(checkpoint, twin.get_parameter(origin.target).shape[0]) for origin in found]
        wrong = sorted(fault for fault in faults if fault)
        if missing or wrong:
            raise incomplete(checkpoint.name, missing, wrong)
        mixing = sorted(origin.target for origin in found if not origin.splits)
        if mixing:
            raise ValueError(
                f"Streaming converts one expert at a time; {mixing[0]} of {checkpoint.name!r} can only be converted with all of them. "
                "Load it whole, with stream=False."
            )
        self.keys = {key for origin in found for keys in origin.keys.values() for key in keys}
        self._origins: list[dict[str, Origin]] = [
            {name: origins[f"{path}.{name}"] for name in shapes} for path, shapes in zip(modules, self._shapes, strict=True)
        ]

    @property
    def packed(self) -> bool:
        """Whether the checkpoint's experts are in MXFP4."""
        return any(isinstance(origin, PackedOrigin) for layer in self._origins for origin in layer.values())

    @property
    def format(self) -> Format:
        """The format of a store that loses nothing of what ``tensors`` gives: packed, or the narrowest dense one."""
        if self.packed and not self.dequantize:
            return Mxfp4()
        return Dense(reduce(torch.promote_types, {self._dtype(origin) for layer in self._origins for origin in layer.values()}))

    def nbytes(self, dtype: torch.dtype | None = None) -> int:
        """Size of all experts as ``tensors`` gives them, or of all of them in ``dtype``; from headers alone."""
        total = 0
        for shapes, origins in zip(self._shapes, self._origins, strict=True):
            for name, shape in shapes.items():
                if dtype is None and isinstance(origins[name], PackedOrigin) and not self.dequantize:
                    total += sum(math.prod(self.checkpoint.shape(keys[0])) for keys in origins[name].keys.values())
                else:
                    total += math.prod(shape) * (dtype or self._dtype(origins[name])).itemsize
        return total

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return len(self._shapes)

    def experts(self, layer: int) -> int:
        """Number of experts of that layer."""
        return next(iter(self._shapes[layer].values()))[0]

    def transposed(self, layer: int) -> bool:
        """Whether that layer's weights are (in, out)."""
        return self._transposed[layer]

    def tensors(self, key: ExpertKey) -> dict[str, Tensor]:
        """One expert's tensors, read now."""
        result = {}
        for name, origin in self._origins[key.layer].items():
            tensor = origin.read_expert(self.checkpoint, key.expert)
            shape = self._shapes[key.layer][name][1:]
            if tensor.shape != shape:
                raise incomplete(self.checkpoint.name, [], [f"{origin.target}: expert {key.expert} is {tuple(tensor.shape)}, not {shape}"])
            keep = isinstance(tensor, Mxfp4Tensor) and not self.dequantize
            result[name] = tensor if keep else tensor.to(self._dtype(origin))
        return result

    def _dtype(self, origin: Origin) -> torch.dtype:
        stored = torch.bfloat16 if isinstance(origin, PackedOrigin) else self.checkpoint.dtype(next(iter(origin.keys.values()))[0])
        assert stored is not None, "an origin in another format has a fault"
        return stored if torch.promote_types(stored, self.dtype) == self.dtype else self.dtype
