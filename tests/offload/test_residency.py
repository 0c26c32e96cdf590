"""Slots: states, protection, poison, policies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specter_lab.offload.eviction import LFU, LRU
from specter_lab.offload.residency import Residency
from specter_lab.records import ExpertKey
from tests.toy import ToyRun, ToyStore, call


def loaded(residency, *experts):
    for n, e in enumerate(experts):
        residency.place(ExpertKey(0, e), n, protected=())
        residency.arrived(ExpertKey(0, e))


def test_a_slot_is_taken_at_submission_and_usable_at_arrival():
    residency = Residency(ToyStore(1, 4), [2], LRU())
    key = ExpertKey(0, 1)
    assert residency.state(key) == "absent"
    assert residency.place(key, 0, protected=()) == (0, None)
    assert residency.state(key) == "loading"
    residency.arrived(key)
    assert (residency.state(key), residency.residents(0)) == ("resident", [1])


def test_loading_in_use_and_protected_experts_are_never_victims():
    residency = Residency(ToyStore(1, 4), [3], LRU())
    loaded(residency, 0, 1)
    residency.acquire(ExpertKey(0, 0))
    residency.place(ExpertKey(0, 2), 2, protected=())  # loading
    assert residency.place(ExpertKey(0, 3), 3, protected={ExpertKey(0, 1)}) is None
    assert residency.place(ExpertKey(0, 3), 3, protected=()) == (1, ExpertKey(0, 1))


def test_a_prefetch_leaves_the_last_slot_to_demands():
    residency = Residency(ToyStore(1, 4), [2], LRU())
    assert residency.place(ExpertKey(0, 0), 0, (), spare=1) is not None
    assert residency.place(ExpertKey(0, 1), 1, (), spare=1) is None
    assert residency.place(ExpertKey(0, 1), 1, ()) is not None


def test_a_forgotten_slot_holds_poison():
    residency = Residency(ToyStore(1, 3), [1], LRU(), poison=True)
    loaded(residency, 0)
    weights = residency.acquire(ExpertKey(0, 0))
    residency.release(ExpertKey(0, 0))
    residency.place(ExpertKey(0, 1), 1, ())
    assert set(weights["all"].tolist()) == {255}


def test_forget_all_frees_everything_in_any_state():
    residency = Residency(ToyStore(1, 4), [3], LRU())
    loaded(residency, 0)
    residency.acquire(ExpertKey(0, 0))
    residency.place(ExpertKey(0, 1), 5, ())
    residency.forget_all()
    assert [residency.state(ExpertKey(0, e)) for e in range(4)] == ["absent"] * 4
    assert residency.place(ExpertKey(0, 3), 9, ()) == (0, None)


@pytest.mark.parametrize("slots", [[0], [1, 1], []])
def test_every_layer_needs_a_slot(slots):
    with pytest.raises(ValueError, match="at least one slot"):
        Residency(ToyStore(1, 2), slots, LRU())


@given(st.lists(st.integers(0, 5), max_size=30))
def test_lru_keeps_the_most_recent(uses):
    """Against the definition: with unlimited history, the victim is the one whose last use is earliest."""
    policy, keys = LRU(), [ExpertKey(0, e) for e in range(6)]
    for e in uses:
        policy.used(keys[e])
    last = {k: max((i for i, e in enumerate(uses) if e == k.expert), default=-1) for k in keys}
    assert policy.victim(keys) == min(keys, key=lambda k: (last[k], k))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_lfu_forgets_a_least_used_one(uses):
    policy, keys = LFU(), [ExpertKey(0, e) for e in range(4)]
    for e in uses:
        policy.used(keys[e])
    assert uses.count(policy.victim(keys).expert) == min(uses.count(e) for e in range(4))


def test_a_custom_policy_is_a_few_lines():
    class Lowest(LRU):
        name = "lowest id"

        def victim(self, candidates):
            return min(candidates)

    run = ToyRun(ToyStore(1, 4), [2], eviction=Lowest())
    run.run_pass(0, [call(0, [2, 3])])
    run.run_pass(1, [call(0, [1, 3])])
    assert run.finish().of_kind("evict")["expert"].tolist() == [2]
