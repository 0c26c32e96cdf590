"""Models whose experts never are in their modules: equal to the ordinary load, for both layouts of checkpoints."""

from __future__ import annotations

import json
import operator
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import specter_lab as sl
from specter_lab.loading import streamed as streamed_module
from specter_lab.loading.streamed import StreamedModel, should_stream
from specter_lab.records import ExpertKey
from specter_lab.seam import experts_modules
from tests.families import tiny
from tests.invariants import check_trace
from tests.loading.conftest import FAMILIES, IDS, logits, random_model


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_streamed_model_is_the_ordinary_one(family, sharded, checkpoint):
    """Cases 13, 16, 53: experts on meta throughout, gate and up checked number by number, logits bitwise equal."""
    folder = checkpoint(family, sharded)
    assert (len(list(folder.glob("*.safetensors"))) > 3) == sharded
    own = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", experts_implementation="eager")
    moe = sl.load_moe(folder, stream=True)
    experts = {f"{path}.{name}" for path, m in experts_modules(own).items() for name in m._parameters}
    theirs, ours = own.state_dict(keep_vars=True), moe.model.state_dict(keep_vars=True)
    assert list(theirs) == list(ours)
    for name, tensor in theirs.items():
        assert (tensor.shape, tensor.dtype) == (ours[name].shape, ours[name].dtype)
        assert ours[name].is_meta if name in experts else torch.equal(tensor, ours[name])
    buffers = dict(moe.model.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in own.named_buffers())
    for layer, module in enumerate(experts_modules(own).values()):
        for expert in range(moe.experts(layer)):
            weights = moe.store.own_weights(ExpertKey(layer, expert))
            assert set(weights) == set(module._parameters)
            assert all(torch.equal(p[expert], weights[name]) for name, p in module._parameters.items())
    assert own.config.to_dict() == moe.model.config.to_dict()
    assert own.generation_config.to_dict() == moe.model.generation_config.to_dict()
    assert torch.equal(logits(moe), own(IDS).logits)
    assert moe.geometry == sl.load_moe(own).geometry
    moe.detach()
    assert not any(p.is_meta for p in moe.model.parameters())
    assert torch.equal(moe.model(IDS).logits, own(IDS).logits)
    with moe:  # from here on a model like any other
        assert torch.equal(logits(moe), own(IDS).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_skeleton_never_had_experts(family, checkpoint):
    """They are born on meta, and everything else is real."""
    with StreamedModel(checkpoint(family)) as streamed:
        skeleton = streamed.skeleton()
    meta = {name for name, tensor in [*skeleton.named_parameters(), *skeleton.named_buffers()] if tensor.is_meta}
    assert meta == streamed.experts.names
    assert not sl.load_moe(checkpoint(family)).seam.modules[0].down_proj.is_meta  # the classes are as they were


def test_a_store_says_which_way_its_weights_lie(checkpoint):
    for stream in (False, True):
        assert [sl.load_moe(checkpoint(f), stream=stream).__enter__().store.transposed(0) for f in ("gpt_oss", "mixtral")] == [True, False]


@pytest.mark.parametrize("asked", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_every_dtype_rounds_as_the_ordinary_load_does(family, stored, asked, checkpoint):
    """What the model computes in, and the parts that transformers keeps in float32; the store is as narrow as is exact."""
    folder = checkpoint(family, dtype=stored)
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=asked)
    moe = sl.load_moe(folder, stream=True, dtype=asked)
    experts = [p for m in moe.seam.modules for p in m.parameters()]
    for name, tensor in moe.model.state_dict(keep_vars=True).items():
        if not any(tensor is p for p in experts):
            assert tensor.dtype == own.state_dict()[name].dtype and torch.equal(tensor, own.state_dict()[name])
    for layer, module in enumerate(experts_modules(own).values()):
        weights = moe.tensors(ExpertKey(layer, 5))
        assert all(p.dtype == weights[n].dtype and torch.equal(p[5], weights[n]) for n, p in module._parameters.items())
    exact = {"float32": str(stored)[6:]}.get(asked, asked)
    assert moe.store.name == exact


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_checkpoints_with_the_models_own_names(family, tmp_path):
    """Case 53: v5-style, all experts of a layer in one tensor, beside the v4-style above."""
    model = random_model(family)
    model.config.save_pretrained(tmp_path)
    save_file({n: t.clone() for n, t in model.state_dict().items()}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model.set_experts_implementation("eager")
    assert torch.equal(logits(sl.load_moe(tmp_path, stream=True)), model(IDS).logits)


@pytest.mark.parametrize("only", ["embed_tokens", "lm_head", "both"])
def test_tied_embeddings_stay_tied_and_real(only, checkpoint, tmp_path):
    """Case 10: whichever of the two names the checkpoint has."""
    folder = checkpoint("mixtral", tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    embedding = weights.pop("model.embed_tokens.weight")
    weights |= {n: embedding.clone() for n in ("model.embed_tokens.weight", "lm_head.weight") if only in n or only == "both"}
    shutil.copy(folder / "config.json", tmp_path)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = sl.load_moe(tmp_path, stream=True).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, embedding)


class RootConfig(MixtralConfig):
    model_type = "mixtral_with_a_root_parameter"


class RootModel(MixtralForCausalLM):
    config_class = RootConfig

    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.full((1,), 0.25), persistent=False)

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * self.scale + self.shift
        return out


@pytest.fixture
def root_folder(tmp_path):
    """A class of one's own, with a parameter and a buffer on the model itself."""
    AutoConfig.register(RootConfig.model_type, RootConfig, exist_ok=True)
    AutoModelForCausalLM.register(RootConfig, RootModel, exist_ok=True)
    config = RootConfig(**random_model("mixtral").config.to_diff_dict() | {"model_type": RootConfig.model_type})
    model = RootModel(config).eval()
    model.scale.data.fill_(1.5)
    model.save_pretrained(tmp_path / "root")
    return tmp_path / "root", model


def test_parameters_on_the_root_module(root_folder, tmp_path):
    folder, model = root_folder
    model.set_experts_implementation("eager")
    moe = sl.load_moe(folder, stream=True)
    assert torch.equal(logits(moe), model(IDS).logits) and moe.model.scale.item() == 1.5
    moe.save_prepared(tmp_path / "prepared")
    assert torch.equal(logits(sl.load_moe(tmp_path / "prepared")), model(IDS).logits)


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, torch.device("cpu"), "auto"])
def test_device_maps_of_one_device(device_map, checkpoint):
    moe = sl.load_moe(checkpoint("mixtral"), stream=True, device_map=device_map)
    assert torch.equal(logits(moe), logits(sl.load_moe(checkpoint("mixtral"), stream=True)))


def test_a_device_map_of_several_devices_is_refused(checkpoint):
    with pytest.raises(ValueError, match="names 2"):
        sl.load_moe(checkpoint("mixtral"), stream=True, device_map={"model": "cpu", "lm_head": "meta"})


def test_a_pipeline_decodes_the_models_own_tokens_and_moves_experts(checkpoint):
    """Case 15: transfers happened, and the device held no more than its slots."""
    own = sl.load_moe(checkpoint("qwen3_moe"), stream=False).own_generate(IDS, max_new_tokens=8, do_sample=False)
    moe = sl.load_moe(checkpoint("qwen3_moe"), stream=True)
    with sl.Pipeline(moe, slots=2, machine=sl.SimulatedMachine(), drafter=sl.SelfDrafter(moe.quantize("qint8")), poison=True) as pipeline:
        run = pipeline.generate(IDS, max_new_tokens=8, do_sample=False)
        assert pipeline.residency.bytes == 3 * 2 * moe.store.blob_bytes(0)
    assert run.ids == tuple(own[0].tolist())
    assert len(run.trace.of_kind("transfer")) > 0
    check_trace(run.trace, (2,) * 3, [moe.store.blob_bytes(layer) for layer in range(3)])


def test_the_model_object_after_close(checkpoint):
    """A streamed model stays attached when its pipelines and its ``with`` block end; detached, it is whole."""
    folder = checkpoint("mixtral")
    with sl.load_moe(folder, stream=True) as moe, sl.Pipeline(moe, slots=2, machine=sl.SimulatedMachine()) as pipeline:
        tokens = pipeline.generate(IDS, max_new_tokens=4, do_sample=False).ids
    assert moe.store.layers == 3
    with pytest.raises(RuntimeError, match="from a pipeline"):
        moe.model(IDS)
    moe.detach()
    assert moe.own_generate(IDS, max_new_tokens=4, do_sample=False)[0].tolist() == list(tokens)


def test_an_ordinary_model_loaded_with_a_device_map_is_whole_after_close(checkpoint):
    moe = sl.load_moe(checkpoint("mixtral"), stream=False, device_map="cpu")
    before = moe.model(IDS).logits
    sl.Pipeline(moe, slots=2, machine=sl.SimulatedMachine()).close()
    assert torch.equal(moe.model(IDS).logits, before)


def offloaded(folder, places, offload_folder):
    return AutoModelForCausalLM.from_pretrained(folder, device_map=places, dtype="float32", offload_folder=offload_folder).eval()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_that_a_device_map_left_on_disk_are_named(checkpoint, tmp_path):
    """Case 11: on disk in part or in full, tied or not; never a value read from a meta tensor."""
    folder = checkpoint("mixtral", tie_word_embeddings=True)
    everywhere = offloaded(folder, {"": "disk"}, tmp_path / "a")
    with pytest.raises(ValueError, match=r"on the meta device, for instance model\.embed_tokens\.weight: a device_map left them"):
        sl.load_moe(everywhere)
    parts = [name for name, module in everywhere.named_modules() if any(True for _ in module.parameters(recurse=False))]
    places = {name: "disk" if name == "model.layers.1.mlp.experts" else "cpu" for name in parts}
    partly = offloaded(folder, places, tmp_path / "b")
    moe = sl.load_moe(partly)
    with pytest.raises(ValueError, match=r"2 of .* are on the meta device, for instance model\.layers\.1\.mlp\.experts\..*mapped=True"):
        moe.attach()
    assert not moe.seam.attached and torch.equal(partly(IDS).logits, sl.load_moe(folder, stream=False).model(IDS).logits)


def test_drafts_straight_from_a_checkpoint_are_those_of_the_model(checkpoint):
    with StreamedModel(checkpoint("gpt_oss")) as streamed:
        bank = sl.ExpertBank.pack(streamed.experts, "qint8")
    other = sl.load_moe(checkpoint("gpt_oss"), stream=False).quantize("qint8")
    assert all(torch.equal(bank.blobs(layer), other.blobs(layer)) for layer in range(3))


def test_missing_and_misshapen_experts_are_named(checkpoint, tmp_path):
    """Before anything large is read."""
    weights = load_file(checkpoint("mixtral") / "model.safetensors")
    shutil.copy(checkpoint("mixtral") / "config.json", tmp_path)

    def broken(changes):
        kept = {n: t for n, t in (weights | changes).items() if t is not None}
        save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return pytest.raises(ValueError, match="every weight")

    one = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    with broken({one: None}) as error:
        sl.load_moe(tmp_path, stream=True)
    assert "model.layers.1.mlp.experts.down_proj: 7 of 8 experts" in str(error.value)
    with broken({n: None for n in weights if "layers.2" in n and ".w2." in n}) as error:
        sl.load_moe(tmp_path, stream=True)
    assert "lacks 1 (model.layers.2.mlp.experts.down_proj)" in str(error.value)
    with broken({one: torch.zeros(3, 3)}) as error:
        sl.load_moe(tmp_path, stream=True)
    assert "expert 3 is (3, 3)" in str(error.value)
    with broken({"model.norm.weight": None}) as error:
        sl.load_moe(tmp_path, stream=True)
    assert "lacks 1 (model.norm.weight)" in str(error.value)
    with broken({"model.norm.weight": torch.zeros(3)}) as error:
        sl.load_moe(tmp_path, stream=True)
    assert "model.norm.weight (3,) for (64,)" in str(error.value)


def test_other_quantised_checkpoints_are_refused(checkpoint, tmp_path):
    shutil.copytree(checkpoint("mixtral"), tmp_path / "fp8")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    (tmp_path / "fp8" / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match=r"quantised with 'fp8'.*stream=False"):
        sl.load_moe(tmp_path / "fp8", stream=True)


def test_dense_models_are_refused_before_they_are_read(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a dense model"):
        sl.load_moe(tmp_path, stream=True)


def test_streaming_is_automatic_over_half_of_the_free_memory(checkpoint, monkeypatch):
    folder = checkpoint("mixtral")
    size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    monkeypatch.setattr(streamed_module, "available_bytes", lambda: 2 * size)
    assert not should_stream(str(folder)) and not sl.load_moe(folder).seam.attached
    monkeypatch.setattr(streamed_module, "available_bytes", lambda: 2 * size - 1)
    assert should_stream(str(folder)) and sl.load_moe(folder).seam.attached
    assert not sl.load_moe(folder, stream=False).seam.attached
    assert not should_stream(str(folder / "nothing"))


def test_what_does_not_fit_is_refused_with_its_numbers(checkpoint, monkeypatch):
    folder = checkpoint("mixtral")
    moe = sl.load_moe(folder, stream=True)
    needed = sum(map(operator.mul, moe.geometry.experts, moe.geometry.expert_bytes))
    rest = sum(t.numel() * 4 for t in moe.model.state_dict().values()) - needed
    monkeypatch.setattr(streamed_module, "available_bytes", lambda: 1000)
    with pytest.raises(ValueError, match=rf"takes {needed + rest:,} bytes .*1,000 are free.*prepare_moe"):
        sl.load_moe(folder)
    monkeypatch.setattr("specter_lab.hosting.available_bytes", lambda: 1000)
    with pytest.raises(RuntimeError, match=rf"{needed:,} bytes here, 1,000 are free"):
        moe.detach()
    assert moe.seam.attached and logits(moe).shape[1] == 22
