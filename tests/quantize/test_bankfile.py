from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specter_lab.quantize import ExpertBank, TensorSource, bankfile
from specter_lab.records import ExpertKey

Make = Callable[..., TensorSource]
KEYS = [ExpertKey(0, 0), ExpertKey(0, 1), ExpertKey(0, 2), ExpertKey(1, 0), ExpertKey(1, 1)]


@pytest.fixture
def saved(tmp_path: Path, make_source: Make) -> Path:
    ExpertBank.pack(make_source(), "qint4").save(tmp_path, {"model": "tiny-moe", "revision": 3, "layers": (0, 1)})
    return tmp_path


def rewrite(folder: Path, tensors: Callable[[dict], dict] = dict, **header: object) -> None:
    """The same file with other tensors or header entries, well formed otherwise."""
    path = folder / bankfile.FILE
    with safe_open(path, framework="pt") as file:
        text = json.dumps({**json.loads(file.metadata()["specter_lab"]), **header})
    save_file(tensors(load_file(path)), path, metadata={"specter_lab": text, "crc32": str(zlib.crc32(text.encode()))})


@pytest.mark.parametrize("transposed", [False, True])
def test_round_trip_computes_the_same_bits(format_name: str, transposed: bool, make_source: Make, tmp_path: Path) -> None:
    bank = ExpertBank.pack(make_source(transposed=transposed), format_name)
    bank.save(tmp_path / "new" / "folder", {"model": "tiny-moe"})
    assert os.listdir(tmp_path / "new" / "folder") == ["bank.safetensors"]
    again = ExpertBank.load(tmp_path / "new" / "folder", {"model": "tiny-moe"})
    assert (again.name, again.format, again.nbytes, repr(again)) == (bank.name, bank.format, bank.nbytes, repr(bank))
    assert again.report().equals(bank.report())
    assert [again.transposed(layer) for layer in range(2)] == [bank.transposed(layer) for layer in range(2)]
    for key in KEYS:
        assert torch.equal(bank.blob(key), again.blob(key))
        for name, weight in bank.own_weights(key).items():
            loaded = again.own_weights(key)[name]
            assert type(loaded) is type(weight)
            if weight.ndim == 2:
                x = torch.randn(2, weight.shape[1], dtype=weight.dtype)
                assert torch.equal(F.linear(x, weight), F.linear(x, loaded))


def test_saved_bytes_are_portable(saved: Path) -> None:
    """No class whose bytes depend on this very CPU may be in the file."""
    with safe_open(saved / bankfile.FILE, framework="pt") as file:
        text = file.metadata()["specter_lab"]
    assert "TinyGemm" not in text and "PlainQBitsTensor" in text


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is none in .*nowhere"):
        ExpertBank.load(tmp_path / "nowhere")


def test_another_fingerprint_is_refused_entry_by_entry(saved: Path) -> None:
    assert ExpertBank.load(saved).layers == 2
    ExpertBank.load(saved, {"model": "tiny-moe", "revision": 3, "layers": (0, 1)})
    with pytest.raises(ValueError) as error:
        ExpertBank.load(saved, {"model": "other", "layers": (0, 1), "dtype": "bfloat16"})
    text = str(error.value)
    assert "model (saved 'tiny-moe', asked for 'other')" in text
    assert "dtype (saved 'nothing', asked for 'bfloat16')" in text and "revision" in text and "layers (" not in text


def test_a_fingerprint_that_is_not_json_is_refused(saved: Path, make_source: Make) -> None:
    before = (saved / bankfile.FILE).read_bytes()
    with pytest.raises(TypeError, match="A fingerprint must be JSON"):
        ExpertBank.pack(make_source(), "qint8").save(saved, {"model": object()})
    assert (saved / bankfile.FILE).read_bytes() == before


@pytest.mark.parametrize("keep", [0, 5, 100, 5000, -1])
def test_a_truncated_file_is_refused(saved: Path, keep: int) -> None:
    path = saved / bankfile.FILE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"bank\.safetensors must be a whole bank file"):
        ExpertBank.load(saved)


@pytest.mark.parametrize("place", range(0, 100, 7))
def test_any_changed_byte_is_noticed(saved: Path, place: int) -> None:
    path = saved / bankfile.FILE
    data = bytearray(path.read_bytes())
    position = len(data) * place // 100
    data[position] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"bank\.safetensors must"):
        ExpertBank.load(saved)


def test_a_foreign_safetensors_file_is_refused(tmp_path: Path) -> None:
    save_file({"layer.0": torch.zeros(3)}, tmp_path / bankfile.FILE)
    with pytest.raises(ValueError, match="must be a whole bank file"):
        ExpertBank.load(tmp_path)


def test_versions_tensors_and_sizes_are_checked(saved: Path) -> None:
    rewrite(saved, version=2)
    with pytest.raises(ValueError, match=r"must have version 1; .* has 2"):
        ExpertBank.load(saved)
    rewrite(saved, lambda tensors: {"layer.1": tensors["layer.1"], "layer.7": tensors["layer.0"]}, version=1)
    with pytest.raises(ValueError, match=r"missing: layer.0; extra: layer.7"):
        ExpertBank.load(saved)


def test_a_wrong_size_is_named(saved: Path) -> None:
    rows = load_file(saved / bankfile.FILE)["layer.1"][:1].clone()
    sums = [zlib.crc32(load_file(saved / bankfile.FILE)["layer.0"].numpy().data), zlib.crc32(rows.numpy().data)]
    rewrite(saved, lambda tensors: {**tensors, "layer.1": rows}, crc32=sums)
    with pytest.raises(ValueError, match=r"Layer 1 .* must have shape \(2, \d+\); it has \(1, \d+\)"):
        ExpertBank.load(saved)


def test_an_error_while_saving_leaves_the_old_file(saved: Path, make_source: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(bankfile.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        ExpertBank.pack(make_source(), "qint8").save(saved)
    monkeypatch.undo()
    assert os.listdir(saved) == [bankfile.FILE]
    assert ExpertBank.load(saved).name == "qint4 group 128/64/16"


def test_saving_replaces(saved: Path, make_source: Make) -> None:
    ExpertBank.pack(make_source(), "qint2").save(saved)
    assert ExpertBank.load(saved, {}).name == "qint2 group 128/64/16"
