"""A draft from another model: exact tokens whatever it proposes, a cache that follows the text, refusals that say what to do.

Cases 36, 37, 40, 42, 43, 44, 45 and 69.
"""

from __future__ import annotations

import copy
import gc
import json
import weakref

import pytest
import torch
from transformers import AutoTokenizer, DynamicCache

import specter_lab as sl
from specter_lab.recipes import tiny_model
from tests.families import tiny
from tests.invariants import check_trace

NEW = 24
PROMPT = torch.tensor([[3, 17, 5, 60, 9, 17, 5]])


@pytest.fixture(scope="module")
def moe():
    return sl.load_moe(tiny("mixtral"))


@pytest.fixture(scope="module")
def own(moe):
    return tuple(moe.own_generate(PROMPT, max_new_tokens=NEW, do_sample=False, eos_token_id=None)[0, PROMPT.shape[1] :].tolist())


@pytest.fixture(scope="module")
def attached(moe, own):
    with moe:
        yield moe


def nearly(noise=0.002, vocabulary=97, **changes):
    """The target with a little noise, and more rows of the vocabulary (all very probable) or fewer."""
    model, like = tiny("mixtral", vocab_size=vocabulary, **changes), tiny("mixtral")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for ours, its in zip(model.parameters(), like.parameters(), strict=True):
            rows = min(len(ours), len(its))
            ours[:rows] = its[:rows] + noise * torch.randn(its[:rows].shape, generator=generator)
        if vocabulary > 97:
            model.lm_head.weight[97:] = 50 * model.lm_head.weight[:1]
            model.lm_head.weight[98] *= -1
    return model


def opposite():
    """Proposes what the target likes least."""
    model = nearly(noise=0)
    model.lm_head.weight.data.neg_()
    return model


DRAFTS = {
    "dense": lambda: tiny("llama"),
    "dense with learned positions": lambda: tiny("gpt2", n_positions=256),
    "dense, sliding windows (43)": lambda: tiny("mistral", sliding_window=7),
    "a MoE of the same family": lambda: nearly(),
    "a MoE of another family": lambda: tiny("qwen2_moe"),
    "bfloat16": lambda: nearly().to(torch.bfloat16),
    "a bigger vocabulary (40)": lambda: nearly(vocabulary=128),
    "a smaller vocabulary (40)": lambda: nearly(vocabulary=80),
    "always wrong (45)": opposite,
}


def run(moe, drafter, new=NEW, machine=None, prompt=PROMPT, predictor=None, **options):
    with sl.Pipeline(
        moe, drafter=drafter, predictor=predictor, draft_length=4, slots=3, machine=machine or sl.SimulatedMachine(), poison=True
    ) as pipeline:
        done = pipeline.generate(prompt, max_new_tokens=new, **{"do_sample": False, "eos_token_id": None, **options})
        check_trace(done.trace, pipeline.plan.slots, [moe.store.blob_bytes(layer) for layer in range(moe.layers)])
    return done


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("machine", ["simulated", "throttled"])
def test_tokens_are_the_targets_own(attached, own, kind, machine):
    drafter = sl.SeparateDrafter(DRAFTS[kind](), attached)
    done = run(attached, drafter, machine=sl.SimulatedMachine() if machine == "simulated" else sl.ThrottledMachine(5.0))
    assert done.new_ids == own
    metrics, draft = done.metrics, done.trace.events.query("lane == 'draft'")
    assert metrics["draft_ms_per_token"] > 0 and {"attention", "head"} <= set(draft["kind"])
    assert ("expert" in set(draft["kind"])) == bool(drafter.follower.experts)
    if kind.startswith(("a MoE of the same", "a bigger", "bfloat16")):
        assert metrics["acceptance_rate"] > 0.3, "a draft like the target must be accepted often"
    if kind.startswith("always wrong"):
        assert metrics["acceptance_rate"] == 0


@pytest.mark.parametrize("kind", ["mixtral", "sliding"])
@pytest.mark.parametrize("right", [True, False], ids=["all accepted", "all rejected"])
def test_the_drafts_cache_is_that_of_a_plain_run(kind, right):
    """Cases 43 and 45: 120 tokens, then the draft's cache, wound back to the text, against one plain reading of the text."""
    changes = {"sliding_window": 7} if kind == "sliding" else {}
    moe = sl.load_moe(tiny("mixtral", **changes))
    draft = copy.deepcopy(moe.model)
    if not right:
        draft.lm_head.weight.data.neg_()
    own = moe.own_generate(PROMPT, max_new_tokens=120, do_sample=False, eos_token_id=None)[0].tolist()
    drafter = sl.SeparateDrafter(draft, moe)
    with sl.Pipeline(moe, drafter=drafter, draft_length=5, slots=3, machine=sl.SimulatedMachine()) as pipeline:
        done = pipeline.generate(PROMPT, max_new_tokens=120, do_sample=False, eos_token_id=None)
        assert list(done.ids) == own and done.metrics["acceptance_rate"] == float(right)
        drafter.follower.rewind(own)
        read = drafter.follower.read
        assert len(own) - 8 <= len(read) < len(own) and read == own[: len(read)]
        with torch.no_grad():
            plain = draft(input_ids=torch.tensor([read]), use_cache=True, cache=DynamicCache(config=draft.config)).cache
        for mine, its in zip(drafter.follower.cache.layers, plain.layers, strict=True):
            assert mine.keys.shape == its.keys.shape and mine.get_seq_length() == its.get_seq_length()
            assert torch.allclose(mine.keys, its.keys, atol=1e-4) and torch.allclose(mine.values, its.values, atol=1e-4)
    assert drafter.follower.cache is None and drafter.follower.read == []


def test_each_draft_token_says_where_it_was_routed(attached, own):
    """A draft of the same family carries routing as SelfDrafter does: recall and prefetches, with the plain predictors too."""
    done = run(attached, sl.SeparateDrafter(nearly(), attached), predictor=sl.DraftLookahead())
    assert done.new_ids == own and done.metrics["recall"] > 0.5
    assert "prefetch" in set(done.trace.of_kind("transfer")["reason"])


def test_predictors_that_read_no_routing_go_with_any_draft(attached, own):
    log = type("Log", (), {"experts": torch.zeros(40, 3, 2, dtype=torch.long)})()
    for predictor in (None, sl.NextLayerGate(attached), sl.ActivationAware([log], 8), sl.Oracle(log)):
        assert run(attached, sl.SeparateDrafter(tiny("llama"), attached), predictor=predictor).new_ids == own


@pytest.mark.parametrize("predictor", [sl.DraftLookahead, sl.ChunkedLookahead, sl.CutoffLookahead])
@pytest.mark.parametrize(
    ("kind", "why"),
    [("dense", r"\(llama\) is dense"), ("a MoE of another family", r"\(qwen2_moe, 3 MoE layers of 8 experts\) is of another")],
)
def test_lookahead_with_a_draft_of_another_family_is_refused(attached, predictor, kind, why):
    """Case 69: up front, with the rule, both models and the way out."""
    drafter = sl.SeparateDrafter(DRAFTS[kind](), attached)
    with pytest.raises(ValueError, match=rf"reads the draft's routing.* 'separate draft .*{why}.* Use SelfDrafter, or another predictor"):
        sl.Pipeline(attached, drafter=drafter, predictor=predictor(), machine=sl.SimulatedMachine())


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda moe: sl.SeparateDrafter(moe.model, moe), ValueError, "is the target itself. Use SelfDrafter"),
        (lambda moe: sl.SeparateDrafter(tiny("llama").train(), moe), ValueError, r"training mode\. Call model\.eval\(\)"),
        (lambda moe: sl.SeparateDrafter(tiny("llama").to("meta"), moe), ValueError, "tensors of .* on the meta device"),
        (lambda moe: sl.SeparateDrafter(tiny("llama"), moe, dtype="bfloat16"), TypeError, r"got \{'dtype': 'bfloat16'\} .*\.to\(\)"),
        (lambda moe: sl.SeparateDrafter(tiny_model("qwen3_next"), moe), ValueError, "can't be rolled back.*says that it can't"),
        (lambda moe: sl.SeparateDrafter("no/such/folder/anywhere", moe), OSError, "no/such/folder/anywhere"),
    ],
)
def test_drafts_that_cannot_be_are_refused(attached, build, error, message):
    """Case 44 among them: a recurrent state can't be taken back."""
    with pytest.raises(error, match=message):
        build(attached)


def test_a_drafter_of_another_target_is_refused(attached):
    drafter = sl.SeparateDrafter(tiny("llama"), attached)
    other = sl.load_moe(tiny("mixtral"))
    with pytest.raises(ValueError, match="made for one target"):
        sl.Pipeline(other, drafter=drafter, machine=sl.SimulatedMachine())
    assert not other.seam.attached


def test_what_the_draft_cannot_read_it_does_not_read(attached, own):
    """Ids past its vocabulary in the prompt, first, last and all of it; a sliding draft starts over where it must."""
    for changes in ({}, {"sliding_window": 7}):
        drafter = sl.SeparateDrafter(nearly(vocabulary=50, **changes), attached)
        for prompt in ([[96, 3, 4, 5]], [[3, 4, 5, 96]], [[3, 96, 4, 95, 94]], [[95, 96]]):
            ids = torch.tensor(prompt)
            plain = run(attached, None, prompt=ids)
            assert run(attached, drafter, prompt=ids).new_ids == plain.new_ids


def test_a_draft_with_fewer_positions_than_the_text_stops_drafting(attached, own):
    done = run(attached, sl.SeparateDrafter(tiny("gpt2", n_positions=16), attached))
    assert done.new_ids == own
    lengths = done.trace.of_kind("draft_length")["value"].tolist()
    assert lengths[0] > 0 and lengths[-1] == 0


def test_no_token_too_many_and_none_after_the_end(attached, own):
    """Cases 36 and 37: an accepted end token in the middle of a block, and fewer tokens asked than drafted."""
    drafter = sl.SeparateDrafter(nearly(noise=0), attached)
    for end in sorted(set(own)):
        assert run(attached, drafter, eos_token_id=[end]).new_ids == own[: own.index(end) + 1]
    for new in (1, 2, 3):
        assert run(attached, drafter, new=new).new_ids == own[:new]


@pytest.mark.parametrize("layer_calls", [1, 4, 9])
def test_an_interrupt_in_the_draft_leaves_both_usable(attached, own, layer_calls):
    draft = nearly()
    drafter = sl.SeparateDrafter(draft, attached)
    left = [layer_calls]

    def interrupting(*_):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    handle = draft.model.layers[1].register_forward_hook(interrupting)
    with sl.Pipeline(attached, drafter=drafter, draft_length=4, slots=3, machine=sl.ThrottledMachine(5.0), poison=True) as pipeline:
        with pytest.raises(KeyboardInterrupt):
            pipeline.generate(PROMPT, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        handle.remove()
        assert not draft.model.layers[1].mlp.experts._forward_hooks
        assert pipeline.generate(PROMPT, max_new_tokens=NEW, do_sample=False, eos_token_id=None).new_ids == own
        other = torch.tensor([[8, 9, 10]])  # nothing of a request stays for the next
        again = pipeline.generate(other, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    assert again.new_ids == run(attached, None, prompt=other).new_ids


def test_closing_gives_up_the_draft(attached):
    pipeline = sl.Pipeline(attached, drafter=sl.SeparateDrafter(tiny("llama"), attached), machine=sl.SimulatedMachine())
    pipeline.generate(PROMPT, max_new_tokens=4)
    model, cache = weakref.ref(pipeline.drafter.follower.model), weakref.ref(pipeline.drafter.follower.cache)
    pipeline.close()
    pipeline.close()
    gc.collect()
    assert cache() is None and model() is None and "closed" in repr(pipeline)


def test_weights_and_cache_count_as_device_memory(attached):
    draft = tiny("llama")
    drafter = sl.SeparateDrafter(draft, attached)
    weights = sum(p.numel() * 4 for p in draft.parameters()) + sum(b.numel() * b.element_size() for b in draft.buffers())
    kv = 3 * 2 * 2 * 16 * 4  # layers x (key, value) x heads x size x bytes
    assert (drafter.weight_bytes, drafter.kv_bytes_per_token) == (weights, kv)
    with (
        sl.Pipeline(attached, memory="1MB", context_length=64) as without,
        sl.Pipeline(attached, drafter=drafter, memory="1MB", context_length=64) as pipeline,
    ):
        plain, plan = without.plan.device, pipeline.plan.device
        assert (plan.draft, plan.kv - plain.kv) == (weights, 64 * kv)
        assert sum(pipeline.plan.slots) < sum(without.plan.slots) and plan.total <= 1_000_000
        assert sl.plan_memory(attached, pipeline, "1MB", context_length=64) == pipeline.plan
        build = lambda target, **options: sl.Pipeline(target, drafter=sl.SeparateDrafter(draft, target), **options)  # noqa: E731
        assert sl.plan_memory(attached, build, "1MB", context_length=64).device.draft == weights
    with pytest.raises(ValueError, match="doesn't fit"):
        sl.plan_memory(attached, build, weights)


def test_a_draft_is_loaded_by_name_in_its_own_dtype():
    target = sl.load_moe("tiny-moe", dtype="float32")
    drafter = sl.SeparateDrafter("tiny-moe", target, dtype="bfloat16")
    prompt = target.tokenizer("Once upon a time", return_tensors="pt").input_ids
    own = target.own_generate(prompt, max_new_tokens=NEW, do_sample=False)[0].tolist()
    with sl.Pipeline(target, drafter=drafter, predictor=sl.DraftLookahead(), slots=6, machine=sl.SimulatedMachine()) as pipeline:
        done = pipeline.generate(prompt, max_new_tokens=NEW, do_sample=False)
    assert list(done.ids) == own and done.metrics["acceptance_rate"] > 0.8 and done.metrics["recall"] > 0.7
    assert "bfloat16" in done.conditions["drafter"]


def renumbered(folder, model, seed=0):
    """The bundled tokenizer with other ids for the same tokens, and a model whose rows follow them."""
    text = json.loads((sl.bundled_model() / "tokenizer.json").read_text("utf-8"))
    order = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(2047, generator=torch.Generator().manual_seed(seed))])
    text["model"]["vocab"] = {token: int(order[number]) for token, number in text["model"]["vocab"].items()}
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text((sl.bundled_model() / name).read_text("utf-8"), "utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(text), "utf-8")
    rows = model.get_input_embeddings().weight.data
    rows[order] = rows.clone()  # tied: these are the head's rows too
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("sampling", [False, True])
def test_the_same_tokens_under_other_ids_are_mapped(tmp_path, fresh_tiny_model, sampling):
    """The target itself, renumbered, is accepted as if it weren't, and its probabilities arrive under the target's ids."""
    target = sl.load_moe("tiny-moe", dtype="float32")
    draft = fresh_tiny_model()
    tokenizer = renumbered(tmp_path, draft)
    assert tokenizer("Once upon a time").input_ids != target.tokenizer("Once upon a time").input_ids
    prompt = target.tokenizer("Once upon a time", return_tensors="pt").input_ids
    own = target.own_generate(prompt, max_new_tokens=NEW, do_sample=False)[0].tolist()
    drafter = sl.SeparateDrafter(draft, target, tokenizer=tokenizer)
    with sl.Pipeline(target, drafter=drafter, draft_length=4, slots=6, machine=sl.SimulatedMachine()) as pipeline:
        done = pipeline.generate(prompt, max_new_tokens=NEW, do_sample=sampling, seed=3)
    assert done.metrics["acceptance_rate"] > 0.99
    assert sampling or list(done.ids) == own


def test_another_tokenizer_is_refused_by_name(tmp_path, fresh_tiny_model):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    target = sl.load_moe("tiny-moe", dtype="float32")
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0, "once": 1, "upon": 2}, unk_token="<unk>")))
    with pytest.raises(
        ValueError, match=r"lacks 2,047 of the 2,048 tokens of tiny-moe .* first that differs is id 1, '!'\. Use a draft with"
    ):
        sl.SeparateDrafter(fresh_tiny_model(), target, tokenizer=words)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("there", "here"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_draft_and_target_on_different_devices(there, here):
    """Case 42. A draft elsewhere takes no memory of the target's device."""
    target = sl.load_moe(tiny("mixtral").to(there))
    prompt = PROMPT.to(there)
    own = target.own_generate(prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=None)[0].tolist()
    drafter = sl.SeparateDrafter(nearly().to(here), target)
    assert (drafter.weight_bytes > 0) == (there == here)
    with sl.Pipeline(target, drafter=drafter, predictor=sl.DraftLookahead(), slots=3, machine=sl.SimulatedMachine()) as pipeline:
        assert list(pipeline.generate(prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=None).ids) == own
        sampled = pipeline.generate(prompt, max_new_tokens=NEW, do_sample=True, seed=0, eos_token_id=None)
        assert len(sampled.new_ids) == NEW
