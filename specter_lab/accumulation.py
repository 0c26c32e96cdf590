"""In which dtype a model's own eager experts add up their outputs: measured, since no flag says it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from specter_lab.pieces import Compute
from specter_lab.records import LayerCall
from specter_lab.seam import ExpertsSeam


def sum_dtypes(seam: ExpertsSeam, calls: Mapping[int, tuple[Tensor, Tensor, Tensor]]) -> dict[int, torch.dtype]:
    """``accumulation_dtype`` of each MoE layer, from one call of its experts; measured once for each class of experts.

    >>> import specter_lab as sl
    >>> set(sl.load_moe("tiny-moe").seam.sum_dtypes.values())
    {torch.bfloat16}
    """
    measured: dict[Any, torch.dtype] = {}
    found = {}
    for layer, (states, _, odds) in calls.items():
        kind = (type(seam.modules[layer]), states.dtype, odds.dtype)
        if kind not in measured:
            measured[kind] = accumulation_dtype(seam.modules[layer], states.dtype, odds.dtype, states.device)
        found[layer] = measured[kind]
    return found


class _Loose:
    """Serves the stacked tensors of a stand-in."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def serve(self, call: LayerCall, compute: Compute) -> None:
        for expert in call.needed:
            compute(expert, {name: tensor[expert] for name, tensor in self.tensors.items()})


def accumulation_dtype(module: Any, states: torch.dtype, weights: torch.dtype, device: torch.device | str = "cpu") -> torch.dtype:
    """The sum's dtype in the eager forward of an experts ``module`` for hidden states and router weights of these dtypes.

    In float32 it is float32. In half precision one random expert of the same shape, used twice by each row, tells:
    whichever of the states' dtype, float32 and the weights' dtype gives the eager result bit for bit; else the states'.

    >>> import specter_lab as sl
    >>> accumulation_dtype(sl.load_moe("tiny-moe").seam.modules[0], torch.bfloat16, torch.float32)
    torch.bfloat16
    """
    candidates = list(dict.fromkeys([states, torch.float32, weights]))
    if states == torch.float32 or len(candidates) == 1:
        return states
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(std=shape[-1] ** -0.5, generator=generator)

    tensors = {name: random(1, *p.shape[1:], dtype=states) for name, p in module._parameters.items()}
    stand_in = copy.copy(module)
    stand_in._parameters = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}
    rows = random(8, tensors["down_proj"].shape[2 if module.is_transposed else 1], dtype=states) * 8
    odds = random(8, 2, dtype=weights).abs()
    ids = torch.zeros(8, 2, dtype=torch.long, device=device)
    seam = ExpertsSeam(nn.ModuleList([stand_in]))
    with torch.no_grad():
        own = type(module).forward.__wrapped__(stand_in, rows, ids, odds)
        for dtype in candidates:
            seam.sum_dtypes = {0: dtype}
            with seam.serving(_Loose(tensors)):
                if torch.equal(seam.run_layer(0, stand_in, rows, ids, odds), own):
                    return dtype
    return states
