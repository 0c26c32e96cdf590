"""Opening a MoE: geometry from the modules, attach and detach without a trace, refusals."""

import copy
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import specter_lab as sl
from specter_lab.offload.server import ResidentServer
from specter_lab.records import ExpertKey
from tests.families import FAMILIES, tiny


def snapshot(model):
    return {n: (id(p), p.detach().clone(), p.requires_grad) for n, p in model.named_parameters()}, copy.deepcopy(model.config.to_dict())


def same(before, model):
    parameters, config = before
    now = dict(model.named_parameters())
    assert list(now) == list(parameters)
    assert all(
        id(now[n]) == i and torch.equal(now[n], value) and now[n].requires_grad == grad for n, (i, value, grad) in parameters.items()
    )
    assert model.config.to_dict() == config
    assert not any(hasattr(m, "_specter_place") for m in model.modules())


def test_geometry_of_the_bundled_model():
    moe = sl.load_moe("tiny-moe", dtype="float32")
    g = moe.geometry
    assert (g.experts, g.experts_per_token, g.decoder_layers, g.dense_layers) == ((24,) * 8, 4, tuple(range(8)), 0)
    assert g.expert_bytes == (3 * 128 * 128 * 4,) * 8
    assert g.kv_bytes_per_token == 8 * 2 * 2 * 32 * 4
    everything = sum(t.numel() * t.element_size() for t in [*moe.model.parameters(), *moe.model.buffers()])
    assert g.non_expert_bytes + 192 * g.expert_bytes[0] == everything


def test_dense_layers_and_shared_experts_are_kept_apart():
    g = sl.load_moe(tiny("deepseek_v3")).geometry
    assert (g.decoder_layers, g.dense_layers, g.layers) == ((1, 2), 1, 2)
    assert g.shared_expert_bytes == 2 * 3 * 64 * 48 * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_attach_serves_bitwise_equal_logits_and_detach_restores_everything(family):
    """The experts have left the modules (meta), so only the store can have served them."""
    model = tiny(family)
    ids = torch.arange(3, 25)[None]
    model.set_experts_implementation("eager")
    before, own = snapshot(model), model(ids).logits
    moe = sl.load_moe(model).attach()
    experts = [p for m in moe.seam.modules for p in m.parameters()]
    assert experts and all(p.device.type == "meta" for p in experts)
    machine = sl.SimulatedMachine()
    with torch.no_grad(), moe.seam.serving(ResidentServer(moe.store, machine, "target", 0)) as calls:
        logits = model(ids).logits
    assert [c.layer for c in calls] == list(range(moe.layers))
    assert torch.equal(logits, own.detach())
    moe.detach()
    same(before, model)
    assert torch.equal(model(ids).logits, own)


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_return_what_the_installed_transformers_returns(family):
    """Case 18: a tensor or a tuple, whichever the model's next layer expects, from the first forward on."""
    model = tiny(family)
    moe = sl.load_moe(model)
    kinds = []
    blocks = [m for m in model.modules() if any(child in moe.seam.modules for child in m.children())]
    hooks = [m.register_forward_hook(lambda _m, _args, out: kinds.append((type(out), len(out)))) for m in blocks]
    model(torch.tensor([[3, 4]]))
    own, kinds[:] = list(kinds), []
    with moe, torch.no_grad(), moe.seam.serving(ResidentServer(moe.store, sl.SimulatedMachine(), "target", 0)):
        model(torch.tensor([[3, 4]]))
    for hook in hooks:
        hook.remove()
    assert kinds == own and len(own) == moe.layers


def test_a_checkpoint_in_bf16_is_stored_in_bf16_though_computed_in_fp32():
    with sl.load_moe("tiny-moe", dtype="float32") as moe:
        assert (moe.store.name, moe.dtype) == ("bfloat16", torch.float32)
        assert moe.store.nbytes * 2 == sum(moe.geometry.expert_bytes) * 24


def test_attaching_twice_is_refused_and_harmless():
    model = tiny("mixtral")
    before = snapshot(model)
    moe, other = sl.load_moe(model), sl.load_moe(model)
    moe.attach()
    for again in (moe, other):
        with pytest.raises(RuntimeError, match="attached once"):
            again.attach()
    assert moe.store.layers == 3
    moe.detach()
    moe.detach()
    same(before, model)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_failure_half_way_leaves_the_model_whole(monkeypatch, error):
    model = tiny("mixtral")
    before, moe = snapshot(model), sl.load_moe(model)
    pack, layers = sl.ExpertBank.pack.__func__, []

    def failing(cls, source, fmt, progress=False):
        layers.append(source)
        if len(layers) == 2:
            raise error("in the middle")
        return pack(cls, source, fmt, progress)

    monkeypatch.setattr(sl.ExpertBank, "pack", classmethod(failing))
    with pytest.raises(error):
        moe.attach()
    monkeypatch.undo()
    same(before, model)
    moe.attach().detach()
    same(before, model)


def test_an_attached_model_without_a_pipeline_says_so():
    with sl.load_moe(tiny("mixtral")) as moe, pytest.raises(RuntimeError, match="runs its experts from a pipeline"):
        moe.model(torch.tensor([[3, 4]]))


def test_a_model_that_shares_its_config_is_not_disturbed():
    first = tiny("mixtral")
    second = AutoModelForCausalLM.from_config(first.config, dtype=torch.float32).eval()
    ids = torch.tensor([[3, 4, 5]])
    own = second(ids).logits
    with sl.load_moe(first):
        assert torch.equal(second(ids).logits, own)


def test_a_dense_model_and_unregistered_experts_are_refused():
    with pytest.raises(ValueError, match="a dense model"):
        sl.load_moe(tiny("llama"))
    with pytest.raises(ValueError, match="experts registry"):
        sl.load_moe(tiny("jetmoe", num_local_experts=4, num_experts_per_tok=2, kv_channels=16))


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        sl.load_moe(tiny("mixtral").train())


def test_truncated_incomplete_and_missing_folders(tiny_folder, tmp_path):
    whole = (tiny_folder / "model.safetensors").read_bytes()
    for name in ("config.json", "generation_config.json"):
        shutil.copy(tiny_folder / name, tmp_path)
    for broken in (whole[: len(whole) // 2], b"\xff" * 4096, b""):
        (tmp_path / "model.safetensors").write_bytes(broken)
        with pytest.raises(ValueError, match="whole safetensors"):
            sl.load_moe(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json"):
        sl.load_moe(tmp_path / "nothing-here")


def test_missing_weights_are_never_made_up(tmp_path):
    from safetensors.torch import load_file, save_file

    model = tiny("mixtral")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[next(n for n in weights if "experts.3" in n and "layers.1" in n)]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="every weight"):
        sl.load_moe(tmp_path)


def test_pickled_weights_are_not_read(tmp_path):
    model = tiny("mixtral")
    AutoConfig.for_model("mixtral").save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        sl.load_moe(tmp_path)


def test_the_routers_answer_as_in_the_model(tiny_folder):
    moe = sl.load_moe("tiny-moe", dtype="float32")
    seen = []
    hooks = [m.register_forward_pre_hook(lambda _m, args: seen.append(args[:2])) for m in moe.seam.modules]
    with torch.no_grad():
        moe.model(torch.arange(5, 25)[None])
    for hook in hooks:
        hook.remove()
    for layer, (hidden, experts) in enumerate(seen):
        assert torch.equal(moe.route(layer, hidden), experts)


def test_a_draft_bank_holds_the_same_experts_attached_or_not():
    moe = sl.load_moe("tiny-moe", dtype="float32")
    loose = moe.quantize("qint8")
    with moe:
        assert all(torch.equal(loose.blob(ExpertKey(la, e)), moe.quantize("qint8").blob(ExpertKey(la, e))) for la, e in ((0, 0), (7, 23)))


def test_experts_that_take_no_part_in_the_text_model_are_refused():
    """A tower beside it, say: nothing could be known of how its experts are called."""
    model = tiny("mixtral")
    model.tower = copy.deepcopy(model.model.layers[0].mlp)
    with pytest.raises(ValueError, match=r"take part in a forward; of 4 in MixtralForCausalLM, \[3\] didn't"):
        sl.load_moe(model)


def test_experts_without_a_router_beside_them_are_refused():
    model = tiny("mixtral")
    block = model.model.layers[1].mlp
    block.chooser = block._modules.pop("gate")
    with pytest.raises(
        ValueError, match=r"a child named gate or router beside the experts; MixtralSparseMoeBlock .* has \['experts', 'chooser'\]"
    ):
        sl.load_moe(model)


def test_a_config_that_hides_its_experts_is_still_no_dense_one():
    """dbrx keeps the number of its experts in a config within its config."""
    model = tiny("llama")
    model.config.ffn_config = {"moe_num_experts": 4}
    with pytest.raises(ValueError, match=r"experts registry; those of llama \(a model object: moe_num_experts=4\) aren't"):
        sl.load_moe(model)


def test_loading_leaves_no_hooks_and_no_trace():
    """The probe at the start watches routers and takes experts' places; afterwards all is as before."""
    model = tiny("gpt_oss")
    before, own = snapshot(model), model(torch.arange(3, 12)[None]).logits
    moe = sl.load_moe(model)
    same(before, model)
    with moe:
        assert any(router._forward_hooks for router in moe.routers.modules)
    same(before, model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(model(torch.arange(3, 12)[None]).logits, own)


def test_states_of_a_long_prompt_are_not_kept_for_all_layers():
    """What is collected of each layer's call is its routing; the states would be the largest thing in memory."""
    moe = sl.load_moe(tiny("mixtral"))
    with moe, torch.no_grad(), moe.seam.serving(ResidentServer(moe.store, sl.SimulatedMachine(), "target", 0)) as calls:
        moe.model(torch.arange(3, 60)[None])
        assert [call.hidden.numel() for call in calls] == [0, 0, 0]
