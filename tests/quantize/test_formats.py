from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from optimum.quanto import QTensor

from specter_lab.quantize import BlobLayout, Dense, Quanto, format_named

CLASSES = {
    "qint8": "WeightQBytesTensor",
    "qfloat8": "WeightQBytesTensor",
    "qint4": "TinyGemmWeightQBitsTensor",
    "qint2": "PlainQBitsTensor",
}
BITS = {"qint8": 8 + 16 / 128, "qfloat8": 8 + 16 / 128, "qint4": 4 + 32 / 128, "qint2": 2 + 32 / 128}  # a row of 128: one scale (and shift)
ERROR = {"qint8": 0.01, "qfloat8": 0.04, "qint4": 0.13, "qint2": 0.6}


def values(packed: torch.Tensor) -> torch.Tensor:
    """What F.linear computes with, as float32 (out, in)."""
    return F.linear(torch.eye(packed.shape[1], dtype=torch.bfloat16), packed).float().t()


def relative_error(packed: torch.Tensor, weight: torch.Tensor) -> float:
    return ((values(packed) - weight).norm() / weight.norm()).item()


def test_quantised_weights_have_the_class_size_and_error_they_should(quantised_name: str) -> None:
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(1))
    packed = Quanto(quantised_name).pack(weight)
    assert type(packed).__name__ == CLASSES[quantised_name]
    assert packed.dtype == torch.bfloat16 and packed.axis == 0
    layout = BlobLayout.of({"w": packed})
    assert layout.fields["w"].bytes * 8 / weight.numel() == BITS[quantised_name]
    assert relative_error(packed, weight) < ERROR[quantised_name]


def test_more_bits_give_less_error() -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    errors = [relative_error(Quanto(name).pack(weight), weight) for name in ("qint2", "qint4", "qint8")]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


@pytest.mark.parametrize("rows", [1, 7, 10, 16, 24, 33])
@pytest.mark.parametrize("row_length", [16, 48, 96, 128])
def test_odd_shapes(quantised_name: str, rows: int, row_length: int) -> None:
    weight = torch.randn(rows, row_length, generator=torch.Generator().manual_seed(rows * row_length))
    packed = Quanto(quantised_name).pack(weight)
    assert isinstance(packed, QTensor)
    assert relative_error(packed, weight) < ERROR[quantised_name] * 1.3
    if quantised_name == "qint4":
        assert (type(packed).__name__ == "TinyGemmWeightQBitsTensor") == (rows % 16 == 0 and row_length % 32 == 0)


@pytest.mark.parametrize(("row_length", "group"), [(256, 128), (192, 64), (96, 32), (48, 16), (768, 128)])
def test_group_is_the_largest_that_fits(row_length: int, group: int) -> None:
    for name in ("qint4", "qint2"):
        assert Quanto(name).pack(torch.randn(16, row_length))._group_size == group
    assert Quanto("qint4", group_size=16).pack(torch.randn(16, row_length))._group_size == 16


@pytest.mark.parametrize("name", ["qint8", "qint4", "qint2"])
def test_row_length_that_fits_nothing_is_refused(name: str) -> None:
    # qint8 as well: torch's int8 kernel crashes the process on such rows
    with pytest.raises(ValueError, match=rf"{name} needs a row length .*got 100"):
        Quanto(name).pack(torch.randn(16, 100))
    with pytest.raises(ValueError, match="multiple of 64; got 96"):
        Quanto("qint4", group_size=64).pack(torch.randn(16, 96))
    assert relative_error(Quanto("qfloat8").pack(weight := torch.randn(16, 100)), weight) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_weights_are_refused(quantised_name: str, dtype: torch.dtype, bad: float) -> None:
    weight = torch.randn(16, 32, dtype=dtype)
    weight[3, 5] = bad
    with pytest.raises(ValueError, match="finite weights; 1 of 512"):
        Quanto(quantised_name).pack(weight)


def test_what_is_no_plain_weight_is_refused(quantised_name: str) -> None:
    fmt = Quanto(quantised_name)
    weight = torch.randn(16, 32)
    for wrong in (weight[0], weight[None], weight.int(), weight.to("meta"), fmt.pack(weight), torch.empty(0, 32)):
        with pytest.raises(ValueError, match=quantised_name):
            fmt.pack(wrong)
    with pytest.raises(ValueError, match="float32"):
        Dense(torch.float32).pack(fmt.pack(weight))


@pytest.mark.parametrize("value", [0.0, 0.01171875, -3.0, 1e-30])
@pytest.mark.parametrize("rows", [16, 10])
def test_constant_rows_stay_exact(quantised_name: str, value: float, rows: int) -> None:
    # their range is 0: quanto alone divides by a scale of 0, and qfloat8 gives NaN
    weight = torch.randn(rows, 128)
    weight[4] = value
    row = values(Quanto(quantised_name).pack(weight))[4]
    exact = quantised_name in ("qint4", "qint2") or value == 0
    torch.testing.assert_close(row, torch.full((128,), torch.tensor(value).bfloat16().item()), rtol=0 if exact else 0.01, atol=0)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["qint8", "qfloat8", "qint4", "qint2"]),
    st.integers(1, 40),
    st.sampled_from([16, 32, 48, 64, 96, 128, 160]),
    st.sampled_from([1e-4, 1.0, 1e4]),
    st.floats(-2, 2),
)
def test_error_never_exceeds_one_step(name: str, rows: int, row_length: int, size: float, offset: float) -> None:
    weight = (torch.randn(rows, row_length) + offset) * size
    packed = Quanto(name).pack(weight)
    groups = weight.reshape(-1, getattr(packed, "_group_size", row_length))
    step = {
        "qint8": groups.abs().amax(1) / 127,
        "qfloat8": groups.abs().amax(1) / 8,
        "qint4": (groups.amax(1) - groups.amin(1)) / 15,
        "qint2": (groups.amax(1) - groups.amin(1)) / 3,
    }[name]
    rounding = groups.abs().amax(1) / 32  # scale, shift and result are bfloat16
    error = (values(packed) - weight).reshape(groups.shape).abs().amax(1)
    assert bool((error <= step / 2 + rounding).all())


def test_packing_leaves_the_weight_alone_and_takes_any_view(format_name: str) -> None:
    weight = torch.randn(64, 128).bfloat16().half().float()
    weight = weight.clamp(-2, 2).mul(64).round().div(64).t()  # (128, 64), not contiguous
    before = weight.clone()
    one, two = format_named(format_name).pack(weight), format_named(format_name).pack(torch.nn.Parameter(weight.contiguous()))
    assert torch.equal(weight, before)
    assert not one.requires_grad and not two.requires_grad
    x = torch.randn(2, 64, dtype=one.dtype)
    torch.testing.assert_close(F.linear(x, one), F.linear(x, two), rtol=0.001, atol=0.01)  # dense ones differ by their strides


def test_dense_keeps_every_bit_or_refuses() -> None:
    weight = torch.randn(4, 8).bfloat16().float()
    assert torch.equal(Dense(torch.bfloat16).pack(weight).float(), weight)
    with pytest.raises(ValueError, match=r"bfloat16 cannot hold.*narrowest_exact_dtype"):
        Dense(torch.bfloat16).pack(weight + 1e-4)
    with pytest.raises(ValueError, match="one of bfloat16"):
        Dense(torch.int8)


def test_names() -> None:
    assert format_named("float16") == Dense(torch.float16)
    assert format_named("qint8", group_size=64) == Quanto("qint8")
    assert Quanto("qint4").compute_dtype == torch.bfloat16 and Dense(torch.float32).compute_dtype is None
    with pytest.raises(ValueError, match=r"qint4.*got 'int4': did you mean 'qint4'"):
        format_named("int4")
    with pytest.raises(ValueError, match="choose one of them"):
        format_named("zzz")
    with pytest.raises(ValueError, match="did you mean 'qint8'"):
        Quanto("qint_8")
    with pytest.raises(ValueError, match="got 100"):
        Quanto("qint2", group_size=100)
    with pytest.raises(ValueError, match="leave it out"):
        format_named("bfloat16", group_size=64)
