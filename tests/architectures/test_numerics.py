"""How each family weighs and stores its experts: offloaded logits equal the eager model's bit for bit, in float32 and bfloat16.

Cases 16, 48, 50, 52, 53 and 55: DeepSeek and Mixtral routing precision, weights a row or a matrix, dense first layers and
shared experts, fused gate and up, gpt-oss biases and interleaving.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import specter_lab as sl
from specter_lab.accumulation import accumulation_dtype
from specter_lab.architectures import examine
from specter_lab.offload.server import ResidentServer
from specter_lab.recipes import tiny_config, tiny_model
from specter_lab.records import ExpertKey
from specter_lab.seam import ExpertsSeam

IDS = torch.arange(3, 19)[None]

# what is special -> a type that has it, with changes, and what the table must say of it
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "softmax over all, not normalised": ("qwen3_moe", {"norm_topk_prob": False}, {"router": "softmax, not normalised; top-k"}),
    "softmax over all, normalised": ("qwen3_moe", {"norm_topk_prob": True}, {"router": "softmax, normalised; top-k"}),
    "softmax over the chosen": ("granitemoe", {}, {"router": "softmax, normalised; top-k"}),
    "router weights in float32": ("mixtral", {}, {}),
    "groups by their best expert": (
        "deepseek_v2", {"topk_method": "group_limited_greedy"}, {"router": "softmax, not normalised; top-k in the best groups"},
    ),
    "sigmoid, correction bias and groups": (
        "deepseek_v3", {}, {"router": "sigmoid, normalised x 2.5; top-k in the best groups + correction bias"},
    ),
    "sigmoid without normalising": (
        "deepseek_v3", {"norm_topk_prob": False, "n_group": 1},
        {"router": "sigmoid, not normalised x 2.5; top-k + correction bias"},
    ),
    "sparsemixer": ("phimoe", {}, {"router": "sparsemixer: each expert by a softmax of its own; top-k"}),
    "biases, transposed, interleaved": ("gpt_oss", {}, {"layout": "gate and up, transposed, interleaved, biases, own gate"}),
    "transposed": ("aria_text", {}, {"layout": "gate and up, transposed"}),
    "no gate, sums in the weights' dtype": ("nemotron_h", {}, {"layout": "up only"}),
    "own gate (clamped)": ("deepseek_v4", {}, {"layout": "gate and up, own gate"}),
    "own gate (softcapped), sums in float32": ("inkling2_text", {}, {"layout": "gate and up, own gate"}),
    "own gate (HY)": ("hy_v4", {}, {"layout": "gate and up, own gate"}),
    "own gate (Beam)": ("beam", {}, {"layout": "gate and up, own gate"}),
    "own gate (MiniMax M3)": ("minimax_m3_vl_text", {}, {"layout": "gate and up, own gate"}),
    "shared experts with gates": ("qwen2_moe", {}, {"shared_experts": "gated"}),
    "shared experts that share the router's scale": (
        "inkling_text", {}, {"router": "sigmoid, normalised together with the shared experts; top-k + correction bias"},
    ),
    "dense first layers": ("glm4_moe", {}, {"dense_layers": True}),
    "experts narrower than the model": ("nemotron_h", {"moe_latent_size": 16}, {}),
    "compressed keys and values (MLA)": ("deepseek_v3", {"q_lora_rank": None}, {"cache": "Dynamic"}),
    "router on the layer, before its norm": ("gemma4_text", {}, {"router": "probabilities, normalised; top-k"}),
    "a router that hands on a state": ("zaya", {}, {"router": "softmax, not normalised; top-k + correction bias"}),
    "experts by token id": ("deepseek_v4", {"mlp_layer_types": ["hash_moe"] * 3}, {}),
}  # fmt: skip


def logits(moe: sl.MoE, ids: Tensor) -> Tensor:
    with moe, torch.no_grad(), moe.seam.serving(ResidentServer(moe.store, sl.SimulatedMachine(), "target", 0)):
        served: Tensor = moe.model(ids).logits
    return served


def exact(model: Any) -> sl.MoE:
    """Eager and offloaded, a row at a time (decoding) and many at once."""
    model.set_experts_implementation("eager")
    moe = sl.load_moe(model)
    for ids in (IDS, IDS[:, :1]):
        with torch.no_grad():
            own = model(ids).logits
        assert own.isfinite().all() and torch.equal(logits(moe, ids), own)
    return moe


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_offloaded_logits_are_the_eager_ones(family: str, dtype: torch.dtype) -> None:
    """Cases 16 and 50: each row of the table above, in both precisions."""
    model_type, changes, _ = FAMILIES[family]
    exact(tiny_model(model_type, dtype=dtype, **changes))


@pytest.mark.parametrize("family", [name for name, (_, _, facts) in FAMILIES.items() if facts])
def test_what_the_table_says_of_it(family: str) -> None:
    model_type, changes, facts = FAMILIES[family]
    row = examine(model_type, tiny_model(model_type, **changes))
    assert {name: getattr(row, name) for name in facts} == facts


def test_sums_are_in_the_dtype_that_the_eager_experts_use() -> None:
    """Most sum in the states' dtype; which don't is measured, not listed."""
    dtypes = {}
    for model_type in ("mixtral", "gpt_oss", "nemotron_h", "inkling2_text"):
        moe = sl.load_moe(tiny_model(model_type, dtype=torch.bfloat16))
        dtypes[model_type] = set(moe.seam.sum_dtypes.values())
    half, full = {torch.bfloat16}, {torch.float32}
    assert dtypes == {"mixtral": half, "gpt_oss": half, "nemotron_h": full, "inkling2_text": full}


def test_router_weights_are_used_as_they_come() -> None:
    """Mixtral's stay in float32 beside states in bfloat16 (multiplied first, rounded afterwards), Qwen's are rounded before."""
    for model_type, dtype in (("mixtral", torch.float32), ("qwen3_moe", torch.bfloat16)):
        moe = sl.load_moe(tiny_model(model_type, dtype=torch.bfloat16))
        with torch.no_grad(), moe.seam.probed() as calls:
            moe.model(IDS)
        assert {(states.dtype, weights.dtype) for states, _, weights in calls.values()} == {(torch.bfloat16, dtype)}


def test_layers_with_different_numbers_of_experts() -> None:
    """Case 52. Each layer has its own count, slots and bytes."""
    model = tiny_model("mixtral")
    for layer, count in enumerate((4, 8, 6)):
        block = model.model.layers[layer].mlp
        block.experts.num_experts = block.gate.num_experts = count
        for module in (block.experts, block.gate):
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(parameter[:count].detach().clone(), requires_grad=False))
    moe = exact(model)
    assert moe.geometry.experts == (4, 8, 6)
    own = moe.own_generate(IDS, max_new_tokens=8, do_sample=False)[0].tolist()
    drafter = sl.SelfDrafter(moe.quantize("qint8"))
    with sl.Pipeline(moe, drafter=drafter, predictor=sl.DraftLookahead(), slots=[1, 5, 6], machine=sl.SimulatedMachine()) as pipeline:
        assert list(pipeline.generate(IDS, max_new_tokens=8, do_sample=False).ids) == own
        assert pipeline.residency.slots == (1, 5, 6)


class Loose:
    def __init__(self, module: Any) -> None:
        self.module, self.served = module, []

    def serve(self, call: Any, compute: Any) -> None:
        self.served.append(call.needed)
        for expert in call.needed:
            compute(expert, {name: p.data[expert] for name, p in self.module._parameters.items()})


def alone(module: Any, rows: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, list[tuple[int, ...]]]:
    """An experts module without a model, through the seam."""
    seam, server = ExpertsSeam(nn.ModuleList([module])), Loose(module)
    with torch.no_grad(), seam.serving(server):
        return seam.run_layer(0, module, rows, ids, weights), server.served


def test_a_norm_after_the_experts() -> None:
    """Of a type that isn't a causal LM by name: the module alone."""
    from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts

    torch.manual_seed(0)
    config = tiny_config("muse_spark_text", moe_hidden_size=32)
    module = MuseSparkExperts(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    assert module.has_post_expert_norm
    rows, weights, ids = torch.randn(5, 32), torch.rand(5, 2), torch.tensor([[0, 3], [3, 1], [7, 2], [0, 1], [2, 3]])
    with torch.no_grad():
        assert torch.equal(alone(module, rows, ids, weights)[0], type(module).forward.__wrapped__(module, rows, ids, weights))
    assert accumulation_dtype(module, torch.float32, torch.float32) == torch.float32


@pytest.mark.parametrize("rows", [1, 3])
def test_skipped_experts_are_neither_served_nor_summed(rows: int) -> None:
    """An id past the last expert means "none": eager experts leave it out too."""
    module = tiny_model("mixtral").model.layers[0].mlp.experts
    states, weights = torch.randn(rows, 32, generator=torch.Generator().manual_seed(0)), torch.full((rows, 2), 0.5)
    ids = torch.tensor([[8, 3], [8, 8], [5, 8]])[:rows]
    out, served = alone(module, states, ids, weights)
    with torch.no_grad():
        assert torch.equal(out, type(module).forward.__wrapped__(module, states, ids, weights))
    assert served == [(3,) if rows == 1 else (3, 5)]


@pytest.mark.parametrize("rows", [1, 3])
def test_an_expert_chosen_twice_counts_twice(rows: int) -> None:
    """Hash routing may name the same expert at two ranks."""
    module = tiny_model("mixtral").model.layers[0].mlp.experts
    states, weights = torch.randn(rows, 32, generator=torch.Generator().manual_seed(0)), torch.tensor([[0.3, 0.7]] * rows)
    ids = torch.tensor([[4, 4], [1, 4], [4, 4]])[:rows]
    with torch.no_grad():
        assert torch.equal(alone(module, states, ids, weights)[0], type(module).forward.__wrapped__(module, states, ids, weights))


def test_weights_for_every_expert_are_read_at_the_chosen_ones() -> None:
    """Case 50. Some routers hand on (positions, experts) weights instead of (positions, experts_per_token)."""
    model = tiny_model("mixtral")
    moe = sl.load_moe(model)
    own = logits(moe, IDS)
    for router in moe.routers.modules:
        router.register_forward_hook(lambda _, args, out: (out[0], torch.zeros_like(out[0]).scatter(1, out[2], out[1]), out[2]))
    assert torch.equal(logits(moe, IDS), own)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "phimoe"])
def test_transformers_other_ways_to_compute_experts_agree(model_type: str, implementation: str) -> None:
    """Case 50: parity across eager, batched and grouped, up to rounding; the offloaded experts are the eager ones bit for bit."""
    moe = sl.load_moe(tiny_model(model_type))
    served = logits(moe, IDS)
    moe.model.set_experts_implementation(implementation)
    with torch.no_grad():
        assert torch.allclose(moe.model(IDS).logits, served, atol=1e-4)


def test_shared_experts_and_dense_layers_stay_where_they_are() -> None:
    """Case 52: never offloaded, never counted; a decoder layer's number is kept beside the number of the MoE layer."""
    moe = sl.load_moe(tiny_model("deepseek_v3", num_hidden_layers=4, first_k_dense_replace=2))
    g = moe.geometry
    assert (g.decoder_layers, g.dense_layers, g.experts) == ((2, 3), 2, (8, 8)) and g.shared_expert_bytes == 2 * 3 * 32 * 16 * 4
    own = moe.own_generate(IDS, max_new_tokens=6, do_sample=False, eos_token_id=None)[0].tolist()
    with sl.Pipeline(moe, slots=2, machine=sl.SimulatedMachine()) as pipeline, sl.RouterRecorder(moe) as recorder:
        shared = [p for name, p in moe.model.named_parameters() if "shared_experts" in name]
        assert len(shared) == 6 and not any(p.is_meta for p in shared)
        assert moe.store.nbytes == 2 * 8 * moe.store.blob_bytes(0) and moe.store.blob_bytes(0) == g.expert_bytes[0]
        run = pipeline.generate(IDS, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert list(run.ids) == own and recorder.log.decoder_layers == (2, 3)
    needs = run.trace.of_kind("need")
    assert set(needs["layer"]) == {0, 1} and needs["expert"].max() < 8
    assert needs[needs["step"] > 0].groupby(["step", "layer"]).size().max() == 2


def test_the_gate_half_and_the_up_half() -> None:
    """Case 53. Which half of the fused tensor is the gate: the wrong one would pass for a model, but not for this sum."""
    moe = sl.load_moe(tiny_model("mixtral"))
    weights = moe.tensors(ExpertKey(1, 3))
    row = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    gate, up = weights["gate_up_proj"].chunk(2)
    by_hand = (nn.functional.silu(row @ gate.T) * (row @ up.T)) @ weights["down_proj"].T
    out, _ = alone(moe.seam.modules[1], row, torch.tensor([[3]]), torch.ones(1, 1))
    assert torch.allclose(out, by_hand, atol=1e-5)


def test_a_router_that_needs_token_ids_says_so_outside_a_forward() -> None:
    moe = sl.load_moe(tiny_model("deepseek_v4"))
    with pytest.raises(ValueError, match=r"MoE layer 0 \(DeepseekV4HashRouter\) needs token ids, and no forward over 3 positions"):
        moe.route(0, torch.zeros(3, 32))
    assert moe.route(1, torch.zeros(3, 32)).shape == (3, 2)


def test_a_draft_through_a_loop_of_layers_has_all_experts_of_each() -> None:
    """Inkling 2's looping variant runs its middle layers three times a pass: six picks a token there."""
    moe = sl.load_moe(tiny_model("inkling2_loop_text"))
    picks: list[list[int]] = []

    class Watching(sl.DraftLookahead):
        def drafted(self, step: int, token: sl.DraftToken, horizon: int) -> Any:
            assert token.routing is not None
            picks.append([layer.shape[1] for layer in token.routing.experts])
            return super().drafted(step, token, horizon)

    own = moe.own_generate(IDS, max_new_tokens=8, do_sample=False)[0].tolist()
    with sl.Pipeline(moe, drafter=sl.SelfDrafter(moe.quantize("qint8")), predictor=Watching(), slots=2, machine=sl.SimulatedMachine()) as p:
        assert list(p.generate(IDS, max_new_tokens=8, do_sample=False).ids) == own
    assert picks and all(widths == [2, 6, 2] for widths in picks)
