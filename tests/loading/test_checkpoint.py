"""Reading parts of safetensors, whole files and shards."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import specter_lab as sl
from specter_lab.loading.checkpoint import Checkpoint


@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_rows_shapes_and_dtypes(checkpoint, sharded):
    folder = checkpoint("gpt_oss", sharded, dtype=torch.bfloat16)
    whole = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    with Checkpoint(folder) as opened:
        assert set(opened.keys) == set(whole)
        assert opened.keys.index("model.layers.1.mlp.experts.down_proj") < opened.keys.index("model.layers.2.mlp.experts.down_proj")
        assert opened.nbytes == sum(f.stat().st_size for f in folder.glob("*.safetensors"))
        for name, tensor in whole.items():
            assert (opened.shape(name), opened.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
            assert torch.equal(opened.read(name), tensor) and torch.equal(opened.read(name, 1), tensor[1:2])


def test_what_was_read_is_memory_of_its_own(checkpoint):
    with Checkpoint(checkpoint("gpt_oss")) as opened:
        row = opened.read("model.layers.1.mlp.experts.down_proj", 3)
    assert row.untyped_storage().nbytes() == row.numel() * row.element_size()
    row.zero_()
    with Checkpoint(checkpoint("gpt_oss")) as opened:
        assert opened.read("model.layers.1.mlp.experts.down_proj", 3).any()


def test_joined_tensors_are_concatenated_ones(tmp_path):
    tensors = {
        "a": torch.randn(2, 3),
        "b": torch.randn(4, 3),
        "half": torch.randn(1, 3).half(),
        "none": torch.zeros(0, 3),
        "one": torch.tensor(5),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as opened:
        for keys in (["a"], ["b", "a"], ["a", "none", "b"], ["a", "half"]):
            assert torch.equal(opened.read_joined(keys), torch.cat([tensors[key] for key in keys]))
        assert torch.equal(opened.read("one"), tensors["one"]) and opened.read("none").shape == (0, 3)
        assert torch.equal(opened.lazy("b")[...], tensors["b"]) and torch.equal(opened.lazy("b")[1:2], tensors["b"][1:2])


def test_a_missing_shard_is_named(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("mixtral", True), tmp_path / "copy")
    gone = sorted(folder.glob("*.safetensors"))[2]
    gone.unlink()
    with pytest.raises(ValueError, match=rf"lacks 1 of \d+ \({gone.name}\)"):
        sl.load_moe(folder, stream=True)


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_truncated_file_is_named(checkpoint, tmp_path, keep):
    shutil.copy(checkpoint("mixtral") / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes((checkpoint("mixtral") / "model.safetensors").read_bytes()[:keep])
    with pytest.raises(ValueError, match="whole safetensors"):
        sl.load_moe(tmp_path, stream=True)


def test_pickled_weights_are_not_read(checkpoint, tmp_path):
    shutil.copy(checkpoint("mixtral") / "config.json", tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"neither model\.safetensors nor"):
        sl.load_moe(tmp_path, stream=True)


def test_unknown_formats_have_no_dtype(tmp_path):
    save_file({"a": torch.zeros(2, dtype=torch.float8_e4m3fn), "b": torch.zeros(2, dtype=torch.int64)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as opened:
        assert [opened.dtype(key) for key in opened.keys] == [None, torch.int64]
        with pytest.raises(ValueError, match=r"a of .* is in F8_E4M3"):
            opened.read("a")
