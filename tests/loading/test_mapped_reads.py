"""A mapped store's reads are a lane of the timeline: before the copy of the same request, never within it."""

from __future__ import annotations

import pytest

import specter_lab as sl
from specter_lab.observe.export import check_chrome_trace
from tests.invariants import check_trace
from tests.loading.conftest import IDS


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("mapped")
    sl.prepare_moe(checkpoint("qwen3_moe"), path)
    return path


def run_of(moe, machine):
    with sl.Pipeline(moe, slots=2, predictor=sl.NextLayerGate(moe), machine=machine) as pipeline:
        run = pipeline.generate(IDS, max_new_tokens=6, do_sample=False)
        check_trace(run.trace, pipeline.plan.slots, [moe.store.blob_bytes(layer) for layer in range(moe.layers)])
    return run


MACHINES = {
    "simulated": lambda: sl.SimulatedMachine(disk_gb_s=0.5),
    "copied by the link's thread": lambda: sl.ThrottledMachine(0.05),
    "copied by the one that asks": lambda: sl.ThrottledMachine(1000.0),
}


@pytest.mark.parametrize("kind", MACHINES)
def test_each_read_ends_as_its_copy_begins(folder, kind):
    machine = MACHINES[kind]()
    moe = sl.load_moe(folder, mapped=True)
    assert moe.store.mapped and not sl.load_moe(folder).store.mapped
    run = run_of(moe, machine)
    reads, copies = (run.trace.of_kind(kind).set_index("request_id") for kind in ("read", "transfer"))
    assert len(reads) and set(reads["lane"]) == {"disk"} and reads.index.is_unique
    assert set(reads.index) <= set(copies.index)
    same = copies.loc[reads.index]
    assert (reads["end_us"] <= same["start_us"] + 1e-6).all() and (reads["bytes"] == same["bytes"]).all()
    assert (reads[["layer", "expert", "reason"]] == same[["layer", "expert", "reason"]]).all().all()
    assert run.ids == run_of(sl.load_moe(folder), sl.SimulatedMachine()).ids


def test_simulated_the_page_cache_keeps_what_was_read_once(folder):
    moe = sl.load_moe(folder, mapped=True)
    run = run_of(moe, sl.SimulatedMachine(disk_gb_s=0.5))
    reads, copies = run.trace.of_kind("read"), run.trace.of_kind("transfer")
    assert not reads.duplicated(["layer", "expert"]).any() and len(copies) > len(reads)
    assert set(zip(reads["layer"], reads["expert"], strict=True)) == set(zip(copies["layer"], copies["expert"], strict=True))
    taken = reads["end_us"] - reads["start_us"]
    assert taken.tolist() == pytest.approx((reads["bytes"] / 500.0).tolist())


def test_throttled_every_copy_touches_the_file(folder):
    run = run_of(sl.load_moe(folder, mapped=True), sl.ThrottledMachine(0.5))
    assert set(run.trace.of_kind("read")["request_id"]) == set(run.trace.of_kind("transfer")["request_id"])


def test_a_store_in_memory_reads_nothing(folder):
    for machine in (sl.SimulatedMachine(), sl.ThrottledMachine(0.5)):
        trace = run_of(sl.load_moe(folder), machine).trace
        assert len(trace.of_kind("transfer")) and not len(trace.of_kind("read"))


def test_pictures_and_exports_have_the_lane(folder):
    trace = run_of(sl.load_moe(folder, mapped=True), sl.SimulatedMachine(disk_gb_s=0.5)).trace
    assert "read" in {bars.name for bars in sl.plot_timeline(trace).data}
    chrome = sl.to_chrome_trace(trace)
    check_chrome_trace(chrome)
    assert "disk" in {event["args"].get("name") for event in chrome["traceEvents"] if event["ph"] == "M"}
