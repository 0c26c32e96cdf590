"""The loop on the bundled model: exact tokens for every mixture of pieces, ends, sampling, interrupts, refusals."""

import dataclasses
import itertools
import threading

import pytest
import torch
from scipy.stats import chisquare
from transformers import TextIteratorStreamer

import specter_lab as sl
from tests.families import tiny
from tests.invariants import check_trace

PROMPTS = [prompt.text for prompt in sl.load_prompts(per_kind=2)]
NEW = 20


@pytest.fixture(scope="module")
def moe():
    return sl.load_moe("tiny-moe", dtype="float32")


@pytest.fixture(scope="module")
def own(moe):
    """The model's own greedy tokens with eager experts, before anything is attached."""
    assert not moe.seam.attached
    return {
        p: tuple(moe.own_generate(ids(moe, p), max_new_tokens=NEW, do_sample=False)[0, ids(moe, p).shape[1] :].tolist()) for p in PROMPTS
    }


@pytest.fixture(scope="module")
def attached(moe, own):
    with moe:
        yield moe


@pytest.fixture(scope="module")
def bank(attached):
    return attached.quantize("qint4")


def ids(moe, prompt):
    return moe.tokenizer(prompt, return_tensors="pt").input_ids


def oracle(moe, prompt, own_tokens):
    """The routing of prompt and output, recorded in one pass over both."""
    text = torch.cat([ids(moe, prompt), torch.tensor([own_tokens])], dim=1)
    machine = sl.SimulatedMachine()
    from specter_lab.offload.server import ResidentServer

    with torch.no_grad(), moe.seam.serving(ResidentServer(moe.store, machine, "target", 0)), sl.RouterRecorder(moe.model) as recorder:
        moe.model(text)
    return sl.Oracle(recorder.log)


# A covering set: every pair of (drafter, predictor), (drafter, machine), (drafter, slots), (predictor, machine),
# (predictor, slots), (machine, slots) that can be built occurs; `make check-all` runs the whole product.
CASES = [
    (drafter, predictor, "throttled" if (i + j) % 2 else "simulated", (1, 6, 24)[(i + 2 * j) % 3])
    for i, drafter in enumerate(["none", "qint4", "qint8", "qint2", "lookup"])
    for j, predictor in enumerate(["none", "gate", "lookahead", "oracle"])
    if predictor != "lookahead" or drafter.startswith("qint")
]


@pytest.mark.parametrize(("drafter", "predictor", "machine", "slots"), CASES)
def test_tokens_are_the_models_own(attached, own, drafter, predictor, machine, slots):
    number = CASES.index((drafter, predictor, machine, slots))
    prompt = PROMPTS[number % len(PROMPTS)]
    drafters = {"none": lambda: None, "lookup": sl.PromptLookupDrafter}
    predictors = {
        "none": lambda: None,
        "gate": lambda: sl.NextLayerGate(attached),
        "lookahead": sl.DraftLookahead,
        "oracle": lambda: oracle(attached, prompt, own[prompt]),
    }
    with sl.Pipeline(
        attached,
        drafter=drafters.get(drafter, lambda: sl.SelfDrafter(attached.quantize(drafter)))(),
        predictor=predictors[predictor](),
        machine=sl.SimulatedMachine(0.05, 5) if machine == "simulated" else sl.ThrottledMachine(0.5),
        draft_length=(0, 1, 5, 50)[number % 4] if drafter != "none" else None,
        slots=slots,
        poison=True,
    ) as pipeline:
        run = pipeline.generate(prompt, max_new_tokens=NEW, do_sample=False)
    assert run.new_ids == own[prompt]
    check_trace(run.trace, run.conditions["slots"], [attached.store.blob_bytes(0)] * 8)
    assert (run.trace.of_kind("transfer").shape[0] > 0) and run.metrics["tokens"] == NEW
    if predictor in ("gate", "lookahead") and slots == 6 and run.metrics["steps"] and len(run.trace.of_kind("predict")):
        assert (run.trace.of_kind("transfer")["reason"] == "prefetch").any(), "the predictor predicted, and nothing was prefetched"


def test_oracle_without_a_draft_is_always_right(attached, own):
    prompt = PROMPTS[0]
    with sl.Pipeline(attached, predictor=oracle(attached, prompt, own[prompt]), machine=sl.SimulatedMachine(), slots=24) as pipeline:
        metrics = pipeline.generate(prompt, max_new_tokens=NEW, do_sample=False).metrics
    assert (metrics["recall"], metrics["precision"]) == (1.0, 1.0)


def test_all_resident_after_a_warm_up_moves_nothing(attached, own):
    with sl.Pipeline(attached, slots=24, warm=True, machine=sl.SimulatedMachine()) as pipeline:
        for prompt in PROMPTS:
            pipeline.generate(prompt, max_new_tokens=NEW, do_sample=False)
        run = pipeline.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False)
    assert run.new_ids == own[PROMPTS[0]]
    assert run.metrics["moved_mb_per_token"] == 0 and run.metrics["hit_rate"] == 1 and run.metrics["exposed_ms_per_token"] == 0


def test_two_simulated_runs_give_the_same_bytes(attached, bank):
    def csv():
        with sl.baselines.lookahead(attached, bank=bank, slots=6, machine=sl.SimulatedMachine(0.05)) as pipeline:
            return pipeline.generate(PROMPTS[1], max_new_tokens=NEW, do_sample=False).trace.events.to_csv()

    assert csv() == csv()


def test_sampling_is_repeatable_by_seed_and_distributed_as_the_targets():
    """Three sampled tokens over many seeds, one of them speculated, against the exact probability of every outcome."""
    model = tiny("mixtral", vocab_size=4)
    model.lm_head.weight.data.mul_(8)  # random weights make nearly even odds
    moe = sl.load_moe(model)
    prompt = torch.tensor([[3, 1, 2, 3]])
    exact = torch.zeros(4, 4, 4)
    with torch.no_grad():
        for a, b in itertools.product(range(4), repeat=2):
            probs = (moe.model(torch.cat([prompt, torch.tensor([[a, b]])], 1)).logits[0, -3:] / 1.5).softmax(-1)
            exact[a, b] = probs[0, a] * probs[1, b] * probs[2]
    options = {"max_new_tokens": 3, "do_sample": True, "top_k": 0, "temperature": 1.5, "eos_token_id": None}

    class Noisy(sl.SelfDrafter):
        """Proposes from a distribution of its own, so that both branches of the verification decide tokens."""

        def draft(self, context, length):
            for token in super().draft(context, length):
                probs = token.probs.roll(1) * 0.6 + token.probs * 0.4
                yield dataclasses.replace(token, token=int(torch.multinomial(probs, 1, generator=context.generator)), probs=probs)

    with sl.Pipeline(
        moe, drafter=Noisy(moe.quantize("qint8")), draft_length=1, slots=8, warm=True, machine=sl.SimulatedMachine()
    ) as pipeline:
        runs = [pipeline.generate(prompt, seed=seed, **options) for seed in range(700)]
        assert pipeline.generate(prompt, seed=17, **options).new_ids == runs[17].new_ids
    counts = torch.zeros(4, 4, 4)
    for run in runs:
        counts[run.new_ids] += 1
    assert chisquare(counts.flatten().numpy(), (exact.double() * len(runs) / exact.double().sum()).flatten().numpy()).pvalue > 1e-3
    rejected = sum(run.metrics["acceptance_rate"] == 0 for run in runs)
    assert 0.1 < rejected / len(runs) < 0.9


def test_the_end_token_anywhere_in_a_block_ends_the_request(attached, bank, own):
    """Each generated token in turn is declared an end token: output, text and stream stop at its first occurrence."""
    tokens = own[PROMPTS[2]]
    with sl.baselines.lookahead(attached, bank=bank, slots=6, machine=sl.SimulatedMachine()) as pipeline:
        for end in sorted(set(tokens)):
            run = pipeline.generate(PROMPTS[2], max_new_tokens=NEW, do_sample=False, eos_token_id=[end, 2047])
            assert run.new_ids == tokens[: tokens.index(end) + 1]
            check_trace(run.trace, pipeline.plan.slots, [attached.store.blob_bytes(0)] * 8)


@pytest.mark.parametrize("new", [1, 2, 3, 9, 10])
def test_never_more_tokens_than_asked(attached, bank, own, new):
    with sl.baselines.lookahead(attached, bank=bank, draft_length=8, machine=sl.SimulatedMachine()) as pipeline:
        run = pipeline.generate(PROMPTS[0], max_new_tokens=new, do_sample=False)
    assert run.new_ids == own[PROMPTS[0]][:new]
    assert (run.metrics["tpot_ms"] is None) == (new == 1)


def test_the_streamer_sees_every_token_once_and_the_end(attached, bank, own):
    streamer = TextIteratorStreamer(attached.tokenizer, skip_prompt=True)
    with sl.baselines.lookahead(attached, bank=bank, machine=sl.SimulatedMachine()) as pipeline:
        run = pipeline.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False, streamer=streamer)
    assert "".join(streamer) == attached.tokenizer.decode(run.new_ids)


def test_generation_config_and_stop_strings(attached, bank, own):
    from transformers import GenerationConfig

    text = attached.tokenizer.decode(own[PROMPTS[0]])
    with sl.baselines.lookahead(attached, bank=bank, machine=sl.SimulatedMachine()) as pipeline:
        config = GenerationConfig(max_new_tokens=7, do_sample=False, pad_token_id=0)
        assert pipeline.generate(PROMPTS[0], generation_config=config).new_ids == own[PROMPTS[0]][:7]
        stopped = pipeline.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False, stop_strings=[text[5:8]])
        assert attached.tokenizer.decode(stopped.new_ids).endswith(text[5:8]) and len(stopped.new_ids) < NEW


@pytest.mark.parametrize("machine", [sl.SimulatedMachine(0.05), sl.ThrottledMachine(0.05)], ids=lambda m: m.label)
def test_an_interrupt_leaves_the_same_object_usable(attached, bank, own, machine):
    class Interrupting(sl.DraftLookahead):
        left = 9

        def drafted(self, step, token, horizon):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return super().drafted(step, token, horizon)

    with sl.Pipeline(attached, drafter=sl.SelfDrafter(bank), predictor=Interrupting(), slots=4, machine=machine, poison=True) as pipeline:
        with pytest.raises(KeyboardInterrupt):
            pipeline.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False)
        assert not [t for t in threading.enumerate() if t.name == "specter-link"]
        assert pipeline.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False).new_ids == own[PROMPTS[0]]


@pytest.mark.parametrize("layer_calls", [1, 5, 12, 30])
def test_an_interrupt_inside_a_layer(attached, own, monkeypatch, layer_calls):
    import specter_lab.seam as seam

    real, count = seam.expert_forward, iter(range(layer_calls * 20))

    def interrupting(*arguments):
        if next(count, None) is None:
            raise KeyboardInterrupt
        return real(*arguments)

    with sl.Pipeline(attached, slots=3, machine=sl.SimulatedMachine(), poison=True) as pipeline:
        monkeypatch.setattr(seam, "expert_forward", interrupting)
        with pytest.raises(KeyboardInterrupt):
            pipeline.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False)
        monkeypatch.undo()
        assert pipeline.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False).new_ids == own[PROMPTS[0]]


def test_modes_of_torch(attached, bank, own):
    """Case 3: a pipeline with a quantised draft in each of torch's modes."""
    with sl.baselines.lookahead(attached, bank=bank, machine=sl.SimulatedMachine()) as pipeline:
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                assert pipeline.generate(PROMPTS[3], max_new_tokens=6, do_sample=False).new_ids == own[PROMPTS[3]][:6]


REFUSED = [
    ({"prompt": ""}, ValueError, "at least one token"),
    ({"prompt": []}, ValueError, "at least one token"),
    ({"prompt": [[1, 2], [3, 4]]}, ValueError, "one prompt"),
    ({"prompt": [5, 2048]}, ValueError, "from 0 to 2047"),
    ({"prompt": [5, -1]}, ValueError, "from 0 to 2047"),
    ({"prompt": torch.tensor([0.5, 1.0])}, ValueError, "whole numbers"),
    ({"prompt": [7] * 1025}, ValueError, "1024 positions"),
    ({"prompt": [7] * 1000, "max_new_tokens": 25}, ValueError, "1024 positions"),
    ({"max_new_tokens": 0}, ValueError, "at least one token"),
    ({"max_new_tokens": -3}, ValueError, "at least one token"),
    ({"max_new_token": 5}, TypeError, "Did you mean max_new_tokens"),
    ({"num_beams": 4}, ValueError, "num_beams=4"),
    ({"num_return_sequences": 2, "do_sample": True}, ValueError, "num_return_sequences=2"),
    ({"use_cache": False}, ValueError, "use_cache"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_bad_requests_are_refused_before_anything_runs(attached, options, error, message):
    with sl.Pipeline(attached, machine=sl.SimulatedMachine()) as pipeline:
        with pytest.raises(error, match=message):
            pipeline.generate(options.pop("prompt", "Once"), **{"max_new_tokens": 4, **options})
        assert len(pipeline.generate("Once", max_new_tokens=2).new_ids) == 2


def test_bad_pipelines_are_refused_and_leave_the_model_alone():
    moe = sl.load_moe("tiny-moe")
    for options, error, message in (
        ({"memory": "3MB"}, ValueError, "smallest legal cache is one slot a layer: 3,200,384 bytes"),
        ({"memory": "lots"}, ValueError, "such as '8GiB'"),
        ({"slots": 0}, ValueError, "one slot a layer"),
        ({"slots": [4, 4]}, ValueError, "8 MoE layers"),
        ({"slots": 4, "memory": "20MB"}, ValueError, "either slots or memory"),
        ({"slot": 4}, TypeError, "Did you mean slots"),
        ({"predictor": sl.DraftLookahead()}, ValueError, "has no experts"),
        ({"predictor": sl.DraftLookahead(), "drafter": sl.PromptLookupDrafter()}, ValueError, "prompt lookup"),
        ({"draft_length": -1}, ValueError, "counts tokens"),
    ):
        with pytest.raises(error, match=message):
            sl.Pipeline(moe, **options)
        assert not moe.seam.attached


def test_a_budget_is_kept_and_used(attached, bank):
    for memory in ("10MB", "12MB", "20MiB", "60MB"):
        with sl.baselines.lookahead(attached, bank=bank, memory=memory, context_length=128) as pipeline:
            device, budget = pipeline.plan.device, pipeline.plan.budget
            assert device.total <= budget
            assert device.total + attached.store.blob_bytes(0) > budget or pipeline.plan.slots == (24,) * 8
            assert pipeline.residency.bytes == device.slots and bank.nbytes == device.draft
            with pytest.raises(ValueError, match="counts KV for 128 tokens"):
                pipeline.generate([5] * 100, max_new_tokens=29)


def test_closing(attached):
    pipeline = sl.Pipeline(attached, machine=sl.SimulatedMachine())
    pipeline.close()
    pipeline.close()
    for use in (lambda: pipeline.generate("Once"), pipeline.__enter__, pipeline.reset):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    assert "closed" in repr(pipeline)


def test_a_model_cannot_be_detached_under_a_pipeline(attached):
    with sl.Pipeline(attached, machine=sl.SimulatedMachine()), pytest.raises(RuntimeError, match="1 are open"):
        attached.detach()


def test_the_last_pipeline_puts_the_experts_back():
    moe = sl.load_moe("tiny-moe")
    first, second = (sl.Pipeline(moe, machine=sl.SimulatedMachine()) for _ in range(2))
    first.close()
    assert moe.seam.attached
    second.close()
    assert not moe.seam.attached


def test_text_without_a_tokenizer(tiny_folder, tmp_path):
    import shutil

    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(tiny_folder / name, tmp_path)
    with sl.Pipeline(tmp_path, machine=sl.SimulatedMachine()) as pipeline:
        with pytest.raises(ValueError, match="needs a tokenizer"):
            pipeline.generate("Once", max_new_tokens=2)
        run = pipeline.generate([5, 6, 7], max_new_tokens=2)
    assert run.text is None and len(run.new_ids) == 2


def test_a_tokenizer_with_fewer_words_than_the_model():
    moe = sl.load_moe(tiny("mixtral", vocab_size=4096), tokenizer=sl.load_moe("tiny-moe").tokenizer)
    with sl.Pipeline(moe, machine=sl.SimulatedMachine()) as pipeline:
        run = pipeline.generate([3, 4], max_new_tokens=40, do_sample=True, temperature=5.0, seed=0, eos_token_id=None)
    assert len(run.new_ids) == 40 and max(run.new_ids) >= 2048 and isinstance(run.text, str)


def test_the_report_of_a_run(attached, bank):
    with sl.baselines.lookahead(attached, bank=bank, machine=sl.SimulatedMachine()) as pipeline:
        run = pipeline.generate(PROMPTS[0], max_new_tokens=8, do_sample=False)
    for html in (run._repr_html_(), run.conditions._repr_html_(), run.trace._repr_html_()):
        assert html.startswith("<") and "0x" not in html
    assert "simulated" in repr(run) and run.conditions["torch"] == torch.__version__
    hostile = sl.Conditions({"model": "<script>alert(1)</script>"})
    assert "<script>" not in hostile._repr_html_()
