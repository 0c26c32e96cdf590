"""The self-draft with copied weights: nothing shared, nothing left behind in the target, everything counted, also in a replay."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import specter_lab as sl
from specter_lab.cases import case_texts
from specter_lab.hardware import case_named
from specter_lab.speculate.copied import copy_without_experts
from tests.families import FAMILIES, tiny
from tests.invariants import check_trace

NEW = 24
PROMPT = torch.tensor([[3, 17, 5, 60, 9]])


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("attached", [True, False])
def test_tokens_are_the_targets_own(model_type, attached):
    """Copied from a target whose experts are in place, or out already."""
    moe = sl.load_moe(tiny(model_type))
    own = moe.own_generate(PROMPT, max_new_tokens=NEW, do_sample=False, eos_token_id=None)[0].tolist()
    if attached:
        moe.attach()
    drafter = sl.CopiedDrafter(moe, moe.quantize("qint8"))
    with sl.Pipeline(
        moe, drafter=drafter, predictor=sl.DraftLookahead(), draft_length=4, slots=3, machine=sl.SimulatedMachine(), poison=True
    ) as pipeline:
        done = pipeline.generate(PROMPT, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        check_trace(done.trace, pipeline.plan.slots, [moe.store.blob_bytes(layer) for layer in range(moe.layers)])
    assert list(done.ids) == own
    assert done.metrics["acceptance_rate"] > 0.7 and done.metrics["recall"] > 0.5
    if attached:
        moe.detach()
    assert moe.own_generate(PROMPT, max_new_tokens=NEW, do_sample=False, eos_token_id=None)[0].tolist() == own


@pytest.mark.parametrize("new", [120])
def test_the_drafts_cache_is_that_of_a_plain_run(new):
    moe = sl.load_moe(tiny("gpt_oss"))
    with moe:
        drafter = sl.CopiedDrafter(moe, moe.quantize("qint2"))
        with sl.Pipeline(moe, drafter=drafter, draft_length=5, slots=8, machine=sl.SimulatedMachine()) as pipeline:
            done = pipeline.generate(PROMPT, max_new_tokens=new, do_sample=False, eos_token_id=None)
            assert 0 < done.metrics["acceptance_rate"] < 1
            drafter.follower.rewind(done.ids)
            with torch.no_grad():
                plain = drafter.follower.run(input_ids=torch.tensor([drafter.follower.read]), use_cache=True).cache
            for mine, its in zip(drafter.follower.cache.layers, plain.layers, strict=True):
                assert mine.keys.shape == its.keys.shape and torch.allclose(mine.keys, its.keys, atol=1e-4)


def test_nothing_is_shared_and_the_bytes_are_those_that_count():
    moe = sl.load_moe(tiny("deepseek_v3"))
    watched = []
    moe.model.model.layers[1].register_forward_hook(lambda *_: watched.append(1))
    with moe:
        drafter = sl.CopiedDrafter(moe, moe.quantize("qint4"))
        mine = {t.data_ptr() for t in [*moe.model.parameters(), *moe.model.buffers()] if not t.is_meta}
        copied = [t for t in [*drafter.follower.model.parameters(), *drafter.follower.model.buffers()] if not t.is_meta]
        assert not mine & {t.data_ptr() for t in copied}
        assert sum(t.numel() * t.element_size() for t in copied) == drafter.weight_bytes == moe.geometry.non_expert_bytes
        with sl.Pipeline(moe, drafter=drafter, slots=2, context_length=64, machine=sl.SimulatedMachine()) as pipeline:
            device = pipeline.plan.device
            assert device.draft == drafter.bank.nbytes + moe.geometry.non_expert_bytes
            assert device.kv == 2 * 64 * moe.geometry.kv_bytes_per_token
            passes = pipeline.generate(PROMPT, max_new_tokens=8).metrics["steps"] + 1
    assert len(watched) == passes, "a hook on the target saw its copy"
    copy = weakref.ref(drafter.follower.model)
    del drafter, pipeline, copied
    gc.collect()
    assert copy() is None


def test_a_copy_of_a_copy_has_no_experts_either():
    twin = copy_without_experts(copy_without_experts(tiny("mixtral")))
    assert sum(p.is_meta for p in twin.parameters()) == 6 and not any(m._forward_hooks for m in twin.modules())


def test_a_model_of_another_target_is_refused():
    one, other = sl.load_moe(tiny("mixtral")), sl.load_moe(tiny("mixtral"))
    with pytest.raises(ValueError, match="made for one target"):
        sl.Pipeline(other, drafter=sl.CopiedDrafter(one, one.quantize("qint4")))


def test_residuals_are_rebuilt_beside_the_copys_codes():
    moe = sl.load_moe("tiny-moe")
    with moe:
        drafter = sl.CopiedDrafter(moe, moe.quantize("qint4"))
        with sl.Pipeline(moe, drafter=drafter, residual=True, slots=4, machine=sl.SimulatedMachine()) as pipeline:
            assert pipeline.residency.rebuilds
            assert pipeline.generate("Once upon a time", max_new_tokens=8).metrics["moved_mb_per_token"] > 0


def test_a_replay_counts_it_too():
    """At the memory of Specter's setting, what is there twice is paid with slots; where one a layer isn't left, it is refused."""
    case = case_named("ds_high")
    target = sl.ReplayTarget(case.model.geometry, case.model.name)
    options = {"memory": case.device_bytes + 144 * target.geometry.kv_bytes_per_token, "context_length": 144}
    plans = {}
    for separate in (False, True):
        with sl.baselines.specmoeoff_b1(target, separate=separate, machine=sl.SimulatedMachine(), **options) as pipeline:
            plans[separate] = pipeline.plan
            (text,) = case_texts(case, 1, 30)
            assert len(pipeline.replay(text, prompt_tokens=8, max_new_tokens=12).new_ids) == 12
    geometry = target.geometry
    assert plans[True].device.draft - plans[False].device.draft == geometry.non_expert_bytes
    assert plans[True].device.kv == 2 * plans[False].device.kv == 2 * 144 * geometry.kv_bytes_per_token
    assert sum(plans[False].slots) - sum(plans[True].slots) == pytest.approx(
        (geometry.non_expert_bytes + 144 * geometry.kv_bytes_per_token) / geometry.expert_bytes[0], abs=1
    )
    low = case_named("ds_low")
    with pytest.raises(sl.BudgetError, match="doesn't fit"):
        sl.plan_memory(low, "specmoeoff_b1", context_length=144)
