"""What compute waited for, what wrong predictions cost, where the time went: by hand, and as sums that must agree."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_lab.machines.simulated import CostTable, LaneCosts, SimulatedMachine
from specter_lab.machines.throttled import ThrottledMachine
from specter_lab.observe.analysis import critical_path, mispredictions, shares
from specter_lab.observe.metrics import summarize
from specter_lab.observe.trace import Trace, TraceWriter
from specter_lab.offload.misses import AlwaysHost, SplitByFinish
from specter_lab.offload.server import OffloadServer
from specter_lab.records import ExpertKey, Prediction
from tests.toy import ToyRun, ToyStore, call
from tests.traces import make_trace


def by_hand() -> Trace:
    """Two steps over two layers. Every copy of this run is one of four kinds of blame: see the comments."""
    writer = TraceWriter("by hand")

    def busy(lane, kind, start, end, **fields):
        writer.add(lane, kind, start, end, **fields)

    def copy(start, end, request_id, layer, expert, reason, step):
        busy("link", "transfer", start, end, step=step, layer=layer, expert=expert, bytes=100, request_id=request_id, reason=reason)

    def instant(kind, at, **fields):
        writer.add("control", kind, at, at, **fields)

    busy("target", "attention", 0, 10, step=0)
    instant("commit", 10, step=0, tokens=1, outcome="first")
    # step 1: while 10 us are drafted, 0.7 (which the pass won't need) takes the slot of 0.4
    busy("draft", "attention", 10, 20, step=1)
    instant("evict", 12, layer=0, expert=4, bytes=100, request_id=0, reason="prefetch")
    copy(12, 32, 0, 0, 7, "prefetch", 1)
    # layer 0 asks for 0.1 at 24: 8 us behind 0.7, then 10 of its own
    busy("target", "attention", 20, 24, step=1, layer=0)
    instant("need", 24, step=1, layer=0, expert=1, request_id=2, outcome="miss")
    busy("target", "stall", 24, 42, step=1, layer=0, expert=1, request_id=2)
    copy(32, 42, 2, 0, 1, "demand", 1)
    busy("target", "expert", 42, 47, step=1, layer=0, expert=1, request_id=2)
    # layer 1 needs 1.2, rightly predicted and late: 8 us of the copy lie beside compute, 12 don't
    copy(42, 62, 1, 1, 2, "prefetch", 1)
    busy("target", "attention", 47, 50, step=1, layer=1)
    instant("need", 50, step=1, layer=1, expert=2, request_id=1, outcome="late")
    busy("target", "stall", 50, 62, step=1, layer=1, expert=2, request_id=1)
    busy("target", "expert", 62, 65, step=1, layer=1, expert=2, request_id=1)
    busy("target", "head", 65, 66, step=1)
    instant("commit", 66, step=1, tokens=2, outcome="step")
    # step 2: 0.4, evicted by the wrong prefetch, is loaded again
    busy("target", "attention", 66, 70, step=2, layer=0)
    instant("need", 70, step=2, layer=0, expert=4, request_id=3, outcome="miss")
    busy("target", "stall", 70, 80, step=2, layer=0, expert=4, request_id=3)
    copy(70, 80, 3, 0, 4, "demand", 2)
    busy("target", "expert", 80, 83, step=2, layer=0, expert=4, request_id=3)
    # layer 1 needs 1.5, which the host computes
    busy("target", "attention", 83, 84, step=2, layer=1)
    instant("need", 84, step=2, layer=1, expert=5, reason="host", outcome="miss")
    busy("host", "expert", 84, 90, step=2, layer=1, expert=5)
    busy("target", "stall", 84, 90, step=2, layer=1, reason="host")
    instant("commit", 90, step=2, tokens=1, outcome="step")
    for request_id in (1, 2, 3):
        writer.use(request_id)
    return writer.finish()


def test_critical_path_by_hand():
    path = critical_path(by_hand())
    columns = ["step", "layer", "expert", "request_id", "reason", "outcome", "bytes", "transfer_us", "exposed_us", "hidden_us"]
    assert path[columns].values.tolist() == [
        [1, 0, 7, 0, "prefetch", "wasted", 100, 20, 8, 12],  # nobody waited for it, but 0.1 queued behind it
        [1, 0, 1, 2, "demand", "used", 100, 10, 10, 0],
        [1, 1, 2, 1, "prefetch", "used", 100, 20, 12, 8],
        [2, 0, 4, 3, "demand", "used", 100, 10, 10, 0],
        [2, 1, -1, -1, "host", "", 0, 0, 6, 0],
    ]


def test_mispredictions_by_hand():
    total = {
        "prefetches": 2, "wrong": 1, "wasted_bytes": 100, "delayed": 1, "delayed_us": 8.0, "stalled_us": 8.0,
        "reloads": 1, "reloaded_bytes": 100,
    }  # fmt: skip
    nothing = dict.fromkeys(total, 0)
    assert mispredictions(by_hand()).to_dict("index") == {"all": total}
    assert mispredictions(by_hand(), by="step").to_dict("index") == {1: total}
    assert mispredictions(by_hand(), by="layer").to_dict("index") == {0: total | {"prefetches": 1}, 1: nothing | {"prefetches": 1}}


def test_shares_by_hand():
    """80 us from the first commit to the last: 10 of drafting, 24 of the target's compute, stalls of 18 + 12 + 10 + 6."""
    assert shares(by_hand()) == {"draft": 10 / 80, "verify": 24 / 80, "stall": 46 / 80}


def test_a_prefetch_that_a_later_pass_uses_is_wrong_but_not_wasted():
    """0.3 is predicted for step 1, which needs 0.0; step 2 uses it. It evicted nothing, and 0.0 waited 10 us for it."""
    run = ToyRun(ToyStore(1, 4), [2])  # attention 10 us, an expert 5, a copy 20
    run.want(1, (0, 3))
    run.run_pass(1, [call(0, [0, 0])])
    run.run_pass(2, [call(0, [3, 3])])
    costs = mispredictions(run.finish()).iloc[0]
    assert (costs["wrong"], costs["wasted_bytes"], costs["reloads"]) == (1, 0, 0)
    assert (costs["delayed"], costs["delayed_us"], costs["stalled_us"]) == (1, 10.0, 10.0)


def test_a_wrong_prefetch_that_costs_a_slot_by_hand():
    """Both slots hold 0 and 1; the prefetch of 3 evicts 0, which the pass needs: one reload, 10 us behind the prefetch."""
    run = ToyRun(ToyStore(1, 4), [2])
    run.run_pass(1, [call(0, [0, 1])])
    run.want(2, (0, 3))
    run.run_pass(2, [call(0, [0, 0])])
    costs = mispredictions(run.finish()).iloc[0]
    assert costs.to_dict() == {
        "prefetches": 1, "wrong": 1, "wasted_bytes": 64, "delayed": 1, "delayed_us": 10.0, "stalled_us": 10.0,
        "reloads": 1, "reloaded_bytes": 64,
    }  # fmt: skip


def test_an_idle_link_is_the_awaited_copys_and_what_starts_later_is_not_to_blame():
    """A measured machine: the link wakes up 3 us late, compute 1 us late, when the next copy is on its way already."""
    writer = TraceWriter("measured")
    writer.add("target", "stall", 0, 10, layer=0, expert=1, request_id=0)
    writer.add("link", "transfer", 3, 9, layer=0, expert=1, bytes=8, request_id=0, reason="demand")
    writer.add("link", "transfer", 9, 15, layer=0, expert=2, bytes=8, request_id=1, reason="prefetch")
    writer.add("target", "stall", 20, 21, layer=0, expert=3, request_id=7)  # of a copy that the trace lacks
    path = critical_path(writer.finish())
    assert path[["request_id", "transfer_us", "exposed_us", "hidden_us"]].values.tolist() == [[0, 6, 10, 0], [1, 6, 0, 6], [7, 0, 1, 0]]


def random_run(seed: int, machine=None) -> Trace:
    """Three passes over two layers with random needs and predictions, each committing a token; some misses on the host."""
    draw, costs = random.Random(seed), LaneCosts(attention_us=10, expert_us=5, head_us=3)
    run = ToyRun(ToyStore(2, 5), [2, 3], machine or SimulatedMachine(draw.choice([0.002, 0.02]), 1, costs=CostTable(costs, costs)))
    split = draw.choice([None, SplitByFinish(), AlwaysHost()])

    def keys(most):
        return [(draw.randrange(2), draw.randrange(5)) for _ in range(draw.randrange(most))]

    for step in range(3):
        run.want(step, *keys(6))
        run.machine.compute("draft", "attention", step=step, tokens=1)
        ahead = [Prediction(step, 0, ExpertKey(*key), 1.0) for key in keys(4)]
        server = OffloadServer(run.prefetcher, run.machine, step, 0, lambda c, ahead=ahead: ahead if c.layer == 0 else [], split)
        for layer in range(2):
            rows = [[draw.randrange(5), draw.randrange(5)] for _ in range(draw.randint(1, 3))]
            server.serve(call(layer, *rows), lambda expert, weights: None)
        run.prefetcher.cancel(step, "decided")
        run.machine.mark("commit", step=step, tokens=1, outcome="step" if step else "first")
    return run.finish()


def check_sums(trace: Trace) -> None:
    path, stalls, copies = critical_path(trace), trace.of_kind("stall"), trace.of_kind("transfer")
    assert path["exposed_us"].sum() == pytest.approx((stalls["end_us"] - stalls["start_us"]).sum())
    assert (path[["exposed_us", "hidden_us"]] > -1e-6).all(axis=None) and path["bytes"].sum() == copies["bytes"].sum()
    assert path["transfer_us"].sum() == pytest.approx((copies["end_us"] - copies["start_us"]).sum())
    total = mispredictions(trace).iloc[0]
    by_step, by_layer = mispredictions(trace, by="step").sum(), mispredictions(trace, by="layer").sum()
    for name in total.index.drop("delayed"):  # which counts a demand once a group
        assert by_step[name] == pytest.approx(total[name]) and by_layer[name] == pytest.approx(total[name])
    assert total["wrong"] <= total["prefetches"] and total["wasted_bytes"] <= copies["bytes"].sum()
    assert sum(shares(trace).values()) == pytest.approx(1)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_sums_agree_on_any_simulated_run(seed):
    trace = random_run(seed)
    check_sums(trace)
    stalls = trace.of_kind("stall").query("reason != 'host'")
    assert critical_path(trace).query("bytes > 0")["exposed_us"].sum() == pytest.approx((stalls["end_us"] - stalls["start_us"]).sum())
    figures, parts = summarize(trace), shares(trace)
    assert parts["stall"] * figures["tpot_ms"] <= figures["exposed_ms_per_token"] + 1e-9
    assert parts["draft"] * figures["tpot_ms"] == pytest.approx(figures["draft_ms_per_token"])


@pytest.mark.parametrize("seed", range(3))
def test_sums_agree_on_other_machines_traces(seed):
    check_sums(random_run(seed, ThrottledMachine(0.001)))
    check_sums(make_trace(seed=seed, draft_length=seed + 1))


def test_a_trace_without_copies_has_nothing_to_show():
    empty = Trace.of([], "nothing")
    assert critical_path(empty).empty and not mispredictions(empty).iloc[0].any() and mispredictions(empty, by="layer").empty
    with pytest.raises(ValueError, match="this run has 0 commits"):
        shares(empty)
    with pytest.raises(ValueError, match="got 'expert'"):
        mispredictions(empty, by="expert")
