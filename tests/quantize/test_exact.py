from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_lab.quantize import Dense, ExpertBank, TensorSource, narrowest_exact_dtype
from specter_lab.quantize.exact import holds_exactly
from specter_lab.records import ExpertKey


def source_of(*weights: torch.Tensor) -> TensorSource:
    return TensorSource([[{"up_proj": weight}] for weight in weights])


def test_an_fp32_model_from_a_bf16_checkpoint_is_kept_in_bf16() -> None:
    weight = torch.randn(8, 16).bfloat16().float() * 2.0**-100
    source = source_of(weight)
    dtype = narrowest_exact_dtype(source)
    assert dtype == torch.bfloat16
    bank = ExpertBank.pack(source, Dense(dtype))
    assert torch.equal(bank.own_weights(ExpertKey(0, 0))["up_proj"].float(), weight)
    assert bank.nbytes == weight.numel() * 2


@pytest.mark.parametrize(
    ("weights", "dtype"),
    [
        ([torch.ones(2, 16)], torch.bfloat16),
        ([torch.full((2, 16), 1 + 2**-10)], torch.float16),
        ([torch.full((2, 16), 1 + 2**-10), torch.full((2, 16), 2.0**100)], torch.float32),  # one fits fp16 only, one bf16 only
        ([torch.full((2, 16), 0.1)], torch.float32),
        ([torch.ones(2, 16, dtype=torch.float16)], torch.float16),
        ([torch.ones(2, 16, dtype=torch.float16), torch.ones(2, 16)], torch.bfloat16),
        ([torch.full((2, 16), 0.1, dtype=torch.bfloat16)], torch.bfloat16),
        ([torch.ones(2, 16, dtype=torch.float64)], torch.bfloat16),
        ([torch.tensor([[float("nan"), float("inf"), -0.0, 0.5]])], torch.bfloat16),
    ],
)
def test_narrowest(weights: list[torch.Tensor], dtype: torch.dtype) -> None:
    assert narrowest_exact_dtype(source_of(*weights)) == dtype


def test_all_weights_count(make_source: Callable[..., TensorSource]) -> None:
    source = make_source()
    assert narrowest_exact_dtype(source) == torch.bfloat16
    source.tensors(ExpertKey(1, 1))["down_proj_bias"][-1] = 0.1  # the very last number
    assert narrowest_exact_dtype(source) == torch.float32


def test_what_cannot_be_told_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layer 0 expert 0 'up_proj' is torch\.float64"):
        narrowest_exact_dtype(source_of(torch.full((2, 16), 0.1, dtype=torch.float64)))
    with pytest.raises(ValueError, match="meta device"):
        narrowest_exact_dtype(source_of(torch.empty(2, 16, device="meta")))


@settings(max_examples=200, deadline=None)
@given(st.integers(-(2**31), 2**31 - 1), st.sampled_from([torch.bfloat16, torch.float16]))
def test_any_bits(bits: int, dtype: torch.dtype) -> None:
    value = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    back = value.to(dtype).to(torch.float32)
    assert holds_exactly(value, dtype) == (bool(value.isnan()) or torch.equal(value.view(torch.int32), back.view(torch.int32)))
    if dtype == torch.bfloat16 and not bool(value.isnan()):
        assert holds_exactly(value, dtype) == (bits % 2**16 == 0)
