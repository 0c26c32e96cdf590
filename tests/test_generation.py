"""``Pipeline.generate`` takes what the model's own ``generate`` takes, and gives the same; so does ``custom_generate=pipeline``.

Cases 32, 34, 36 and 37: processors on draft and target alike, several end tokens anywhere in a block, never a token too many.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

import specter_lab as sl
from specter_lab import request
from specter_lab.recipes import tiny_model
from tests.drafters import Knowing

NEW = 16
PROMPT = [9, 21, 17, 30, 9, 21]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return sl.load_moe("tiny-moe").tokenizer


@pytest.fixture(scope="module")
def moe(tokenizer: Any) -> sl.MoE:
    return sl.load_moe(tiny_model("mixtral", vocab_size=2048), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def bank(moe: sl.MoE) -> sl.ExpertBank:
    return moe.quantize("qint4")


def speculate(moe: sl.MoE, bank: sl.ExpertBank, **pieces: Any) -> sl.Pipeline:
    return sl.baselines.lookahead(moe, bank=bank, slots=8, draft_length=4, machine=sl.SimulatedMachine(), **pieces)


class Only(LogitsProcessor):
    """A user's own: tokens of the other parity than the last one."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(torch.arange(scores.shape[1]) % 2 == input_ids[:, -1:] % 2, -torch.inf)


GREEDY: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.3},
    "no repeated pairs": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[5], [9, 21]]},
    "suppressed": {"suppress_tokens": list(range(0, 2048, 3))},
    "suppressed at the beginning": {"begin_suppress_tokens": list(range(1024))},
    "at least so many": {"min_new_tokens": 6, "eos_token_id": list(range(1000))},
    "sequence bias": {"sequence_bias": [[[7], 3.0], [[7, 8], -2.0]]},
    "forced end": {"forced_eos_token_id": 11},
    "ever likelier to end": {"exponential_decay_length_penalty": (2, 3.0), "eos_token_id": 5},
    "allowed tokens": {"prefix_allowed_tokens_fn": lambda batch, ids: [(int(ids[-1]) * 3) % 2048, (int(ids[-1]) + 1) % 2048]},
    "a processor of one's own": {"logits_processor": LogitsProcessorList([Only()])},
    "watermark": {"watermarking_config": {"bias": 4.0, "seeding_scheme": "selfhash", "greenlist_ratio": 0.5}},
    "a config": {"generation_config": GenerationConfig(max_new_tokens=9, repetition_penalty=1.2, do_sample=False, eos_token_id=[3, 4])},
    "max_length": {"max_length": 13, "max_new_tokens": None},
    "one token": {"max_new_tokens": 1},
}


@pytest.mark.parametrize("kind", GREEDY)
def test_greedy_with_processors_is_the_models_own(moe: sl.MoE, bank: sl.ExpertBank, kind: str) -> None:
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": NEW, **GREEDY[kind]}
    if "generation_config" in options:
        options = GREEDY[kind]
    own = moe.own_generate(torch.tensor([PROMPT]), **options)[0].tolist()
    with speculate(moe, bank) as pipeline:
        run = pipeline.generate(PROMPT, **options)
        assert moe.model.generate(torch.tensor([PROMPT]), custom_generate=pipeline, **options)[0].tolist() == own
        assert pipeline.last is not None and pipeline.last.ids == run.ids
    assert list(run.ids) == own
    assert run.metrics["steps"] < len(run.new_ids) or len(run.new_ids) < 4, "nothing was speculated"


def test_scores_and_logits_are_the_models_own(moe: sl.MoE, bank: sl.ExpertBank) -> None:
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "repetition_penalty": 1.3, "eos_token_id": None}
    own: Any = moe.own_generate(torch.tensor([PROMPT]), output_scores=True, output_logits=True, return_dict_in_generate=True, **options)
    with speculate(moe, bank) as pipeline:
        run = pipeline.generate(PROMPT, output_scores=True, output_logits=True, **options)
        assert pipeline.generate(PROMPT, **options).scores is None
    for got, expected in ((run.scores, own.scores), (run.logits, own.logits)):
        assert got is not None and len(got) == len(expected) == NEW
        assert all(g.shape == e.shape and torch.allclose(g, e, atol=1e-4) for g, e in zip(got, expected, strict=True))


def test_a_criterion_that_reads_scores(moe: sl.MoE, bank: sl.ExpertBank) -> None:
    seen = []

    class Counting(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            seen.append((input_ids.shape[1], None if scores is None else len(scores)))
            return torch.tensor([input_ids.shape[1] >= 6 + 7])

    with speculate(moe, bank) as pipeline:
        criteria = StoppingCriteriaList([Counting()])
        run = pipeline.generate(
            PROMPT, max_new_tokens=NEW, do_sample=False, eos_token_id=None, stopping_criteria=criteria, output_scores=True
        )
    assert len(run.new_ids) == 7 and seen == [(6 + n, n) for n in range(1, 8)]


@pytest.mark.parametrize("right", [0, 2, 4])
def test_the_first_of_several_end_tokens_in_a_block_ends_it(moe: sl.MoE, right: int) -> None:
    """Case 36. Output, scores and stream stop there; drafts past it, right or wrong, are never seen."""
    own = tuple(moe.own_generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)[0, 6:].tolist())
    drafter = Knowing(own, 6, right, 2048)
    with sl.Pipeline(moe, drafter=drafter, draft_length=4, slots=8, machine=sl.SimulatedMachine()) as pipeline:
        for end in sorted({own.index(token) for token in own}):
            streamer = Collector()
            run = pipeline.generate(
                PROMPT, max_new_tokens=NEW, do_sample=False, eos_token_id=[own[end], 2047], streamer=streamer, output_scores=True
            )
            assert run.new_ids == own[: end + 1] and run.scores is not None and len(run.scores) == end + 1
            assert streamer.tokens == [*PROMPT, *own[: end + 1]] and streamer.ended == 1


class Collector(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("length", [1, 3, 50])
@pytest.mark.parametrize("new", [1, 2, 3])
def test_never_a_token_too_many(moe: sl.MoE, new: int, length: int) -> None:
    """Case 37: drafts longer than what is left, all right or all wrong."""
    own = tuple(moe.own_generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)[0, 6:].tolist())
    for right in (0, 50):
        drafter = Knowing(own, 6, right, 2048)
        with sl.Pipeline(moe, drafter=drafter, draft_length=length, slots=8, machine=sl.SimulatedMachine()) as pipeline:
            assert pipeline.generate(PROMPT, max_new_tokens=new, do_sample=False, eos_token_id=None).new_ids == own[:new]


def test_every_form_of_a_prompt(moe: sl.MoE, bank: sl.ExpertBank, tokenizer: Any) -> None:
    text = "Once upon a time"
    encoded = tokenizer(text, return_tensors="pt")
    ids = encoded.input_ids
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    with speculate(moe, bank) as pipeline:
        expected = pipeline.generate(text, **options).ids
        for prompt in (ids, ids[0], ids.tolist(), ids[0].tolist(), tuple(ids[0].tolist()), ids.numpy(), encoded, dict(encoded)):
            assert pipeline.generate(prompt, **options).ids == expected
        assert pipeline.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options).ids == expected
        assert pipeline.generate(inputs=ids, **options).ids == expected
        assert pipeline.generate(input_ids=ids, token_type_ids=torch.zeros_like(ids), **options).ids == expected
        assert pipeline.generate(**encoded, **options).ids == expected


def test_chat_messages_go_through_the_tokenizers_template(moe: sl.MoE, bank: sl.ExpertBank, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Once"}, {"role": "assistant", "content": "upon"}, {"role": "user", "content": "a time"}]
    with speculate(moe, bank) as pipeline:
        with pytest.raises(ValueError, match=r"need a chat template; .* for these 3 messages\. Set tokenizer\.chat_template"):
            pipeline.generate(messages, max_new_tokens=3)
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
        )
        try:
            run = pipeline.generate(messages, max_new_tokens=3, do_sample=False)
        finally:
            tokenizer.chat_template = None
        written = "user: Once\nassistant: upon\nuser: a time\nassistant:"
        assert run.ids == pipeline.generate(written, max_new_tokens=3, do_sample=False).ids


REFUSED = [
    ({"prompt": [5, 6], "attention_mask": [[0, 1]]}, ValueError, r"no padding; attention_mask must be 2 ones, got \[\[0, 1\]\]"),
    ({"prompt": [5, 6], "attention_mask": torch.ones(1, 3)}, ValueError, "must be 2 ones"),
    ({"prompt": [5, 6], "token_type_ids": [0, 1]}, ValueError, "token_type_ids marks 1 other tokens"),
    ({"prompt": "Once", "input_ids": [5]}, TypeError, "one prompt; got prompt and input_ids"),
    ({}, TypeError, "one prompt; got none"),
    ({"prompt": ["Once", "upon"]}, TypeError, "a text, a list of chat messages, or token ids"),
    ({"prompt": [5], "num_beams": 3}, ValueError, "num_beams=3"),
    ({"prompt": [5], "generation_config": GenerationConfig(num_beams=3)}, ValueError, "num_beams=3"),
    ({"prompt": [5], "penalty_alpha": 0.6, "top_k": 4}, ValueError, "penalty_alpha=0.6"),
    ({"prompt": [5], "cache_implementation": "static"}, ValueError, "cache_implementation='static'"),
    ({"prompt": [5], "use_cache": False}, ValueError, "use_cache=False"),
    ({"prompt": [5], "guidance_scale": 1.5}, ValueError, "guidance_scale=1.5"),
    ({"prompt": [5], "prompt_lookup_num_tokens": 3}, ValueError, r"drafter=PromptLookupDrafter\(\)"),
    ({"prompt": [5], "assistant_model": "small"}, ValueError, "Build the pipeline with a drafter"),
    ({"prompt": [5], "output_hidden_states": True}, ValueError, "Use RouterRecorder"),
    ({"prompt": [5], "output_attentions": True}, ValueError, "Use RouterRecorder"),
    ({"prompt": [5], "inputs_embeds": torch.ones(1, 1, 32)}, ValueError, "Give token ids"),
    ({"prompt": [5], "temperatur": 2.0}, TypeError, "Did you mean temperature"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_what_makes_no_sense_for_one_sequence_is_refused_by_name(
    moe: sl.MoE, bank: sl.ExpertBank, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with speculate(moe, bank) as pipeline:
        with pytest.raises(error, match=message):
            pipeline.generate(**{"max_new_tokens": 2, **options})
        assert len(pipeline.generate([5, 6], max_new_tokens=2, eos_token_id=None).new_ids) == 2


NEVER: dict[str, Any] = {
    "num_beams": 2, "num_beam_groups": 2, "num_return_sequences": 2, "constraints": [object()], "force_words_ids": [[5]],
    "penalty_alpha": 0.6, "dola_layers": "low", "guidance_scale": 1.5, "negative_prompt_ids": [[5]], "use_cache": False,
    "cache": object(), "past_key_values": object(), "cache_implementation": "static", "prefill_chunk_size": 4,
    "prompt_lookup_num_tokens": 3, "assistant_model": "small", "assistant_early_exit": 2, "use_mtp": True,
    "output_attentions": True, "output_hidden_states": True, "token_healing": True, "inputs_embeds": torch.ones(1, 1, 32),
}  # fmt: skip


def test_each_refused_option_is_refused_by_name_with_a_way_out(moe: sl.MoE, bank: sl.ExpertBank) -> None:
    """Also quantised, hybrid and other static kinds of caches; nothing that would make sense is refused unseen."""
    assert set(NEVER) == set(request._REFUSED)
    with speculate(moe, bank) as pipeline:
        for name, value in NEVER.items():
            with pytest.raises(ValueError, match=rf"{name}=.* doesn't fit\. [A-Z]"):
                pipeline.generate([5, 6], max_new_tokens=2, **{name: value})
        for kind in ("offloaded_static", "quantized", "hybrid", "offloaded"):
            with pytest.raises(ValueError, match=rf"cache_implementation='{kind}'"):
                pipeline.generate([5, 6], max_new_tokens=2, cache_implementation=kind)
        for batch in ([[5, 6], [7, 8]], torch.ones(2, 3, dtype=torch.long)):
            with pytest.raises(ValueError, match=r"one prompt of at least one token; got shape \(2, "):
                pipeline.generate(batch, max_new_tokens=2)
        run = pipeline.generate([5, 6], max_new_tokens=2, eos_token_id=None, return_dict_in_generate=True, num_beams=1, use_cache=True)
        assert isinstance(run, sl.Generation) and len(run.new_ids) == 2


def test_the_models_own_default_config_is_looked_at_too(moe: sl.MoE, bank: sl.ExpertBank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe.model.generation_config, "num_beams", 2)
    with speculate(moe, bank) as pipeline, pytest.raises(ValueError, match="num_beams=2"):
        pipeline.generate([5, 6], max_new_tokens=2)


def test_stop_strings_and_a_tokenizer_of_ones_own(moe: sl.MoE, bank: sl.ExpertBank, tokenizer: Any) -> None:
    bare = sl.load_moe(moe.model) if not moe.seam.attached else moe
    with speculate(moe, bank) as pipeline:
        text = tokenizer.decode(pipeline.generate(PROMPT, max_new_tokens=NEW, do_sample=False, eos_token_id=None).new_ids)
        stop = text[10:12]
        for options in ({"stop_strings": stop}, {"generation_config": GenerationConfig(stop_strings=[stop], max_new_tokens=NEW)}):
            run = pipeline.generate(PROMPT, do_sample=False, eos_token_id=None, **{"max_new_tokens": NEW, **options})
            assert stop in tokenizer.decode(run.new_ids) and stop not in tokenizer.decode(run.new_ids[:-1])
    with speculate(bare, bank) as pipeline:
        with pytest.raises(ValueError, match="Stop strings need a tokenizer"):
            pipeline.generate(PROMPT, max_new_tokens=NEW, stop_strings=stop)
        given = pipeline.generate(PROMPT, max_new_tokens=NEW, do_sample=False, eos_token_id=None, stop_strings=stop, tokenizer=tokenizer)
        assert given.new_ids == run.new_ids


def test_conditions_say_whether_it_sampled(moe: sl.MoE, bank: sl.ExpertBank) -> None:
    with speculate(moe, bank) as pipeline:
        config = GenerationConfig(do_sample=True, max_new_tokens=3)
        assert pipeline.generate(PROMPT, generation_config=config, seed=1).conditions["sampling"] is True
        assert pipeline.generate(PROMPT, max_new_tokens=3, do_sample=False).conditions["sampling"] is False


class TestCustomGenerate:
    """The pipeline as the decoding method of the model's own ``generate``."""

    def test_it_returns_what_generate_returns(self, moe: sl.MoE, bank: sl.ExpertBank) -> None:
        ids = torch.tensor([PROMPT])
        options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "repetition_penalty": 1.2, "eos_token_id": None}
        own = moe.own_generate(ids, **options)
        full: Any = moe.own_generate(ids, output_scores=True, output_logits=True, return_dict_in_generate=True, **options)
        with speculate(moe, bank) as pipeline:
            assert pipeline.last is None
            assert torch.equal(moe.model.generate(ids, custom_generate=pipeline, **options), own)
            assert pipeline.last is not None and pipeline.last.ids == tuple(own[0].tolist())
            assert pipeline.last.metrics["tokens"] == NEW and pipeline.last.conditions["sampling"] is False
            out = moe.model.generate(
                ids, custom_generate=pipeline, output_scores=True, output_logits=True, return_dict_in_generate=True, **options
            )
        assert type(out) is type(full) and torch.equal(out.sequences, full.sequences)
        assert out.cache.get_seq_length() == full.cache.get_seq_length()
        for name in ("scores", "logits"):
            assert all(torch.allclose(g, e, atol=1e-4) for g, e in zip(out[name], full[name], strict=True))

    def test_a_seed_and_a_streamer(self, moe: sl.MoE, bank: sl.ExpertBank, tokenizer: Any) -> None:
        """transformers drops ``streamer`` on the way to a custom method, so it has a name of its own."""
        options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "temperature": 2.0, "eos_token_id": None}
        with speculate(moe, bank) as pipeline:
            expected = pipeline.generate(PROMPT, seed=5, **options)
            streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
            ids = moe.model.generate(torch.tensor([PROMPT]), custom_generate=pipeline, seed=5, stream_to=streamer, **options)
        assert tuple(ids[0].tolist()) == expected.ids
        assert "".join(streamer) == tokenizer.decode(expected.new_ids)

    def test_stop_strings_as_a_criterion(self, moe: sl.MoE, bank: sl.ExpertBank, tokenizer: Any) -> None:
        with speculate(moe, bank) as pipeline:
            text = tokenizer.decode(pipeline.generate(PROMPT, max_new_tokens=NEW, do_sample=False, eos_token_id=None).new_ids)
            criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, text[10:12])])
            ids = moe.model.generate(
                torch.tensor([PROMPT]), custom_generate=pipeline, max_new_tokens=NEW, do_sample=False, eos_token_id=None,
                stopping_criteria=criteria,
            )  # fmt: skip
        assert text[10:12] in tokenizer.decode(ids[0, 6:]) and ids.shape[1] < 6 + NEW

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"num_beams": 2}, "num_beams=2"),
            ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences=2"),
            ({"inputs": torch.tensor([[5, 6], [7, 8]])}, "got a batch of 2"),
            ({"attention_mask": torch.tensor([[0, 1]])}, "attention_mask has 1 zeros"),
            ({"cache_implementation": "static"}, "cache_implementation='static'"),
            ({"max_new_tokens": 600}, "512 positions"),
            ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states=True"),
        ],
    )
    def test_the_same_is_refused(self, moe: sl.MoE, bank: sl.ExpertBank, options: dict[str, Any], message: str) -> None:
        with speculate(moe, bank) as pipeline, pytest.raises(ValueError, match=message):
            moe.model.generate(**{"inputs": torch.tensor([[5, 6]]), "max_new_tokens": 2, **options}, custom_generate=pipeline)

    def test_another_model_is_refused(self, moe: sl.MoE, bank: sl.ExpertBank) -> None:
        with speculate(moe, bank) as pipeline, pytest.raises(ValueError, match=r"Call generate on pipeline\.target\.model"):
            tiny_model("mixtral").generate(torch.tensor([[5, 6]]), custom_generate=pipeline, max_new_tokens=2)
