from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from optimum.quanto import QTensor

from specter_lab.quantize import Dense, ExpertBank, Quanto, TensorSource, narrowest_exact_dtype
from specter_lab.records import ExpertKey

Make = Callable[..., TensorSource]
KEYS = [ExpertKey(0, 0), ExpertKey(0, 1), ExpertKey(0, 2), ExpertKey(1, 0), ExpertKey(1, 1)]


def test_a_bank_is_an_expert_store(format_name: str, make_source: Make) -> None:
    source = make_source()
    bank = ExpertBank.pack(source, format_name)
    assert bank.layers == 2 and [bank.experts(layer) for layer in range(2)] == [3, 2]
    assert bank.nbytes == sum(bank.experts(layer) * bank.blob_bytes(layer) for layer in range(2))
    for key in KEYS:
        blob = bank.blob(key)
        assert blob.shape == (bank.blob_bytes(key.layer),) and blob.dtype == torch.uint8 and blob.is_contiguous()
        assert blob.data_ptr() == bank.blobs(key.layer).data_ptr() + key.expert * bank.blob_bytes(key.layer)
        for name, weight in bank.weights(key.layer, blob).items():
            want = source.tensors(key)[name]
            if weight.ndim == 2:
                got = F.linear(torch.eye(weight.shape[1], dtype=bank.compute_dtype or weight.dtype), weight).float().t()
                limit = {"qint8": 0.01, "qfloat8": 0.04, "qint4": 0.13, "qint2": 0.6}.get(format_name, 0)
                assert ((got - want).norm() / want.norm()).item() <= limit
            else:
                assert torch.equal(weight.float(), want)


def test_experts_are_quantised_and_small(quantised_name: str, make_source: Make) -> None:
    """Case 1. bitsandbytes #1849: experts stayed in full precision without a word."""
    source = make_source(torch.bfloat16)
    bank = ExpertBank.pack(source, quantised_name)
    for key in KEYS:
        weights = bank.own_weights(key)
        assert isinstance(weights["gate_up_proj"], QTensor) and isinstance(weights["down_proj"], QTensor)
        assert all(weights[name].qtype.name.startswith(quantised_name) for name in ("gate_up_proj", "down_proj"))
        assert type(weights["down_proj_bias"]) is torch.Tensor
    before = sum(t.numel() * 2 for key in KEYS for t in source.tensors(key).values())
    # with groups of 16 in the second layer and biases, still under these parts of bfloat16
    assert bank.nbytes < before * {"qint8": 0.54, "qfloat8": 0.54, "qint4": 0.34, "qint2": 0.22}[quantised_name]


def test_report_accounts_for_every_byte(format_name: str, make_source: Make) -> None:
    """Case 1: bytes before and after, by component."""
    source = make_source()
    bank = ExpertBank.pack(source, format_name)
    report = bank.report()
    assert report["bytes_after"].sum() == bank.nbytes
    assert report["bytes_before"].sum() == sum(t.numel() * 4 for key in KEYS for t in source.tensors(key).values())
    assert report["weights"].sum() == sum(t.numel() for key in KEYS for t in source.tensors(key).values())
    quantised = format_name.startswith("q")
    assert report.loc[["gate_up_proj"], "quantised"].all() == quantised
    bias = report.loc["down_proj_bias"]
    assert not bias["quantised"]
    assert (bias["format"], bias["kept_because"]) == (
        ("float32", "fewer than two dimensions") if quantised else (format_name, "the format is dense")
    )
    low, high = {"qint8": (8, 8.4), "qfloat8": (8, 8.4), "qint4": (4.25, 6), "qint2": (2.25, 4)}.get(
        format_name, (16, 16) if format_name != "float32" else (32, 32)
    )
    assert report.loc[["gate_up_proj", "down_proj"], "bits_per_weight"].between(low, high).all()


def test_report_of_qint4_in_full(make_source: Make) -> None:
    report = ExpertBank.pack(make_source(), "qint4").report()
    assert report["format"].tolist() == ["qint4 group 128", "qint4 group 64", "float32", "qint4 group 16"]
    assert report.index.tolist() == ["gate_up_proj", "down_proj", "down_proj_bias", "down_proj"]
    assert report["bits_per_weight"].tolist() == [4.25, 4.5, 32.0, 6.0]


def test_report_shows_padding() -> None:
    bank = ExpertBank.pack(TensorSource([[{"up_proj": torch.ones(10, 16), "counts": torch.ones(3, dtype=torch.int64)}]]), "qint8")
    report = bank.report()
    assert report["bytes_after"].tolist() == [10 * 16 + 10 * 2, 24, 32 + 44 + 40] and bank.nbytes == 320
    assert report.index.tolist() == ["up_proj", "counts", "(padding)"]
    assert report["kept_because"].tolist() == ["", "not floating point", "64-byte alignment"]


def test_names_and_repr(make_source: Make) -> None:
    source = make_source()
    assert ExpertBank.pack(source, "qint4").name == "qint4 group 128/64/16"
    assert ExpertBank.pack(source, Quanto("qint2", 16)).name == "qint2 group 16"
    assert ExpertBank.pack(source, "qint8").name == "qint8"
    bank = ExpertBank.pack(source, Dense(torch.bfloat16))
    assert repr(bank) == "ExpertBank(bfloat16, 2 layers, 5 experts, 222.5 kB)"
    html = bank._repr_html_()
    assert repr(bank) in html and "gate_up_proj" in html and "NaN" not in html and html == bank._repr_html_()


@pytest.mark.parametrize("format_", ["float32", "qint8", "qint4", "qint2"])
def test_transposed_weights(format_: str, make_source: Make) -> None:
    """Quantised weights are turned so that F.linear fits; dense ones stay as the model uses them."""
    upright, turned = (ExpertBank.pack(make_source(transposed=flag), format_) for flag in (False, True))
    for layer, key in ((0, ExpertKey(0, 2)), (1, ExpertKey(1, 1))):
        one, two = upright.own_weights(key)["gate_up_proj"], turned.own_weights(key)["gate_up_proj"]
        assert turned.transposed(layer) == (format_ == "float32") and not upright.transposed(layer)
        if turned.transposed(layer):
            assert torch.equal(one, two.t())
        else:
            assert torch.equal(upright.blob(key), turned.blob(key))


def test_refilling_a_slot_refills_its_weights(format_name: str, make_source: Make) -> None:
    """What residency does: views made once over a slot, bytes of one expert after the other."""
    bank = ExpertBank.pack(make_source(), format_name)
    slots = torch.zeros(2 * bank.blob_bytes(0), dtype=torch.uint8)
    slot = slots[bank.blob_bytes(0) :]
    weights = bank.weights(0, slot)
    with torch.inference_mode():
        for expert in range(3):
            slot.copy_(bank.blob(ExpertKey(0, expert)))
            for name in ("gate_up_proj", "down_proj"):
                x = torch.randn(3, weights[name].shape[1], dtype=weights[name].dtype)
                assert torch.equal(F.linear(x, weights[name]), F.linear(x, bank.own_weights(ExpertKey(0, expert))[name]))


def test_own_weights_are_made_once_and_alias(make_source: Make) -> None:
    bank = ExpertBank.pack(make_source(), "qint8")
    key = ExpertKey(0, 1)
    assert bank.own_weights(key) is bank.own_weights(key)
    bank.blob(key).zero_()
    assert not F.linear(torch.ones(1, 128).bfloat16(), bank.own_weights(key)["gate_up_proj"]).any()


def test_packed_in_inference_mode_used_outside_and_with_gradients(format_name: str, make_source: Make) -> None:
    with torch.inference_mode():
        bank = ExpertBank.pack(make_source(), format_name)
        weights = bank.own_weights(ExpertKey(0, 0))
    bank.blob(ExpertKey(0, 0)).copy_(bank.blob(ExpertKey(0, 1)))
    x = torch.randn(1, 128, dtype=weights["gate_up_proj"].dtype, requires_grad=True)
    assert F.linear(x, weights["gate_up_proj"]).isfinite().all()


def test_a_dense_bank_is_a_source(quantised_name: str, make_source: Make) -> None:
    """The draft's bank from the host's copy, once the model itself has let its experts go."""
    for transposed in (False, True):
        source = make_source(transposed=transposed)
        host = ExpertBank.pack(source, Dense(narrowest_exact_dtype(source)))
        one, two = ExpertBank.pack(source, quantised_name), ExpertBank.pack(host, quantised_name)
        weights = [bank.own_weights(ExpertKey(1, 1))["down_proj"] for bank in (one, two)]
        x = torch.randn(1, 48).bfloat16()
        assert torch.equal(F.linear(x, weights[0]), F.linear(x, weights[1]))


def test_a_live_models_parameters_can_be_packed(format_name: str) -> None:
    stacked = torch.nn.Parameter(torch.ones(3, 32, 64))  # as transformers keeps a layer's experts
    source = TensorSource([[{"up_proj": stacked[i], "bias": stacked[i, 0]} for i in range(3)]])
    assert narrowest_exact_dtype(source) == torch.bfloat16
    weights = ExpertBank.pack(source, format_name).own_weights(ExpertKey(0, 2))
    assert not any(weight.requires_grad for weight in weights.values())


def test_progress_counts_experts(make_source: Make, capsys: pytest.CaptureFixture[str]) -> None:
    ExpertBank.pack(make_source(), "qint8")
    assert capsys.readouterr() == ("", "")
    ExpertBank.pack(make_source(), "qint8", progress=True)
    assert "5/5" in capsys.readouterr().err


def test_what_cannot_be_packed_is_refused_by_name(make_source: Make) -> None:
    source = make_source()
    source.tensors(ExpertKey(1, 0))["down_proj"][3, 3] = float("nan")
    with pytest.raises(ValueError, match=r"layer 1 expert 0 'down_proj': qint8 needs finite weights; 1 of"):
        ExpertBank.pack(source, "qint8")
    with pytest.raises(ValueError, match=r"layer 0 expert 0 'w': qint4 needs a row length .*got 100"):
        ExpertBank.pack(TensorSource([[{"w": torch.ones(16, 100)}]]), "qint4")
    with pytest.raises(ValueError, match=r"layer 0 expert 0 'w': qint8 packs 2-D weights.*\(2, 16, 16\)"):
        ExpertBank.pack(TensorSource([[{"w": torch.ones(2, 16, 16)}]]), "qint8")
    with pytest.raises(ValueError, match=r"qint8 must quantise something.*\(bias\)"):
        ExpertBank.pack(TensorSource([[{"bias": torch.ones(16)}]]), "qint8")
    with pytest.raises(ValueError, match="experts of one layer must be alike"):
        ExpertBank.pack(TensorSource([[{"w": torch.ones(16, 16)}, {"w": torch.ones(16, 32)}]]), "qint8")
    with pytest.raises(ValueError, match="layer 0 of the source has 0"):
        ExpertBank.pack(TensorSource([[]]), "qint8")
    with pytest.raises(ValueError, match="at least one MoE layer"):
        ExpertBank.pack(TensorSource([]), "qint8")
    with pytest.raises(ValueError, match="did you mean 'qint8'"):
        ExpertBank.pack(source, "int8")


def test_to_the_same_device_is_itself(make_source: Make) -> None:
    bank = ExpertBank.pack(make_source(), "qint4")
    assert bank.to("cpu") is bank and bank.device == torch.device("cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(format_name: str, make_source: Make) -> None:
    """Moved inner tensor by inner tensor, and packed anew where the packing belongs to the device."""
    bank = ExpertBank.pack(make_source(), format_name)
    there = bank.to("cuda")
    assert there.device.type == "cuda" and there.name == bank.name
    if format_name == "qint4":
        with pytest.raises(ValueError, match="cpu only"):
            bank.weights(0, bank.blob(ExpertKey(0, 0)).cuda())
    for key in KEYS:
        slot = torch.zeros(there.blob_bytes(key.layer), dtype=torch.uint8, device="cuda")
        moved = there.weights(key.layer, slot)
        slot.copy_(there.blob(key))
        for name, weight in bank.own_weights(key).items():
            assert moved[name].is_cuda
            if weight.ndim == 2:
                x = torch.randn(3, weight.shape[1], dtype=weight.dtype)
                got = F.linear(x.cuda(), moved[name]).cpu()
                torch.testing.assert_close(got, F.linear(x, weight), rtol=0.02, atol=0.5)
    back = there.to("cpu")
    for key in KEYS:
        assert torch.equal(back.blob(key), bank.blob(key))
