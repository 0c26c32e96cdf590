from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specter_lab.quantize import ExpertBank, Quanto, tinygemm_path
from specter_lab.quantize.tinygemm import _probe, _warn_once, fast, portable
from specter_lab.records import ExpertKey


@pytest.fixture
def forget() -> object:
    """No earlier probe or warning, before and after."""
    for cached in (_probe, _warn_once):
        cached.cache_clear()
    yield
    for cached in (_probe, _warn_once):
        cached.cache_clear()


@pytest.mark.parametrize("row_length", [128, 64, 96])
@pytest.mark.parametrize("offset", [0, 5, -0.3])
def test_portable_and_back_changes_no_bit(row_length: int, offset: float) -> None:
    weight = Quanto("qint4").pack(torch.randn(48, row_length) + offset)
    plain = portable(weight)
    again = fast(plain)
    assert [type(w).__name__ for w in (weight, plain, again)] == [
        "TinyGemmWeightQBitsTensor",
        "PlainQBitsTensor",
        "TinyGemmWeightQBitsTensor",
    ]
    assert torch.equal(weight._data._data, again._data._data) and torch.equal(weight._scale_shift, again._scale_shift)
    x = torch.randn(3, row_length).bfloat16()
    one, two = F.linear(x, weight).float(), F.linear(x, plain).float()
    assert ((one - two).norm() / one.norm()).item() < 0.02


@pytest.mark.parametrize("op", ["_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu"])
def test_a_broken_kernel_means_the_plain_class_and_one_warning(monkeypatch: pytest.MonkeyPatch, forget: None, make_source, op: str) -> None:
    """Case 4."""

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("this op has changed")

    monkeypatch.setattr(torch, op, broken)
    with pytest.warns(UserWarning, match="int4 kernel does not work on cpu here.*this op has changed") as caught:
        bank = ExpertBank.pack(make_source(), "qint4")
    assert len(caught) == 1
    assert tinygemm_path().startswith("the plain class: RuntimeError: this op")
    weight = bank.own_weights(ExpertKey(0, 0))["down_proj"]
    assert type(weight).__name__ == "PlainQBitsTensor"


def test_a_kernel_that_computes_something_else_is_noticed(monkeypatch: pytest.MonkeyPatch, forget: None) -> None:
    """Case 4: still within tolerance of the float weights."""
    original = torch._convert_weight_to_int4pack_for_cpu
    monkeypatch.setattr(torch, "_convert_weight_to_int4pack_for_cpu", lambda t, innerKTiles: original(t.flip(0), innerKTiles))
    weight = torch.randn(32, 64)
    with pytest.warns(UserWarning, match="other values"):
        packed = Quanto("qint4").pack(weight)
    got = F.linear(torch.eye(64, dtype=torch.bfloat16), packed).float().t()
    assert ((got - weight).norm() / weight.norm()).item() < 0.13


def test_path_is_told() -> None:
    assert tinygemm_path() == "torch's int4 kernel: groups of 128, 64, 32"
