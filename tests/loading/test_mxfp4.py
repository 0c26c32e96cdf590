"""Case 55: gpt-oss checkpoints as they are published, experts in MXFP4."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

import specter_lab as sl
from specter_lab.loading import streamed as streamed_module
from specter_lab.quantize import Mxfp4Tensor
from specter_lab.records import ExpertKey
from specter_lab.seam import experts_modules
from tests.loading.conftest import IDS, logits


@pytest.fixture(scope="session")
def folder(checkpoint, tmp_path_factory):
    """A tiny gpt-oss whose expert weights are random blocks (E, out, in / 32, 16) and scales (E, out, in / 32), as on the hub."""
    path = tmp_path_factory.mktemp("mxfp4")
    source = checkpoint("gpt_oss", dtype=torch.bfloat16, intermediate_size=96)
    shutil.copy(source / "generation_config.json", path)
    config = json.loads((source / "config.json").read_text())
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantised}))
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inner, out = tensor.shape
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, out, inner // 32, 16), dtype=torch.uint8, generator=generator)
            tensors[f"{name}_scales"] = torch.randint(118, 124, (experts, out, inner // 32), dtype=torch.uint8, generator=generator)
        else:
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="session", params=["bfloat16", "float32", "float16"])
def own(request, folder):
    """transformers' own way: everything unpacked."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=request.param, quantization_config=Mxfp4Config(dequantize=True), experts_implementation="eager"
    )
    return request.param, model.eval()


@pytest.mark.parametrize("dequantize", [False, True])
def test_experts_and_logits_are_those_of_transformers(folder, own, dequantize):
    """Case 55."""
    dtype, model = own
    moe = sl.load_moe(folder, dtype=dtype, dequantize=dequantize)
    assert moe.store.name == (("float16" if dtype == "float16" else "bfloat16") if dequantize else "mxfp4")
    for layer, module in enumerate(experts_modules(model).values()):
        for expert in range(8):
            key = ExpertKey(layer, expert)
            assert isinstance(moe.store.own_weights(key)["down_proj"], Mxfp4Tensor) != dequantize
            weights = moe.tensors(key)
            assert all(type(w) is torch.Tensor for w in weights.values())
            assert all(torch.equal(p[expert], weights[name]) and p.dtype == weights[name].dtype for name, p in module._parameters.items())
    with torch.no_grad():
        theirs = model(IDS).logits
    assert torch.equal(logits(moe), theirs)
    assert not hasattr(moe.model.config, "quantization_config")
    moe.detach()
    with torch.no_grad():
        assert torch.equal(moe.model(IDS).logits, theirs)


def test_packed_experts_cross_the_link_packed(folder):
    moe = sl.load_moe(folder, dtype="float32")
    gate, down = 192 * 64, 64 * 96
    assert moe.store.blob_bytes(0) == (gate + down) * 17 // 32 + (192 + 64) * 2
    assert moe.geometry.expert_bytes[0] == (gate + down + 192 + 64) * 4
    with sl.Pipeline(moe, slots=2, machine=sl.SimulatedMachine(), drafter=sl.SelfDrafter(moe.quantize("qint8"))) as pipeline:
        run = pipeline.generate(IDS, max_new_tokens=8, do_sample=False)
    assert set(run.trace.of_kind("transfer")["bytes"]) == {moe.store.blob_bytes(0)}
    moe.detach()
    assert moe.own_generate(IDS, max_new_tokens=8, do_sample=False)[0].tolist() == list(run.ids)


def test_a_draft_is_the_one_of_unpacked_experts(folder):
    packed, unpacked = (sl.load_moe(folder, dequantize=d).quantize("qint4") for d in (False, True))
    assert all(torch.equal(packed.blobs(layer), unpacked.blobs(layer)) for layer in range(3))


def test_prepared_it_stays_packed(folder, tmp_path):
    sl.prepare_moe(folder, tmp_path / "prepared", drafts=["qint8"])
    assert torch.equal(logits(sl.load_moe(tmp_path / "prepared", mapped=True)), logits(sl.load_moe(folder)))
    again = sl.load_moe(tmp_path / "prepared")
    assert again.store.name == "mxfp4" and again.quantize("qint8").name == "qint8"


def test_unpacking_says_what_it_takes_before_it_begins(folder, monkeypatch):
    """Case 55. From headers alone, for both ways in which all experts are unpacked."""
    monkeypatch.setattr(streamed_module, "available_bytes", lambda: 700_000)
    packed = 3 * 8 * ((192 * 64 + 64 * 96) * 17 // 32 + (192 + 64) * 2)
    wide = 3 * 8 * (192 * 64 + 64 * 96 + 192 + 64) * 2
    assert packed < 700_000 - 140_000 < wide
    assert sl.load_moe(folder).store.name == "mxfp4"
    with pytest.raises(ValueError, match=rf"{wide:,} for its experts, as bfloat16.*700,000 are free"):
        sl.load_moe(folder, dequantize=True)
    with pytest.raises(ValueError, match=rf"{wide:,} for its experts, unpacked from {packed:,} of MXFP4.*Leave stream=False out"):
        sl.load_moe(folder, stream=False)


def test_half_of_a_packed_weight_is_a_missing_one(folder, tmp_path):
    shutil.copy(folder / "config.json", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks 1 \(model.layers.1.mlp.experts.down_proj\)"):
        sl.load_moe(tmp_path)
