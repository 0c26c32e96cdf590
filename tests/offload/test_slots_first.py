"""A draft that computes with the slots' exact experts: closer to the target, never another text, safe beside evictions."""

import pytest
import torch

import specter_lab as sl
from specter_lab.offload.residency import Residency
from specter_lab.offload.slots_first import SlotsFirstServer
from specter_lab.records import ExpertKey, LayerCall
from tests.invariants import check_trace

NEW = 24


@pytest.fixture(scope="module")
def moe():
    return sl.load_moe("tiny-moe", dtype="float32")


@pytest.fixture(scope="module")
def text(moe):
    ids = moe.tokenizer(sl.load_prompts("prose")[1].text, return_tensors="pt").input_ids
    return ids, tuple(moe.own_generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :].tolist())


@pytest.fixture(scope="module")
def attached(moe, text):
    with moe:
        yield moe


@pytest.fixture(scope="module")
def bank(attached):
    return attached.quantize("qint4")


@pytest.fixture(scope="module")
def residual(attached, bank):
    return attached.residuals(bank)


@pytest.mark.parametrize("machine", [sl.SimulatedMachine(0.05, 5), sl.ThrottledMachine(0.5)], ids=lambda m: m.label)
@pytest.mark.parametrize(("held", "slots"), [("dense", 1), ("dense", 6), ("residual", 6), ("on arrival", 6)])
def test_the_tokens_are_the_targets_own(attached, bank, residual, text, machine, held, slots):
    """Few slots and poison: whatever is evicted while drafting is NaN."""
    ids, own = text
    options = {"dense": {}, "residual": {"residual": residual}, "on arrival": {"residual": residual, "on_arrival": True}}[held]
    with sl.Pipeline(
        attached, drafter=sl.ResidentDrafter(bank), draft_length=4, predictor=sl.DraftLookahead(), eviction=sl.ExpectedUse(),
        machine=machine, slots=slots, poison=True, **options,
    ) as pipeline:  # fmt: skip
        run = pipeline.generate(ids, max_new_tokens=NEW, do_sample=False)
        store = pipeline.residency.store
        check_trace(run.trace, pipeline.plan.slots, [store.blob_bytes(layer) for layer in range(store.layers)])
        assert not pipeline.residency._in_use
    assert run.new_ids == own
    drafted = run.trace.of_kind("expert").query("lane == 'draft'")
    exact = drafted[drafted["expert"] >= 0]
    assert len(exact) > 0 and (drafted["expert"] < 0).any()  # some exact, some coded
    rebuilt = run.trace.of_kind("rebuild").query("lane == 'draft'")
    assert len(rebuilt) == {"dense": 0, "residual": len(exact)}.get(held, len(rebuilt)) and len(rebuilt) <= len(exact)
    assert "prefetch" in set(run.trace.of_kind("transfer")["reason"]) or slots == 1


class Watched:
    """The same draft; remembers the last distribution that it proposed for each place: the one that was judged."""

    def __init__(self, drafter):
        self.drafter, self.bank, self.name, self.seen = drafter, drafter.bank, drafter.name, {}

    def draft(self, context, length):
        for token in self.drafter.draft(context, length):
            self.seen[token.position + 1] = token.probs
            yield token

    def learn(self, drafted, accepted):
        pass


def test_the_more_slots_the_better_the_draft(attached, bank):
    """Sampled at T = 0.7: the mean of sum(min(draft, target)), the chance to be accepted, whose noise is less than that of acceptance."""
    request = {
        "max_new_tokens": 32,
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 0,
        "output_scores": True,
        "return_dict_in_generate": True,
    }

    def chance(drafter, slots):
        chances = []
        with sl.Pipeline(attached, drafter=(watched := Watched(drafter)), draft_length=4, slots=slots, machine=sl.SimulatedMachine()) as p:
            for seed, prompt in enumerate(sl.load_prompts(per_kind=1)):
                watched.seen.clear()
                run = p.generate(prompt.text, seed=seed, **request)
                begin = len(run.ids) - len(run.new_ids)
                judged = [(run.scores[place - begin], probs) for place, probs in watched.seen.items() if place < len(run.ids)]
                chances += [float(torch.minimum(probs, scores[0].softmax(-1)).sum()) for scores, probs in judged]
        return sum(chances) / len(chances)

    coded = chance(sl.SelfDrafter(bank), 4)
    assert coded < chance(sl.ResidentDrafter(bank), 12) < chance(sl.ResidentDrafter(bank), 20)
    assert coded < 0.97 and chance(sl.ResidentDrafter(bank), 20) > 0.98


def test_a_draft_with_everything_resident_is_the_target(attached, bank, text):
    ids, own = text
    with sl.Pipeline(
        attached, drafter=sl.ResidentDrafter(bank), draft_length=4, slots=24, warm=True, machine=sl.SimulatedMachine()
    ) as pipeline:
        for _ in range(2):  # the first request leaves the slots filled
            run = pipeline.generate(ids, max_new_tokens=NEW, do_sample=False)
    assert run.new_ids == own and run.metrics["acceptance_rate"] == 1.0


def test_exact_experts_cost_what_the_targets_do(attached, bank):
    """One layer by hand: expert 1 is resident, expert 2 is coded."""
    machine = sl.SimulatedMachine()
    residency = Residency(attached.store, [2] * 8, sl.LRU())
    key = ExpertKey(0, 1)
    slot, _ = residency.place(key, 7, ())
    residency.destination(0, slot).copy_(attached.store.blob(key))
    residency.arrived(key)
    call = LayerCall(0, torch.tensor([[1, 2]]), None, torch.zeros(1, 128), (1, 2), (1, 1))
    served = {}

    def compute(expert, weights):
        served[expert] = weights["down_proj"]
        assert expert == 2 or residency.place(ExpertKey(0, 3), 8, ()) is not None  # the free slot; never the one in use
        assert expert == 2 or residency.place(ExpertKey(0, 4), 9, ()) is None

    SlotsFirstServer(bank, residency, machine, "draft", 1).serve(call, compute)
    events = [(e.kind, e.expert, e.start_us, e.end_us, e.request_id) for e in machine.trace.finish().events.itertuples()]
    assert events == [("attention", -1, 0.0, 101.0, -1), ("expert", -1, 101.0, 121.5, -1), ("expert", 1, 121.5, 172.5, 7)]
    assert torch.equal(served[1], attached.store.own_weights(key)["down_proj"]) and type(served[2]) is not torch.Tensor
    assert residency.place(ExpertKey(0, 4), 9, ()) == (0, key)  # given back


def test_a_failed_computation_gives_its_slots_back(attached, bank):
    residency = Residency(attached.store, [1] * 8, sl.LRU())
    key = ExpertKey(0, 1)
    residency.place(key, 7, ())
    residency.arrived(key)

    def fail(expert, weights):
        raise RuntimeError("no")

    call = LayerCall(0, torch.tensor([[1]]), None, torch.zeros(1, 128), (1,), (1,))
    with pytest.raises(RuntimeError, match="no"):
        SlotsFirstServer(bank, residency, sl.SimulatedMachine(), "draft", 1).serve(call, fail)
    assert residency.place(ExpertKey(0, 2), 8, ()) == (0, key)


def test_a_replay_refuses_what_depends_on_slots(attached, bank):
    target = sl.planning.stand_in(attached)
    with (
        sl.Pipeline(target, drafter=sl.ResidentDrafter(target.quantize("qint4")), machine=sl.SimulatedMachine()) as pipeline,
        pytest.raises(ValueError, match=r"depend on them: self-draft \(qint4 .*\)\. Use SelfDrafter here"),
    ):
        pipeline.replay(None, prompt_tokens=4, max_new_tokens=4)
