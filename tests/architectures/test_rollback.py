"""Taking drafts back: after 200 tokens the cache is what plain decoding leaves, whatever was drafted on the way.

Cases 43, 44 and 45: windows shorter than the text (Mistral-, Gemma- and gpt-oss-like), convolutions, compressed and indexed
keys; recurrent state, which nothing can take back, is refused.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import specter_lab as sl
from specter_lab.probe import cache_state
from specter_lab.recipes import tiny_model
from tests.drafters import Knowing

NEW = 200
CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "sliding everywhere (Mistral-like)": ("mixtral", {"sliding_window": 7}),
    "sliding and full (Gemma-like)": ("gemma4_text", {"sliding_window": 6}),
    "sliding and full with sinks (gpt-oss)": ("gpt_oss", {"sliding_window": 8}),
    "compressed (MLA)": ("deepseek_v3", {}),
    "with an indexer's keys": ("axk2", {}),
    "with block indices": ("minimax_m3_vl_text", {}),
    "with convolutions": ("lfm2_moe", {}),
    "with convolutions and windows": ("inkling_text", {}),
    "layers that share another's keys": ("gemma4_text", {"num_kv_shared_layers": 1, "num_hidden_layers": 4,
                                                         "layer_types": ["sliding_attention", "full_attention"] * 2}),
}  # fmt: skip
DRAFTED = {"all rejected": (0, 3), "all accepted": (5, 5), "some of both": (2, 4), "longer than the window": (3, 9)}


MIXED = ("sliding everywhere (Mistral-like)", "sliding and full with sinks (gpt-oss)", "with convolutions and windows")
CASES = [(kind, drafted) for kind in CACHES for drafted in DRAFTED if drafted.startswith("all") or kind in MIXED]


@functools.cache
def plain(kind: str, prompt_tokens: int, new: int = NEW) -> tuple[sl.MoE, Tensor, tuple[int, ...], dict[str, Any]]:
    """The model, a prompt, its own tokens, and everything its own generate leaves in the cache."""
    model_type, changes = CACHES[kind]
    moe = sl.load_moe(tiny_model(model_type, **changes))
    prompt = torch.arange(3, 3 + prompt_tokens)[None]
    out: Any = moe.own_generate(prompt, max_new_tokens=new, do_sample=False, eos_token_id=None, return_dict_in_generate=True)
    return moe, prompt, tuple(out.sequences[0, prompt_tokens:].tolist()), dict(cache_state(out.cache, "cache"))


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Where two caches differ by more than rounding; how a layer takes note of the past may differ."""

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.shape == b.shape and torch.allclose(a, b, atol=1e-3, rtol=1e-3)
        return bool(a == b)

    names = {name for name in {**one, **other} if not name.endswith(("record_past", "_is_user_defined"))}
    return sorted(name for name in names if not same(one.get(name), other.get(name)))


@pytest.mark.parametrize(("kind", "drafted"), CASES)
def test_the_cache_ends_as_plain_decoding_leaves_it(kind: str, drafted: str) -> None:
    """Case 43. The prompt is shorter than the window for some, longer for others; the output always slides."""
    right, length = DRAFTED[drafted]
    new = NEW if drafted.startswith("all") else 60
    moe, prompt, own, cache = plain(kind, 3 if right else 11, new)
    drafter = Knowing(own, prompt.shape[1], right, moe.geometry.vocab_size)
    with sl.Pipeline(moe, drafter=drafter, draft_length=length, slots=8, machine=sl.SimulatedMachine()) as pipeline:
        out = moe.model.generate(
            prompt, custom_generate=pipeline, max_new_tokens=new, do_sample=False, eos_token_id=None, return_dict_in_generate=True
        )
        assert pipeline.last is not None and pipeline.last.metrics["acceptance_rate"] == pytest.approx(
            min(right, length) / length, abs=0.02
        )
    assert tuple(out.sequences[0, prompt.shape[1] :].tolist()) == own
    assert differences(dict(cache_state(out.cache, "cache")), cache) == []


@pytest.mark.parametrize("kind", ["sliding and full with sinks (gpt-oss)", "with an indexer's keys"])
def test_a_quantized_draft_leaves_no_trace(kind: str) -> None:
    """Scratch entries of the draft's own experts go too."""
    moe, prompt, own, cache = plain(kind, 11, 60)
    with sl.Pipeline(
        moe, drafter=sl.SelfDrafter(moe.quantize("qint2")), draft_length=4, slots=8, machine=sl.SimulatedMachine()
    ) as pipeline:
        out = moe.model.generate(
            prompt, custom_generate=pipeline, max_new_tokens=60, do_sample=False, eos_token_id=None, return_dict_in_generate=True
        )
        assert pipeline.last is not None and 0 < pipeline.last.metrics["acceptance_rate"] < 1
    assert tuple(out.sequences[0, 11:].tolist()) == own
    assert differences(dict(cache_state(out.cache, "cache")), cache) == []


def test_without_a_drafter_a_recurrent_state_is_the_models_own() -> None:
    moe = sl.load_moe(tiny_model("qwen3_next"))
    prompt = torch.arange(3, 9)[None]
    options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    own: Any = moe.own_generate(prompt, **options)
    with sl.Pipeline(moe, slots=2, machine=sl.SimulatedMachine()) as pipeline:
        out = moe.model.generate(prompt, custom_generate=pipeline, **options)
    assert torch.equal(out.sequences, own.sequences)
    assert differences(dict(cache_state(out.cache, "cache")), dict(cache_state(own.cache, "cache"))) == []


@pytest.mark.parametrize("model_type", ["qwen3_next", "granitemoehybrid", "jamba", "nemotron_h", "minimax", "zaya"])
def test_a_state_that_cannot_be_taken_back_is_refused(model_type: str) -> None:
    """Case 44."""
    moe = sl.load_moe(tiny_model(model_type))
    with pytest.raises(ValueError, match=r"Rejected drafts are taken back .* says that it can't\. Leave out the drafter \(prompt lookup\)"):
        sl.Pipeline(moe, drafter=sl.PromptLookupDrafter())
    assert not moe.seam.attached


def test_a_cache_that_only_says_it_can_be_taken_back_is_found_out() -> None:
    """Case 44. DeepSeek-V4's layers inherit a yes from sliding ones, but their compressors keep what they read."""
    moe = sl.load_moe(tiny_model("deepseek_v4"))
    with torch.no_grad():
        assert moe.model(torch.tensor([[3, 4]]), use_cache=True).cache.is_croppable
    assert "keeps traces" in moe.rollback
    with pytest.raises(ValueError, match="keeps traces of them"):
        sl.Pipeline(moe, drafter=sl.PromptLookupDrafter())


def test_a_users_own_cache_is_refused_and_left_alone() -> None:
    moe = sl.load_moe(tiny_model("mixtral"))
    mine = DynamicCache(config=moe.model.config)
    with torch.no_grad():
        moe.model(torch.tensor([[3, 4, 5]]), cache=mine, use_cache=True)
    before = dict(cache_state(mine, "cache"))
    with sl.Pipeline(moe, machine=sl.SimulatedMachine()) as pipeline:
        for name in ("cache", "past_key_values"):
            with pytest.raises(ValueError, match=f"{name}=.* Leave it out: each request has a cache of its own"):
                pipeline.generate([3, 4, 5, 6], **{name: mine})
        with pytest.raises(ValueError, match="of its own; got a DynamicCache of 3 tokens"):
            moe.model.generate(torch.tensor([[3, 4, 5, 6]]), custom_generate=pipeline, cache=mine, max_new_tokens=4)
    assert differences(before, dict(cache_state(mine, "cache"))) == []
