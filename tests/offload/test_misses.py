"""Misses on the host: the split, the lane, the bytes it saves."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specter_lab.machines.simulated import CostTable, LaneCosts, SimulatedMachine
from specter_lab.machines.throttled import ThrottledMachine
from specter_lab.offload.misses import AlwaysHost, SplitByFinish
from specter_lab.offload.server import OffloadServer
from specter_lab.records import ExpertKey
from tests.toy import ToyRun, ToyStore, call, log


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.floats(0.5, 8), st.integers(0, 60))
def test_no_split_ends_earlier(rows, ratio, backlog):
    """Against all subsets: the later lane of the chosen one ends no later than that of any other."""
    machine = SimulatedMachine(link_gb_s=1e-3, latency_us=0, host_gb_s=ratio * 1e-3)
    machine._host_free = backlog
    missing = {ExpertKey(0, e): n for e, n in enumerate(rows)}

    def ends(hosted):
        link = (len(missing) - len(hosted)) * machine.copy_us(10)
        host = backlog + len(hosted) * machine.host_us(10) if hosted else 0.0
        return max(link, host)

    chosen = SplitByFinish().on_host(missing, lambda key: 10, lambda key: 10, machine)
    subsets = itertools.chain.from_iterable(itertools.combinations(missing, n) for n in range(len(missing) + 1))
    assert ends(chosen) <= min(ends(set(s)) for s in subsets) + 1e-9


def hosted_run(split, machine=None):
    run = ToyRun(ToyStore(1, 4), [2], machine)
    server = OffloadServer(run.prefetcher, run.machine, 0, 0, lambda c: (), split)
    done = []
    server.serve(call(0, [0, 1], [2, 2]), lambda expert, weights: done.append((expert, set(weights["all"].tolist()))))
    return run, sorted(done)


def test_timeline_by_hand():
    """A copy takes 20 us, the host 20/3: of three misses, two on the host (13.3) and one on the link (20)."""
    costs = LaneCosts(attention_us=10, expert_us=5)
    machine = SimulatedMachine(64 / 20_000, 0, CostTable(costs, costs))
    run, done = hosted_run(SplitByFinish(), machine)
    assert done == [(0, {1}), (1, {2}), (2, {3})]
    third = 20 / 3
    rounded = [(lane, name, round(a, 6), round(b, 6)) for lane, name, a, b in log(run.finish())]
    assert rounded == [
        ("target", "attention", 0, 10),
        ("host", "expert 0.0", 10, round(10 + third, 6)),
        ("link", "transfer 0.2", 10, 30),  # two rows use it: the likelier one to be wanted again is fetched
        ("target", "stall 0.2", 10, 30),
        ("host", "expert 0.1", round(10 + third, 6), round(10 + 2 * third, 6)),
        ("link", "transfer 0.0", 30, 50),  # nothing waits, and there is a free slot
        ("target", "expert 0.2", 30, 35),
    ]


def test_an_idle_link_fills_free_slots_and_evicts_nothing_for_it():
    """Two slots: of three experts on the host, the two of the lowest ids come; then nothing more does."""
    run, _ = hosted_run(AlwaysHost())
    run.machine._advance(1000.0)
    server = OffloadServer(run.prefetcher, run.machine, 1, 1, lambda c: (), AlwaysHost())
    server.serve(call(0, [3, 2], [1, 0]), lambda expert, weights: None)
    trace = run.finish()
    fills = trace.of_kind("transfer")
    assert fills[["expert", "reason", "outcome"]].values.tolist() == [[0, "fill", "used"], [1, "fill", "used"]]
    assert trace.of_kind("need").query("step == 1")["outcome"].tolist() == ["hit", "hit", "miss", "miss"]
    assert trace.of_kind("evict").empty and not run.prefetcher.waiting


def test_a_prediction_passes_a_fill():
    run, _ = hosted_run(AlwaysHost())
    run.want(1, (0, 3))
    run.machine._advance(1000.0)
    assert run.finish().of_kind("transfer")["reason"].tolist() == ["fill", "prefetch"]  # the first was under way


@pytest.mark.parametrize("machine", [None, ThrottledMachine(0.01)])
def test_everything_on_the_host_waits_for_no_copy(machine):
    run, done = hosted_run(AlwaysHost(), machine)
    assert done == [(0, {1}), (1, {2}), (2, {3})]
    trace = run.finish()
    assert set(trace.of_kind("transfer")["reason"]) <= {"fill"}
    hosted = trace.events[(trace.events["lane"] == "host")]
    assert hosted["expert"].tolist() == [0, 1, 2] and hosted["tokens"].tolist() == [1, 1, 2]
    assert trace.of_kind("need")["reason"].tolist() == ["host"] * 3


def test_a_failure_on_the_host_reaches_the_caller():
    run = ToyRun(ToyStore(1, 4), [2], ThrottledMachine(0.01))
    server = OffloadServer(run.prefetcher, run.machine, 0, 0, lambda c: (), AlwaysHost())

    def broken(expert, weights):
        raise MemoryError("no room for the rows")

    with pytest.raises(MemoryError, match="no room"):
        server.serve(call(0, [0, 1]), broken)
    run.machine.stop()
