"""What is wanted: its order, and the host's share of it."""

from hypothesis import given
from hypothesis import strategies as st

from specter_lab.offload.expected_use import ExpectedUse
from specter_lab.offload.intents import Intents
from specter_lab.records import ExpertKey, Prediction


def intents_of(*wanted, present=()):
    """(layer, expert, position) triples; odds 1."""
    intents = Intents(3, lambda key: "resident" if key in present else "absent")
    for layer, expert, position in wanted:
        intents.want(Prediction(1, position, ExpertKey(layer, expert), 1.0))
    return intents


def test_without_a_host_the_first_layer_comes_first_and_its_most_used_expert():
    intents = intents_of((1, 5, 0), (0, 2, 0), (0, 3, 0), (0, 3, 1))
    assert next(iter(intents.urgent(0.0))) == ExpertKey(0, 3)


def test_each_layer_keeps_its_share_for_the_host():
    """4 + 1 + 1 missing over 3 layers, half for the host: one each. Layer 0 has more than one; then all are down to it."""
    intents = intents_of(*((0, e, 0) for e in range(4)), (1, 0, 0), (2, 0, 0))
    assert [key.layer for key in intents.urgent(0.5)] == [0, 1, 2]
    few = intents_of((0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 2, 0))
    assert next(iter(few.urgent(0.5))).layer == 1  # 4 * 0.5 / 2 = 1: layer 0 has no more than that


def test_what_comes_and_goes_is_followed():
    present = set()
    intents = intents_of((0, 1, 0), (0, 2, 0), present=present)
    present.add(ExpertKey(0, 1))
    intents.moved(ExpertKey(0, 1))
    assert intents.missing(0) == 1 and list(intents.urgent(0.0)) == [ExpertKey(0, 2)]
    present.clear()
    intents.moved(ExpertKey(0, 1))
    assert intents.missing(0) == 2
    assert set(intents.drop(0, up_to_step=1)) == {1, 2} and not intents and intents.missing(0) == 0


def test_the_pass_after_the_coming_one_waits_for_its_turn_in_each_layer():
    """Layer 0 has run pass 1 and may look at pass 2; layer 1 hasn't. All that pass 1 lacks comes before it."""
    intents = intents_of((0, 1, 0), (1, 2, 0))
    assert set(intents.drop(0, up_to_step=1)) == {1}
    assert intents.want(Prediction(2, 5, ExpertKey(0, 3), 1.0)) is not None
    assert intents.want(Prediction(2, 5, ExpertKey(1, 4), 1.0)) is None and intents.value(ExpertKey(1, 4)) == 0.0
    assert intents.missing(1) == 1 and list(intents.urgent(0.5)) == [ExpertKey(1, 2), ExpertKey(0, 3)]
    assert set(intents.drop(1, up_to_step=1)) == {2} and intents.value(ExpertKey(1, 4)) == 1.0
    assert list(intents.urgent(0.0)) == [ExpertKey(0, 3), ExpertKey(1, 4)]
    assert set(intents.drop(0, 2)) == {3} and set(intents.drop(1, 2)) == {4} and not intents
    intents = intents_of((1, 2, 0))
    intents.want(Prediction(2, 5, ExpertKey(1, 4), 1.0))
    assert set(intents.drop(1, up_to_step=2)) == {2} and not intents, "a rejection takes what waits, too"


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 3))), st.floats(0, 1))
def test_the_link_never_idles_while_something_is_missing(wanted, share):
    intents = intents_of(*wanted)
    layers = {layer for layer, _, _ in wanted}
    assert {key.layer for key in intents.urgent(share)} == layers


class View:
    def experts(self, layer):
        return 4

    def expected_uses(self, key):
        return 2.0 if key.expert == 3 else 0.0


def test_eviction_keeps_what_the_window_wants_then_what_is_frequent():
    policy = ExpectedUse(half_life=1.0)
    policy.bind(View())
    for expert in (0, 0, 0, 1, 2, 2):
        policy.used(ExpertKey(0, expert))
    everything = [ExpertKey(0, e) for e in range(4)]
    assert policy.victim(everything) == ExpertKey(0, 1)  # 3 was never used, but is wanted
    assert policy.victim([everything[0], everything[2]]) == ExpertKey(0, 0)  # three old uses count less than two fresh ones
    for _ in range(12):  # three half-lives
        policy.used(ExpertKey(0, 2))
    assert policy.frequency(ExpertKey(0, 0)) < 0.5
    policy.new_request()
    assert policy.frequency(ExpertKey(0, 2)) == 0.0
