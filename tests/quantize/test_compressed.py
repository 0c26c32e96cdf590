"""Losslessly compressed experts: every bit, few of them, and what can't be."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import specter_lab as sl
from specter_lab.quantize import Dense, ExpertBank, TensorSource, compressed
from specter_lab.quantize.compressed import HEADER_BYTES, CompressedBank, compress, decompress
from specter_lab.records import ExpertKey


@pytest.fixture(params=["torch", "compiled"])
def path(request, monkeypatch):
    """Both ways to decompress; C only where it can be had."""
    if request.param == "torch":
        monkeypatch.setattr(compressed, "_compiled", lambda: None)
    elif compressed._compiled() is None:
        pytest.skip("no C compiler here")
    return request.param


def back(words):
    out = torch.full_like(words, 7)
    decompress(torch.cat([compress(words), torch.full((64,), 255, dtype=torch.uint8)]), out)  # padding is ignored
    return out


@pytest.mark.parametrize(
    "weights",
    [
        torch.randn(4096),
        torch.randn(4096) * torch.logspace(-38, 38, 4096),
        torch.zeros(64),
        torch.where(torch.rand(4096) < 0.9, 0.0, torch.randn(4096)),
        torch.full((64,), 1e-40),
        torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0] * 16),
    ],
    ids=["normal", "heavy-tailed", "zero", "sparse", "denormal", "special"],
)
def test_every_bit_comes_back(path, weights):
    words = weights.bfloat16().view(torch.uint8)
    assert torch.equal(back(words), words)


@given(st.integers(1, 40), st.integers(0, 2**31))
def test_any_words_come_back(eighths, seed):
    words = torch.randint(0, 256, (16 * eighths,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    assert torch.equal(back(words), words)


def test_the_written_format_is_the_format():
    """Eight words decoded by hand, as the docstring says: exponents 127 (1.0) and one escape, 0 (zero)."""
    words = torch.tensor([1.0, -1.5, 2.0, 1.0, 0.0, 1.0, 1.0, 4.0]).bfloat16()
    blob = compress(words.view(torch.uint8))
    version, top, escapes, _ = blob[:16].view(torch.int32).tolist()
    low, two, one, escaped = blob[HEADER_BYTES:].split([8, 2, 1, escapes])
    assert (version, escapes, escaped.tolist()) == (1, 1, [0])
    index = [int(two[w % 2]) >> 2 * (w // 2) & 3 | (int(one[0]) >> w & 1) << 2 for w in range(8)]
    assert [top - i for i in index if i != 7] == [127, 127, 128, 127, 127, 127, 129] and index[4] == 7
    assert low.tolist() == [0, 128 | 64, 0, 0, 0, 0, 0, 0]


def test_few_bits_a_weight():
    words = (torch.randn(2**16, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16().view(torch.uint8)
    assert 8 * len(compress(words)) / 2**16 < 11.25


def test_the_bundled_model_comes_back():
    with sl.load_moe("tiny-moe", dtype="float32") as moe:
        bank = moe.compressed()
        assert bank.bits_per_weight < 11.4
        for layer in range(bank.layers):
            for expert in range(bank.experts(layer)):
                key = ExpertKey(layer, expert)
                bank.verify(key)
                for name, tensor in moe.store.own_weights(key).items():
                    assert torch.equal(bank.own_weights(key)[name].view(torch.int16), tensor.view(torch.int16))


@pytest.mark.parametrize("place", [0, 4, 8, 70, -1])
def test_a_flipped_bit_is_detected(place):
    bank = CompressedBank(ExpertBank.pack(TensorSource([[{"w": torch.randn(16, 64).bfloat16()}] * 2]), Dense(torch.bfloat16)))
    copy = bank.blob(ExpertKey(0, 1)).clone()
    used = len(compress(bank.dense.blob(ExpertKey(0, 1))))
    copy[used - 1 if place == -1 else place] ^= 1
    with pytest.raises(ValueError, match="checksum"):
        bank.verify(ExpertKey(0, 1), copy)
    if place == 8:  # whatever a changed count does to the weights, nothing outside the blob is read
        bank.rebuild(ExpertKey(0, 1), copy)


def test_other_formats_are_refused():
    source = TensorSource([[{"w": torch.randn(16, 128)}] * 2])
    with pytest.raises(ValueError, match=r"bfloat16 experts; these are float32\. Load the model"):
        CompressedBank(ExpertBank.pack(source, Dense(torch.float32)))
