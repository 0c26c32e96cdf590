"""What crosses the link next, and what doesn't."""

from specter_lab.records import ExpertKey
from tests.invariants import check_trace
from tests.toy import ToyRun, ToyStore, call


def order(trace):
    transfers = trace.of_kind("transfer")
    return list(zip(transfers["layer"], transfers["expert"], strict=True))


def test_the_same_prediction_twice_is_one_copy():
    run = ToyRun(ToyStore(1, 4), [3])
    for _ in range(3):
        run.want(1, (0, 2))
    run.run_pass(1, [call(0, [2, 2])])
    trace = run.finish()
    assert order(trace) == [(0, 2)]
    assert trace.of_kind("predict")["request_id"].tolist() == [0, 0, 0]


def test_earlier_layers_first_then_the_more_valued():
    run = ToyRun(ToyStore(2, 4), [4, 4])
    run.want(1, (0, 0))  # on the link at once
    run.want(1, (1, 3), (0, 1), probability=0.9)
    run.want(1, (0, 2), probability=0.9, position=0)
    run.want(1, (0, 2), probability=0.9, position=1)  # two positions want it
    run.machine.compute("draft", "attention", step=1, tokens=0)
    run.run_pass(1, [call(0, [1, 2]), call(1, [3, 3])])
    assert order(run.finish()) == [(0, 0), (0, 2), (0, 1), (1, 3)]


def test_what_a_layer_did_not_need_is_dropped_and_never_moved():
    run = ToyRun(ToyStore(1, 4), [4])
    run.want(1, (0, 0), (0, 1), (0, 2))
    run.run_pass(1, [call(0, [0, 0])])
    trace = run.finish()
    cancelled = trace.of_kind("cancel")
    assert cancelled["expert"].tolist() == [1, 2]
    assert cancelled["reason"].tolist() == ["not needed"] * 2
    assert order(trace) == [(0, 0)]


def test_a_decided_step_cancels_its_intents_but_not_later_ones():
    run = ToyRun(ToyStore(2, 4), [4, 4])
    run.want(1, (0, 0))
    run.want(1, (1, 1))
    run.want(2, (1, 2))
    run.prefetcher.cancel(1, "decided")
    assert run.prefetcher.waiting
    run.machine.compute("draft", "attention", step=2)
    run.run_pass(2, [call(0, [0, 0]), call(1, [2, 2])])
    trace = run.finish()
    assert order(trace) == [(0, 0), (1, 2)]
    assert trace.of_kind("cancel")["reason"].tolist() == ["decided"]


def test_prefetches_neither_evict_what_is_wanted_nor_take_the_last_slot():
    """Case 19. Two slots, three wanted: the first stays; the second may load once the first is resident; the third has no place."""
    run = ToyRun(ToyStore(1, 4), [2])
    run.want(1, (0, 0), (0, 1), (0, 2))
    for _ in range(10):
        run.machine.compute("draft", "attention", step=1)
    assert run.residency.residents(0) == [0, 1]
    run.run_pass(1, [call(0, [0, 1], [2, 2])])
    trace = run.finish()
    assert trace.of_kind("need")["outcome"].tolist() == ["hit", "hit", "miss"]
    check_trace(trace, [2], [64])


def test_an_expert_forgotten_and_wanted_again_is_a_new_request():
    run = ToyRun(ToyStore(1, 3), [1])
    for step, expert in enumerate([0, 1, 0]):
        run.run_pass(step, [call(0, [expert, expert])])
    trace = run.finish()
    assert order(trace) == [(0, 0), (0, 1), (0, 0)]
    check_trace(trace, [1], [64])


def test_warm_residents_are_hits_of_no_request():
    run = ToyRun(ToyStore(1, 3), [2])
    run.run_pass(0, [call(0, [0, 1])])
    run.finish()
    run.residency.new_request()
    run.prefetcher.reset()
    run.machine.start(run.prefetcher)
    run.run_pass(0, [call(0, [0, 0])])
    need = run.finish().of_kind("need").iloc[0]
    assert (need["outcome"], need["request_id"]) == ("hit", -1)
    assert run.residency.state(ExpertKey(0, 1)) == "resident"
