"""The presets agree with published totals, and a file that is wrong is refused by table and key."""

import re
import tomllib
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specter_lab.bundled import data_folder
from specter_lab.hardware import case_named, costs_for, hardware, read_hardware
from specter_lab.replay import ReplayTarget
from specter_lab.routing.statistics import PRESETS
from specter_lab.routing.synthetic import SyntheticRouting

BILLIONS = {  # parameters, as the model cards say
    "mixtral_8x7b": 46.7, "phi_35_moe": 41.9, "olmoe_1b_7b": 6.92, "qwen15_moe": 14.3,
    "deepseek_v2_lite": 15.7, "qwen3_30b_a3b": 30.5, "gpt_oss_20b": 20.9,
}  # fmt: skip
EXPERT_MB = {  # bfloat16, INT4 with a scale for each 128
    "mixtral_8x7b": (352.3, 90.8), "phi_35_moe": (157.3, 40.6), "olmoe_1b_7b": (12.58, 3.24), "qwen15_moe": (17.30, 4.46),
    "deepseek_v2_lite": (17.30, 4.46), "qwen3_30b_a3b": (9.44, 2.43), "gpt_oss_20b": (49.8, 12.8),
}  # fmt: skip
TEXT = (data_folder() / "hardware.toml").read_text(encoding="utf-8")


def changed(tmp_path, old, new):
    """The bundled file with one replacement."""
    assert old in TEXT
    path = tmp_path / "mine.toml"
    path.write_text(TEXT.replace(old, new, 1), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", BILLIONS)
def test_weights_add_up_to_the_published_parameters(name):
    model = hardware().models[name]
    weights = model.non_expert_bytes / 2 + model.layers * model.experts * model.expert_weights
    assert weights / 1e9 == pytest.approx(BILLIONS[name], rel=3e-3)
    assert model.expert_bytes() / 1e6 == pytest.approx(EXPERT_MB[name][0], rel=2e-3)
    assert model.int4_expert_bytes / 1e6 == pytest.approx(EXPERT_MB[name][1], rel=4e-3)


def config_of(model):
    """Latent attention and shared experts, the most involved shape, with vocabulary and layers cut down."""
    return AutoConfig.for_model(
        "deepseek_v2", hidden_size=model.hidden_size, intermediate_size=model.dense_size, moe_intermediate_size=model.expert_size,
        num_hidden_layers=3, first_k_dense_replace=1, num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, q_lora_rank=None,
        kv_lora_rank=model.latent_size, qk_rope_head_dim=model.rotary_size, qk_nope_head_dim=model.qk_head_size - model.rotary_size,
        v_head_dim=model.v_head_size, n_routed_experts=model.experts, n_shared_experts=model.shared_size // model.expert_size,
        num_experts_per_tok=model.experts_per_token, vocab_size=256,
    )  # fmt: skip


def test_a_shape_counts_what_transformers_builds():
    model = hardware().models["deepseek_v2_lite"]
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config_of(model))
    sizes = {name: p.numel() for name, p in built.named_parameters()}
    layer = {part: sum(n for name, n in sizes.items() if f"layers.{index}." in name) for part, index in (("dense", 0), ("moe", 1))}
    assert layer["moe"] == pytest.approx(model.skeleton_weights + model.experts * model.expert_weights, rel=1e-4)
    assert layer["dense"] == pytest.approx(model.attention_weights + 3 * model.hidden_size * model.dense_size, rel=1e-3)


def test_every_table_has_a_source_and_every_model_a_routing():
    for group in tomllib.loads(TEXT).values():
        assert all(len(table["source"]) > 10 for table in group.values())
    assert {model.routing for model in hardware().models.values()} <= set(PRESETS)


def test_cases_are_the_published_ones_and_compare_at_equal_memory():
    cases = hardware().cases
    assert {name: (case.budget_gb, case.draft_length, case.slots["specter"]) for name, case in cases.items()} == {
        "ds_high": (24, 16, 16), "ds_low": (18, 16, 4), "qwen_high": (20, 8, 15), "qwen_low": (16, 8, 8),
        "phi_high": (40, 16, 2), "phi_low": (32, 16, 1), "qwen3_30b": (36, 8, 32), "gptoss_20b": (26, 8, 8),
    }  # fmt: skip
    for name in ("ds_high", "ds_low"):  # the draft-free rival's slots in the artifact take the same memory
        case = cases[name]
        rival = case.model.non_expert_bytes + case.slots["mixtral_offloading"] * case.model.layers * case.model.expert_bytes()
        assert rival == pytest.approx(case.device_bytes, rel=0.03)
    for name in ("qwen3_30b", "gptoss_20b"):
        assert cases[name].slots["specter"] * 4 == cases[name].model.experts
    assert all(case.device_bytes < case.budget_gb * 1e9 <= case.gpu.memory_gb * 1e9 for case in cases.values())


def token_ms(model, gpu, lane):
    per_layer = lane.attention_us + model.experts_per_token * lane.expert_us
    return (model.layers * per_layer + lane.head_us) / 1e3


def test_costs_reproduce_what_was_measured():
    h = hardware()
    a100 = h.gpus["a100_40gb"]
    qwen3 = h.models["qwen3_30b_a3b"]
    fused = SimpleNamespace(**{**vars(h.runtimes["compiled"]), "target_expert_us": 0})  # SGLang runs all experts of a layer at once
    assert token_ms(qwen3, a100, costs_for(qwen3, a100, fused).target) == pytest.approx(6.9, rel=0.01)
    eager = h.runtimes["eager"]
    assert costs_for(h.models["phi_35_moe"], a100, eager).target.expert_us == pytest.approx(200, rel=0.01)
    mixtral = costs_for(h.models["mixtral_8x7b"], a100, eager).target
    assert mixtral.attention_us + 2 * mixtral.expert_us == pytest.approx(1240, rel=0.4)  # not used in the fit


def test_a_draft_costs_less_only_by_its_experts():
    costs = costs_for(hardware().models["deepseek_v2_lite"], hardware().gpus["h100_80gb"])
    assert costs.draft.attention_us == costs.target.attention_us and costs.draft.head_us == costs.target.head_us
    floor = hardware().runtimes["compiled"].target_expert_us
    assert costs.draft.expert_us == pytest.approx((costs.target.expert_us - floor) * 4.125 / 16)


def test_the_host_rate_lies_between_its_two_measurements():
    rate = hardware().hosts["xeon_16_threads"].weights_gb_s
    assert 17.30 / 0.454 < rate < 17.30 / 0.335


def test_a_shape_serves_replay_and_routing():
    model = hardware().models["qwen15_moe"]
    assert ReplayTarget(model.geometry).layers == SyntheticRouting(model.geometry, model.routing).layers == 24


def test_unknown_case_names_the_nearest():
    with pytest.raises(ValueError, match=r"got 'ds_hihg'\. Did you mean ds_high"):
        case_named("ds_hihg")
    with pytest.raises(ValueError, match="There are ds_high, ds_low"):
        case_named("zzz")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gb_s = 22.0", "gb_s = -22.0", r"\[links.pcie4_x16\] gb_s of .* above 0; got -22.0"),
        ("gb_s = 22.0\n", "", r"\[links.pcie4_x16\] has no gb_s"),
        ("gb_s = 22.0", 'gb_s = "fast"', r"gb_s of .* got 'fast'"),
        ("gb_s = 22.0", "gb_s = true", r"gb_s of .* got True"),
        ("gb_s = 22.0", "gb_s = nan", r"gb_s of .* got nan"),
        ('source = "NVIDIA A100 data sheet, 40 GB PCIe and SXM"\n', "", r"\[gpus.a100_40gb\] has no source"),
        ('source = "NVIDIA A100 data sheet, 40 GB PCIe and SXM"', 'source = ""', r"\[gpus.a100_40gb\] has no source"),
        ('source = "NVIDIA A100 data sheet, 40 GB PCIe and SXM"', "source = 4", r"\[gpus.a100_40gb\] source of .* is a str; got 4"),
        ("memory_gb_s = 936", "memory_gbs = 936", r"key of \[gpus.rtx_3090\] .*Did you mean memory_gb_s"),
        ("experts = 8\n", "experts = 8.5\n", r"experts of .* whole number above 0; got 8.5"),
        ("dense_layers = 1", "dense_layers = -1", r"dense_layers of .* 0 or more; got -1"),
        ('model = "phi_35_moe"', 'model = "phi_moe"', r"A model is one of .*got 'phi_moe'. Did you mean phi_35_moe"),
        ("slots = { specter = 15 }", "slots = { specter = 0 }", r"\[cases.qwen_high\] slots.specter"),
        ("slots = { specter = 15 }", "slots = { other = 5 }", r"\[cases.qwen_high\] has no slots.specter"),
        ("[links.pcie4_x16]", "[linkz.pcie4_x16]", "Did you mean links"),
        ("gb_s = 22.0", "gb_s 22.0", "is not"),
    ],
)
def test_a_wrong_file_is_refused_by_table_and_key(tmp_path, old, new, message):
    path = changed(tmp_path, old, new)
    with pytest.raises(ValueError, match=message) as caught:
        read_hardware(path)
    assert re.search(r"(Add|Correct|Did you mean|See|Start from)", str(caught.value))


def test_a_file_of_ones_own_needs_only_what_it_uses(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[links.nvlink]\ngb_s = 400\nsource = "wishful thinking"\n')
    mine = read_hardware(path)
    assert mine.links["nvlink"].gb_s == 400.0 and mine.cases == {}
