"""Case 38: in half precision a run may leave plain greedy, but only where two tokens are as near as rounding is large."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import specter_lab as sl
from specter_lab.recipes import tiny_model

TYPES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe", "phimoe")


@functools.cache
def moe(model_type: str, dtype: torch.dtype) -> sl.MoE:
    return sl.load_moe(tiny_model(model_type, dtype=dtype))


def generate(target: sl.MoE, prompt: str | list[int], **options: object) -> sl.Generation:
    drafter = sl.SelfDrafter(target.quantize("qint4"))
    with sl.Pipeline(target, drafter=drafter, draft_length=5, slots=4, machine=sl.SimulatedMachine()) as pipeline:
        return pipeline.generate(prompt, **{"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, **options})


@pytest.mark.parametrize("model_type", TYPES)
def test_in_float32_there_is_none(model_type: str) -> None:
    target = moe(model_type, torch.float32)
    found = sl.divergence(target, [5, 6, 7], generate(target, [5, 6, 7]))
    assert found.position is None and found.explained and found.rounding < 1e-4
    assert repr(found) == "Divergence(none in 30 tokens)"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("model_type", TYPES)
def test_in_half_precision_each_is_within_rounding(model_type: str, dtype: torch.dtype) -> None:
    """Case 38. The rule: where they part, the margin is at most twice the largest difference that the number of rows makes."""
    target = moe(model_type, dtype)
    found = sl.divergence(target, [20, 21, 22], generate(target, [20, 21, 22]))
    assert found.explained, repr(found)
    assert found.position is None or 0 <= found.top2_margin <= found.margin


def test_the_bundled_model_in_bfloat16() -> None:
    """Trained weights: here a run does part from plain greedy on some computers (the second prompt, on AVX-512 with bf16)."""
    target = sl.load_moe("tiny-moe", dtype="bfloat16")
    with target:
        for prompt in [prompt.text for prompt in sl.load_prompts(per_kind=3)][:2]:
            found = sl.divergence(target, prompt, generate(target, prompt, max_new_tokens=20))
            assert found.explained, repr(found)
            assert found.position is None or found.verify_shaped_agrees or found.margin <= 2 * found.rounding


def test_the_rule() -> None:
    near = sl.Divergence(40, 17, 1385, 288, margin=0.03, top2_margin=0.03, rounding=0.375)
    assert near.explained and "margin 0.03, logits differ by up to 0.375" in repr(near) and "NOT" not in repr(near)
    far = dataclasses.replace(near, margin=0.8)
    assert not far.explained and "NOT explained by rounding" in repr(far)
    assert sl.Divergence(40).explained


def test_a_wrong_token_is_not_explained() -> None:
    target = moe("mixtral", torch.bfloat16)
    run = generate(target, [5, 6, 7])
    wrong = list(run.ids)
    wrong[3 + 12] = (wrong[3 + 12] + 1) % 64
    found = sl.divergence(target, [5, 6, 7], dataclasses.replace(run, ids=tuple(wrong), new_ids=tuple(wrong[3:])))
    assert (found.position, found.run_token) == (12, wrong[3 + 12])
    assert not found.explained and not found.verify_shaped_agrees and "NOT explained" in repr(found)


def test_it_works_while_the_experts_are_out_and_leaves_things_as_they_were() -> None:
    target = moe("mixtral", torch.bfloat16)
    run = generate(target, [5, 6, 7])
    before = target.model.config._experts_implementation
    loose = sl.divergence(target, [5, 6, 7], run)
    assert target.model.config._experts_implementation == before
    with target:
        assert sl.divergence(target, [5, 6, 7], run) == loose


def test_other_prompts_and_sampled_runs_are_refused() -> None:
    target = moe("mixtral", torch.bfloat16)
    run = generate(target, [5, 6, 7])
    with pytest.raises(ValueError, match="Give the prompt that the run was made with"):
        sl.divergence(target, [5, 6, 8], run)
    with pytest.raises(ValueError, match="this one sampled"):
        sl.divergence(target, [5, 6, 7], generate(target, [5, 6, 7], do_sample=True, seed=3))
