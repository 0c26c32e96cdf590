"""Drafting ahead: exact, at work, dropped on a rejection, and gone without a trace after whatever goes wrong."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

import specter_lab as sl
from specter_lab.offload.server import ResidentServer
from specter_lab.plans import planned
from specter_lab.plots.bars import trace_bars
from specter_lab.plots.steps import choose_steps
from specter_lab.recipes import tiny_model
from specter_lab.records import DraftToken, Geometry
from specter_lab.scratch import branch, scratch_bytes
from specter_lab.speculate.stream import DraftStream
from tests.invariants import check_trace

NEW = 32
PROMPTS = [prompt.text for prompt in sl.load_prompts(per_kind=1)]


@pytest.fixture(scope="module")
def moe():
    return sl.load_moe("tiny-moe", dtype="float32")


@pytest.fixture(scope="module")
def own(moe):
    ids = [moe.tokenizer(prompt, return_tensors="pt").input_ids for prompt in PROMPTS]
    return [tuple(moe.own_generate(i, max_new_tokens=NEW, do_sample=False)[0, i.shape[1] :].tolist()) for i in ids]


@pytest.fixture(scope="module")
def attached(moe, own):
    with moe:
        yield moe


@pytest.fixture(scope="module")
def bank(attached):
    return attached.quantize("qint4")


def pipeline(moe, bank, machine=None, **options):
    options = {"draft_length": 3, "slots": 4, "predictor": sl.DraftLookahead(), "poison": True, "draft_ahead": True, **options}
    return sl.Pipeline(moe, drafter=sl.SelfDrafter(bank), machine=machine or sl.SimulatedMachine(0.02), **options)


@pytest.mark.parametrize("machine", [sl.SimulatedMachine(0.02), sl.ThrottledMachine(0.02)], ids=lambda m: m.label)
@pytest.mark.parametrize("split", [None, sl.SplitByFinish()], ids=["link", "link and host"])
def test_tokens_are_the_models_own_and_drafts_are_made_in_waits(attached, bank, own, machine, split):
    kept, new = 0, 12
    for prompt, tokens in zip(PROMPTS[:2], own, strict=False):
        with pipeline(attached, bank, machine, split=split) as p:
            run = p.generate(prompt, max_new_tokens=new, do_sample=False)
        assert run.new_ids == tokens[:new]
        check_trace(run.trace, p.plan.slots, [attached.store.blob_bytes(0)] * 8)
        early = run.trace.of_kind("ahead")
        assert (early["value"] <= 3).all() and 0 <= run.metrics["drafted_ahead"] <= 1
        if machine.label != "simulated":
            continue  # on a wall clock it is a matter of luck how long waits are
        kept += (early["outcome"] == "kept").sum()
        assert run.metrics["drafted_ahead"] > 0
        # a piece of a step's draft lies before the commit of the step before it, where that pass would have stalled
        draft = run.trace.events[run.trace.events["lane"] == "draft"]
        commits = run.trace.of_kind("commit").set_index("step")["start_us"]
        assert (draft["start_us"] < (draft["step"] - 1).map(commits)).any()
    assert kept > 0 or machine.label != "simulated"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_draft_that_begins_inside_a_pass_reads_the_cache_from_before_it(moe, own, attention):
    """Its first piece is taken when some layers hold the window already. It drafts with the exact experts: all of it holds."""

    class Late(sl.FixedLength):
        longest = 3

        def choose(self, step, most):
            return 0 if step < 4 else super().choose(step, most)

    model = sl.load_moe("tiny-moe", dtype="float32")
    model.model.set_attn_implementation(attention)
    with model, pipeline(model, model.store, draft_length=Late(3)) as p:
        run = p.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False)
    early = run.trace.of_kind("ahead")
    assert run.new_ids == own[0] and run.metrics["acceptance_rate"] == 1
    assert early["step"].min() == 2 and set(early["outcome"]) == {"kept"}


@pytest.mark.parametrize("length", [3, 7, 31, 40])
def test_windows_are_as_long_as_without(attached, length):
    """However long a draft holds: the branch of the cache ends at 32 tokens, and so does every window."""
    lengths = {}
    for ahead in (False, True):
        with pipeline(attached, attached.store, draft_length=length, draft_ahead=ahead) as p:
            run = p.generate(PROMPTS[0], max_new_tokens=100, do_sample=False)
        lengths[ahead] = run.trace.of_kind("draft_length")["value"].astype(int).tolist()
    assert max(lengths[True]) == min(length, 32)
    assert lengths[True] == lengths[False] or length == 40


def test_a_predictor_is_told_of_the_whole_window(attached, bank):
    """The oracle knows every row, also of windows that are longer than was chosen, since so much was ready."""

    class Unlike(sl.FixedLength):
        longest = 6

        def choose(self, step, most):
            return min(most, 6 if step % 2 else 1)

    ids = attached.tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    with pipeline(attached, attached.store, predictor=None, draft_ahead=False) as p:
        whole = p.generate(ids, max_new_tokens=NEW, do_sample=False).ids
    with (
        torch.no_grad(),
        sl.RouterRecorder(attached.model) as recorder,
        attached.seam.serving(ResidentServer(attached.store, sl.SimulatedMachine(), "target", 0)),
    ):
        attached.model(torch.tensor([whole]))
    with pipeline(
        attached, attached.store, predictor=sl.Oracle(recorder.log), draft_length=Unlike(6), machine=sl.SimulatedMachine(0.01)
    ) as p:
        run = p.generate(ids, max_new_tokens=NEW, do_sample=False)
    drafted = run.trace.of_kind("draft_length")
    assert drafted.loc[drafted["step"] % 2 == 0, "value"].max() > 1 and run.metrics["drafted_ahead"] > 0
    assert run.metrics["recall"] == 1


def test_figures_leave_out_what_a_dropped_draft_predicted(attached):
    with pipeline(attached, attached.quantize("qint2")) as p:
        run = p.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False)
    said = run.trace.of_kind("predict").query("step >= 1")
    dropped = said[said["outcome"] == "dropped"]
    marks = run.trace.of_kind("ahead").query("outcome == 'dropped'").set_index("step")["start_us"]
    assert len(dropped) and (dropped["start_us"] <= dropped["step"].map(marks)).all()
    rest = said[said["outcome"] != "dropped"].drop_duplicates(["step", "layer", "expert"])
    assert run.metrics["precision"] == pytest.approx((rest["outcome"] == "correct").mean())
    assert int(sl.prediction_scores(run.trace)["predicted"].sum()) == len(rest)


def test_a_step_is_drawn_after_the_one_before_it(attached, bank):
    with pipeline(attached, bank) as p:
        run = p.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False)
    steps = choose_steps(run.trace, None, None)
    assert all(one.end_ms <= two.start_ms for one, two in itertools.pairwise(steps))
    bars = trace_bars(run.trace, steps=(2, 2))
    assert bars.exposed_ms <= bars.window_ms[1] - bars.window_ms[0]
    stalls = bars.table[bars.table["kind"] == "stall"]
    assert bars.exposed_ms == pytest.approx(stalls["duration_ms"].sum())


def test_a_wrong_guess_drops_the_draft_and_what_it_wanted(attached, bank, own):
    class Wrong(sl.SelfDrafter):
        """Right in its windows; the third token, which is the guess, is never what the target adds."""

        def draft(self, context, length):
            for i, token in enumerate(super().draft(context, length)):
                yield dataclasses.replace(token, token=2047) if i == 2 else token

    with sl.Pipeline(
        attached, drafter=Wrong(attached.store), draft_length=2, slots=4, predictor=sl.DraftLookahead(), draft_ahead=True,
        machine=sl.SimulatedMachine(0.02),
    ) as p:  # fmt: skip
        run = p.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False)
    assert run.new_ids == own[0] and run.metrics["acceptance_rate"] == 1
    early, cancelled = run.trace.of_kind("ahead"), run.trace.of_kind("cancel")
    assert set(early["outcome"]) == {"dropped"} and (early["value"] > 0).any() and run.metrics["drafted_ahead"] == 0
    assert "rejected" in set(cancelled["reason"])


def test_it_saves_time_where_passes_wait_and_costs_no_token(attached, bank):
    """Simulated, so exact: the same plan with and without, at the same device memory."""
    times = {}
    for ahead in (False, True):
        with planned(attached, "residual", bank=bank, machine=sl.SimulatedMachine(0.02), memory="13MB", draft_ahead=ahead) as p:
            runs = [p.generate(prompt, max_new_tokens=NEW, do_sample=False) for prompt in PROMPTS]
            assert p.plan.device.total <= 13_000_000
        times[ahead] = [run.metrics["tpot_ms"] for run in runs]
    assert sum(times[True]) < sum(times[False])


def test_memory_counts_what_the_draft_keeps_beside_the_cache(attached, bank):
    sizes = {}
    for ahead in (False, True):
        with pipeline(attached, bank, draft_ahead=ahead) as p:
            sizes[ahead] = p.plan.device.kv
    assert sizes[True] - sizes[False] == 32 * attached.geometry.kv_bytes_per_token
    kv = SimpleNamespace(kv_bytes_per_token=10)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(sliding_window=128))
    windowed = SimpleNamespace(geometry=kv, model=SimpleNamespace(config=config))
    assert scratch_bytes(windowed, 500) == 10 * (32 + 128)
    assert scratch_bytes(SimpleNamespace(geometry=kv, cache_copied=(True, 7)), 500) == 10 * (32 + 500) + 7
    planned_kv = sl.plan_memory(attached, lambda target, **o: pipeline(target, target.quantize(), **{**o, "slots": 4}), slots=4).device.kv
    assert planned_kv == sizes[True]


def test_it_needs_a_draft_and_a_length_above_0(attached, bank):
    with pytest.raises(ValueError, match=r"needs a draft; got draft_ahead=True and no drafter"):
        sl.Pipeline(attached, draft_ahead=True)
    with pipeline(attached, bank, draft_length=0) as p:
        run = p.generate(PROMPTS[0], max_new_tokens=6, do_sample=False)
    assert run.trace.of_kind("ahead").empty and not (run.trace.events["lane"] == "draft").any()


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError("the draft's own")])
@pytest.mark.parametrize("side", ["draft", "target"])
def test_an_interrupt_on_either_side_leaves_everything_usable(attached, bank, own, side, failure):
    """In the draft while it is ahead, or in the target's pass while a draft stands halfway."""
    machine = sl.SimulatedMachine(0.02)
    with pipeline(attached, bank, machine) as p:
        stamp, seen = machine.compute, []

        def compute(lane, kind, **fields):
            seen.append((lane, fields.get("step")))
            early = [s for lane_, s in seen if lane_ == "draft"]
            ahead = bool(early) and max(s for lane_, s in seen if lane_ == "target") < early[-1] and len(seen) > 60
            if ahead and lane == side and fields["step"] >= (3 if side == "draft" else 2):
                raise failure
            stamp(lane, kind, **fields)

        machine.compute = compute
        with pytest.raises(type(failure) if isinstance(failure, Exception) else failure):
            p.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False)
        del machine.compute
        assert attached.seam._server is None and attached.routers.last is None
        assert p.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False).new_ids == own[0]


def test_a_recorder_sees_whole_forwards_of_both(attached, bank, own):
    """The draft's forward is left in the middle of the target's: each token's routing is the one of its own forward."""
    with pipeline(attached, attached.store) as p, sl.RouterRecorder(attached.model) as recorder:
        run = p.generate(PROMPTS[0], max_new_tokens=12, do_sample=False)
    assert (run.trace.of_kind("ahead")["outcome"] == "kept").any()
    log = recorder.log
    by_place: dict[tuple[int, int], set[tuple]] = {}
    for token, position, experts in zip(log.tokens.tolist(), log.positions.tolist(), log.experts, strict=True):
        by_place.setdefault((position, token), set()).add(tuple(experts.sort(-1).values.flatten().tolist()))
    assert len(log.tokens) > len(by_place), "drafted tokens are read twice: by the draft and by the target"
    assert all(len(found) == 1 for found in by_place.values()), "draft and target are the same model here"


def test_sampling_with_a_draft_ahead_is_distributed_as_the_target():
    """Five sampled tokens of three words over many seeds, the last ones drafted ahead, against the exact odds of every outcome."""
    model = tiny_model("mixtral", vocab_size=3, bos_token_id=0, eos_token_id=0)
    moe, prompt, words, runs = sl.load_moe(model), torch.tensor([[2, 1, 2, 0]]), 3, 700
    outcomes = torch.tensor([*itertools.product(range(words), repeat=5)])
    with torch.no_grad():
        odds = (model(torch.cat([prompt.expand(len(outcomes), -1), outcomes], 1)).logits[:, 3:-1] / 1.5).softmax(-1)
    exact = odds.double().gather(2, outcomes[..., None]).prod(1).flatten()
    machine, kept, counts = sl.SimulatedMachine(0.001), 0, torch.zeros(len(outcomes), dtype=torch.float64)
    with pipeline(moe, moe.quantize("qint4"), machine, draft_length=1, slots=1, poison=False) as p:
        for seed in range(runs):
            run = p.generate(prompt, max_new_tokens=5, do_sample=True, top_k=0, temperature=1.5, eos_token_id=None, seed=seed)
            counts[sum(token * words ** (4 - i) for i, token in enumerate(run.new_ids))] += 1
            kept += bool((run.trace.of_kind("ahead")["outcome"] == "kept").any())
    expected = exact / exact.sum() * runs
    rare = expected < 5
    seen, expected = (torch.cat([part[~rare], part[rare].sum()[None]]).numpy() for part in (counts, expected))
    assert kept > runs / 10 and len(seen) > 20
    assert chisquare(seen, expected).pvalue > 1e-3


# --- the pieces -----------------------------------------------------------------------------------------------------------


class Clock:
    """A machine that only tells the time; each look at it takes 5 us."""

    def __init__(self):
        self.time = 0.0

    def now_us(self):
        self.time += 5.0
        return self.time


def pieces(*tokens):
    for token in tokens:
        yield None
        yield DraftToken(token, position=token)


def test_a_stream_goes_on_where_it_was_left():
    told: list[int] = []
    stream = DraftStream(pieces(1, 2, 3, 4, 5), Clock())
    assert [token.token for token in stream.tokens(2)] == [1, 2]
    stream.verifying(most=1, told=lambda token: told.append(token.token))
    assert not stream.advance(2.0), "a piece takes 5 us; less than half of it would fit"
    assert stream.advance(2.5) and stream.guess is None
    assert stream.advance(9.0) and stream.guess.token == 3
    assert stream.advance(9.0) and stream.advance(9.0) and [token.token for token in stream.ready] == [4]
    assert not stream.advance(9.0), "no more than asked for"
    stream.verifying(most=3, told=lambda token: told.append(token.token))
    assert [token.token for token in stream.tokens(9)] == [5] and not stream.advance(9.0), "the draft is over"
    assert told == [3, 4]
    stream.close()


def test_a_branch_follows_its_own_way_while_the_trunk_grows_and_is_cropped():
    from transformers import DynamicCache

    def entries(*values):
        states = torch.tensor(values, dtype=torch.float32).reshape(1, 1, -1, 1)
        return states, -states

    trunk = DynamicCache()
    trunk.update(*entries(1, 2, 3), 0)
    own = branch(trunk)
    for i, value in enumerate((10, 11, 12)):
        trunk.update(*entries(4 + i), 0)
        keys, values = own.update(*entries(value), 0)
        assert keys.flatten().tolist() == [1, 2, 3, *range(10, 11 + i)] and torch.equal(values, -keys)
    trunk.crop(-2)
    assert own.update(*entries(13), 0)[0].flatten().tolist() == [1, 2, 3, 10, 11, 12, 13]
    assert trunk.layers[0].keys.flatten().tolist() == [1, 2, 3, 4] and own.get_seq_length() == 7
    assert own.layers[0].keys.shape[-2] == 4, "the prefix isn't kept twice"


class RightUntil:
    """A text of one layer whose drafts hold but for the place ``wrong``; token t uses expert t % 4."""

    def __init__(self, tokens, wrong):
        self.experts = np.arange(tokens).reshape(-1, 1, 1) % 4
        self.gate = np.full_like(self.experts, -1)
        self.wrong, self.asked = wrong, []

    def window(self, start, length):
        self.asked.append((start, length))
        length = min(length, len(self.experts) - 1 - start)
        accepted = min(length, max(self.wrong - start - 1, 0) if start < self.wrong else length)
        return SimpleNamespace(
            draft=self.experts[start : start + length], needed=self.experts[start : start + length + 1], accepted=accepted
        )


def test_a_replayed_draft_goes_on_until_it_breaks_and_begins_anew_there():
    text = RightUntil(40, wrong=12)
    geometry = Geometry("toy", (0,), 0, (4,), 1, 8, 100, 64, (16_000,), 0, 0, 0)
    options = {"drafter": sl.SelfDrafter(sl.ReplayTarget(geometry).quantize()), "draft_length": 2, "draft_ahead": True}
    with sl.Pipeline(sl.ReplayTarget(geometry), slots=1, machine=sl.SimulatedMachine(0.01), **options) as p:
        run = p.replay(text, prompt_tokens=3, max_new_tokens=30)
    # from token 3 (the first committed one): windows of 2 that hold add 3 tokens; what is drafted as token 12 is wrong
    commits = run.trace.of_kind("commit")
    assert commits["position"].tolist() == [3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 32]
    assert {start for start, _ in text.asked} == {3, 12}, "windows are told from where the draft began: at the start, and after it broke"
    assert run.trace.of_kind("ahead")["outcome"].tolist().count("dropped") == 1
    assert run.metrics["drafted_ahead"] > 0.7
