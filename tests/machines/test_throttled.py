"""The wall-clock machine: judged by invariants, by its pacing over a run, and by what it leaves behind."""

import threading
import time

import pytest
import torch

from specter_lab.machines.throttled import ThrottledMachine
from specter_lab.records import ExpertKey, Transfer
from tests.invariants import check_trace
from tests.toy import ToyRun, ToyStore, call


class Copies:
    """A link source with ``count`` copies of ``size`` bytes, all wanted at once."""

    def __init__(self, count: int, size: int) -> None:
        self.host = torch.randint(0, 255, (count, size), dtype=torch.uint8)
        self.device = torch.zeros_like(self.host)
        self.issued, self.landed = 0, []

    def next_transfer(self):
        if self.issued == len(self.host):
            return None
        n, self.issued = self.issued, self.issued + 1
        return Transfer(n, ExpertKey(0, n), self.host.shape[1], "demand", 0, n, source=self.host[n], destination=self.device[n])

    def arrived(self, transfer):
        self.landed.append(transfer.request_id)


def link_threads():
    return [t for t in threading.enumerate() if t.name == "specter-link"]


def test_copies_are_real_and_paced_within_three_percent():
    """40 copies of 100 kB at 50 MB/s take 80 ms: late wake-ups of the thread must not add up."""
    copies, machine = Copies(40, 100_000), ThrottledMachine(0.05)
    machine.start(copies)
    machine.notify()
    machine.wait(ExpertKey(0, 39), 39, step=0)
    machine.stop()
    transfers = machine.trace.finish().of_kind("transfer")
    assert torch.equal(copies.host, copies.device)
    assert copies.landed == list(range(40))
    span_s = (transfers["end_us"].max() - transfers["start_us"].min()) / 1e6
    assert transfers["bytes"].sum() / span_s == pytest.approx(0.05e9, rel=0.03)
    assert not link_threads()


def test_short_copies_are_carried_out_by_the_thread_that_asks_and_never_faster_than_the_link():
    copies, machine = Copies(40, 20_000), ThrottledMachine(1.0)  # 20 us each
    machine.start(copies)
    machine.notify()
    assert copies.landed == list(range(40))  # before notify returns: no other thread took part
    machine.stop()
    trace = machine.trace.finish()
    transfers, stalls = trace.of_kind("transfer"), trace.of_kind("stall")
    assert torch.equal(copies.host, copies.device)
    assert transfers["end_us"].max() - transfers["start_us"].min() >= 40 * 20 - 1
    assert stalls["request_id"].tolist() == transfers["request_id"].tolist()
    assert stalls["end_us"].tolist() == transfers["end_us"].tolist()


def test_invariants_hold_on_the_wall_clock():
    """Case 18: link thread and compute share one owner of the slots' states; nothing is served before it arrived."""
    run = ToyRun(ToyStore(3, 6, size=4096), [2, 1, 3], ThrottledMachine(0.02))
    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        picks = torch.randint(0, 6, (3, 4, 2), generator=generator).tolist()
        run.want(step, *((layer, picks[layer][0][0]) for layer in range(3)))
        time.sleep(0.001)
        run.machine.compute("draft", "attention", step=step, tokens=1)
        run.run_pass(step, [call(layer, *rows) for layer, rows in enumerate(picks)])
    trace = run.finish()
    check_trace(trace, [2, 1, 3], [4096] * 3)
    assert (trace.of_kind("transfer")["reason"] == "prefetch").any()
    assert not link_threads()


def test_a_failing_source_reaches_the_waiting_thread():
    class Broken(Copies):
        def next_transfer(self):
            raise OSError("the file is gone")

    machine = ThrottledMachine(0.05)
    machine.start(Broken(1, 10))
    with pytest.raises(RuntimeError, match="the file is gone"):
        machine.wait(ExpertKey(0, 0), 0, step=0)
    machine.stop()
    assert not link_threads()


def test_stop_twice_and_restart():
    machine = ThrottledMachine(0.05)
    for _ in range(2):
        copies = Copies(3, 1000)
        machine.start(copies)
        machine.notify()
        machine.wait(ExpertKey(0, 2), 2, step=0)
        machine.stop()
        machine.stop()
        assert copies.landed == [0, 1, 2]
    machine.close()
    assert not link_threads()


@pytest.mark.parametrize(("gb_s", "latency"), [(0, 0), (float("nan"), 0), (0.05, -1)])
def test_an_impossible_link_is_refused(gb_s, latency):
    with pytest.raises(ValueError, match="bandwidth above 0"):
        ThrottledMachine(gb_s, latency)
