"""Which dtypes hold a tensor without changing a bit."""

from __future__ import annotations

import torch
from torch import Tensor

from specter_lab.quantize.source import ExpertSource
from specter_lab.records import ExpertKey

_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def narrowest_exact_dtype(source: ExpertSource) -> torch.dtype:
    """The narrowest of bfloat16, float16 and float32 that holds every expert weight of ``source`` bit for bit.

    All weights are read, one expert at a time. A source that is float16 throughout stays so if bfloat16 fits too.
    Raises ValueError if not even float32 holds them.

    >>> from specter_lab.quantize import TensorSource
    >>> narrowest_exact_dtype(TensorSource([[{"up_proj": torch.ones(4, 16)}]]))
    torch.bfloat16
    """
    fitting = [torch.bfloat16, torch.float16, torch.float32]
    dtypes = set()
    for layer in range(source.layers):
        for expert in range(source.experts(layer)):
            for name, weight in source.tensors(ExpertKey(layer, expert)).items():
                if not weight.is_floating_point():
                    continue
                if weight.is_meta:
                    where = f"layer {layer} expert {expert} {name!r}"
                    raise ValueError(f"Expert weights must hold their numbers; {where} is on the meta device: load the weights first")
                dtypes.add(weight.dtype)
                fitting = [dtype for dtype in fitting if holds_exactly(weight, dtype)]
                if not fitting:
                    raise ValueError(
                        f"Expert weights must fit float32 exactly; layer {layer} expert {expert} {name!r} is {weight.dtype} and does not: "
                        "convert the model to float32 first"
                    )
    if dtypes == {torch.float16} and torch.float16 in fitting:
        return torch.float16
    return fitting[0]


def holds_exactly(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether ``tensor`` comes back from ``dtype`` with the same bits: a zero's sign counts, a NaN only has to stay one.

    >>> holds_exactly(torch.tensor([0.5, float("nan")]), torch.bfloat16), holds_exactly(torch.tensor(0.1), torch.bfloat16)
    (True, False)
    """
    if tensor.dtype == dtype:
        return True
    bits = _INTEGER_OF_SIZE[tensor.element_size()]
    tensor = tensor.detach().contiguous()
    back = tensor.to(dtype).to(tensor.dtype)
    # bits, since == would let -0.0 pass for 0.0; a NaN's payload means nothing, and torch's own conversions change it
    same = (tensor.view(bits) == back.view(bits)) | (tensor.isnan() & back.isnan())
    return bool(same.all())
