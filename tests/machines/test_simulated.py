"""The virtual clock, compared with timelines worked out by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_lab.machines.simulated import CostTable, LaneCosts, SimulatedMachine
from tests.invariants import check_trace
from tests.toy import ToyRun, ToyStore, call, log


def test_on_demand_timeline_by_hand():
    """Attention 10 us, an expert 5, the head 3, a copy 20; two slots a layer."""
    run = ToyRun(ToyStore(2, 3), [2, 2])
    run.run_pass(0, [call(0, [0, 2]), call(1, [1, 1])])
    assert log(run.finish()) == [
        ("target", "attention", 0, 10),
        ("link", "transfer 0.0", 10, 30),  # both demanded at 10, one at a time on the link
        ("target", "stall 0.0", 10, 30),
        ("link", "transfer 0.2", 30, 50),
        ("target", "expert 0.0", 30, 35),  # computes while the next is on its way
        ("target", "stall 0.2", 35, 50),
        ("target", "expert 0.2", 50, 55),
        ("target", "attention", 55, 65),
        ("link", "transfer 1.1", 65, 85),
        ("target", "stall 1.1", 65, 85),
        ("target", "expert 1.1", 85, 90),
        ("target", "head", 90, 93),
    ]


def test_prefetch_overlaps_and_a_demand_passes_what_is_queued():
    """Predicted before the pass: 0.1 and 1.0 (needed), 1.2 (not). Layer 0 also needs 0.2, which nobody predicted."""
    run = ToyRun(ToyStore(2, 3), [2, 2])
    run.want(1, (0, 1), (1, 0), (1, 2))
    run.machine.compute("draft", "attention", step=1, tokens=1)  # 10 us of drafting
    run.run_pass(1, [call(0, [1, 2]), call(1, [0, 0])])
    trace = run.finish()
    assert log(trace) == [
        ("draft", "attention", 0, 10),
        ("link", "transfer 0.1", 0, 20),
        ("target", "attention", 10, 20),
        ("link", "transfer 1.0", 20, 40),  # taken at 20, just before layer 0 asks: a demand waits for one copy at most
        ("target", "expert 0.1", 20, 25),
        ("target", "stall 0.2", 25, 60),
        ("link", "transfer 0.2", 40, 60),  # passes 1.2, which was queued before it
        ("link", "transfer 1.2", 60, 80),
        ("target", "expert 0.2", 60, 65),
        ("target", "attention", 65, 75),
        ("target", "expert 1.0", 75, 80),
        ("target", "head", 80, 83),
    ]
    needs = trace.of_kind("need")
    assert list(zip(needs["layer"], needs["expert"], needs["outcome"], strict=True)) == [(0, 1, "hit"), (0, 2, "miss"), (1, 0, "hit")]
    outcomes = trace.of_kind("transfer").set_index(["layer", "expert"])["outcome"].to_dict()
    assert outcomes == {(0, 1): "used", (1, 0): "used", (0, 2): "used", (1, 2): "wasted"}
    check_trace(trace, [2, 2], [64, 64])


def test_late_arrival_counts_as_late_and_is_not_fetched_again():
    run = ToyRun(ToyStore(1, 3), [2])
    run.want(1, (0, 1))
    run.run_pass(1, [call(0, [1, 1])])
    trace = run.finish()
    assert log(trace) == [
        ("link", "transfer 0.1", 0, 20),
        ("target", "attention", 0, 10),
        ("target", "stall 0.1", 10, 20),
        ("target", "expert 0.1", 20, 25),
        ("target", "head", 25, 28),
    ]
    assert trace.of_kind("need")["outcome"].tolist() == ["late"]


def test_waves_with_one_slot_fetch_each_expert_once():
    """Case 20."""
    run = ToyRun(ToyStore(1, 4), [1])
    run.run_pass(0, [call(0, [0, 1], [2, 3], [0, 3])])
    trace = run.finish()
    assert run.served == [(0, 0, e) for e in range(4)]
    assert trace.of_kind("transfer")["expert"].tolist() == [0, 1, 2, 3]
    check_trace(trace, [1], [64])


@st.composite
def runs(draw):
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(2, 6))
    slots = draw(st.lists(st.integers(1, experts), min_size=layers, max_size=layers))
    expert = st.integers(0, experts - 1)
    key = st.tuples(st.integers(0, layers - 1), expert)
    row = st.lists(expert, min_size=2, max_size=2)
    one_pass = st.tuples(
        st.lists(key, max_size=8),  # predicted while drafting
        st.lists(st.lists(row, min_size=1, max_size=4), min_size=layers, max_size=layers),  # rows of each layer
        st.dictionaries(st.integers(0, layers - 1), st.lists(key, max_size=4), max_size=2),  # predicted within the pass
    )
    return layers, experts, slots, draw(st.lists(one_pass, min_size=1, max_size=4)), draw(st.sampled_from([0.001, 0.01, 1.0]))


def simulate(layers, experts, slots, passes, link_gb_s):
    costs = LaneCosts(attention_us=10, expert_us=5, head_us=3)
    run = ToyRun(ToyStore(layers, experts), slots, SimulatedMachine(link_gb_s, latency_us=1, costs=CostTable(costs, costs)))
    for step, (predicted, rows, ahead) in enumerate(passes):
        run.want(step, *predicted)
        run.machine.compute("draft", "attention", step=step, tokens=1)
        run.run_pass(step, [call(layer, *positions) for layer, positions in enumerate(rows)], ahead)
    return run, run.finish()


@settings(max_examples=150, deadline=None)
@given(runs())
def test_invariants_and_repeatability(case):
    """Any mixture of predictions and needs keeps every invariant, serves all, and gives the same trace twice."""
    layers, _, slots, passes, _ = case
    run, trace = simulate(*case)
    check_trace(trace, slots, [64] * layers)
    wanted = {
        (step, layer, e)
        for step, (_, rows, _) in enumerate(passes)
        for layer, positions in enumerate(rows)
        for row in positions
        for e in row
    }
    assert sorted(run.served) == sorted(wanted)
    assert trace.events.to_csv() == simulate(*case)[1].events.to_csv()


def test_a_wait_that_cannot_end_is_an_error_not_a_hang():
    """Case 19."""
    run = ToyRun(ToyStore(1, 2), [1])
    with pytest.raises(RuntimeError, match="A wait must end"):
        run.machine.wait((0, 1), 99, step=0)


@pytest.mark.parametrize(("gb_s", "latency"), [(0, 0), (-1, 0), (float("nan"), 0), (1, -1)])
def test_an_impossible_link_is_refused(gb_s, latency):
    with pytest.raises(ValueError, match="bandwidth above 0"):
        SimulatedMachine(gb_s, latency)
