"""The Chrome trace: nothing is lost, arrows are whole, hostile text survives, and the check finds what is broken."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specter_lab.observe.export import check_chrome_trace, count_events, save_chrome_trace, to_chrome_trace, write_whole
from specter_lab.observe.trace import Trace, TraceWriter
from tests.traces import EXPERT_BYTES, make_long_trace, make_trace

Chrome = dict[str, Any]


def of_phase(chrome: Chrome, *phases: str) -> list[dict[str, Any]]:
    return [event for event in chrome["traceEvents"] if event["ph"] in phases]


def track_names(chrome: Chrome) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in of_phase(chrome, "M") if event["name"] == "thread_name"}


def arrow_ends(chrome: Chrome) -> dict[int, list[tuple[str, dict[str, Any]]]]:
    """arrow id -> its ends, each with the event written before it: the one it is meant for."""
    ends: dict[int, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
    owner: dict[str, Any] = {}
    for event in chrome["traceEvents"]:
        if event["ph"] in ("X", "i"):
            owner = event
        elif event["ph"] in ("s", "t", "f"):
            ends[event["id"]].append((event["ph"], owner))
    return ends


def written_out() -> Trace:
    """One prefetch that is predicted, moved, and used; small enough to write every number down."""
    writer = TraceWriter("simulated")
    writer.add("draft", "head", 100.0, 110.0, step=1, tokens=1)
    writer.add("control", "predict", 110.0, 110.0, step=1, layer=0, expert=3, request_id=7, value=0.5)
    writer.add("link", "transfer", 110.0, 130.0, step=1, layer=0, expert=3, bytes=64, request_id=7, reason="prefetch")
    writer.add("target", "attention", 110.0, 125.0, step=1, layer=0, tokens=2)
    writer.add("target", "stall", 125.0, 130.0, step=1, layer=0, expert=3, request_id=7)
    writer.add("target", "expert", 130.0, 140.0, step=1, layer=0, expert=3, tokens=2, request_id=7)
    writer.add("control", "commit", 140.0, 140.0, step=1, tokens=2, value=1.0, outcome="step")
    writer.use(7)
    return writer.finish()


def test_a_small_trace_as_written_out() -> None:
    chrome = to_chrome_trace(written_out(), tokens=["a", "b"])
    tracks = track_names(chrome)
    assert [(tracks[e["tid"]], e["name"], e["ts"], e["dur"]) for e in of_phase(chrome, "X")] == [
        ("draft", "head", 0.0, 10.0),
        ("link", "transfer L0 E3", 10.0, 20.0),
        ("target", "attention L0", 10.0, 15.0),
        ("target", "stall L0 E3", 25.0, 5.0),
        ("target", "expert L0 E3", 30.0, 10.0),
    ]
    assert [(tracks[e["tid"]], e["name"], e["ts"]) for e in of_phase(chrome, "i")] == [
        ("control", "predict L0 E3", 10.0),
        ("control", "commit", 40.0),
    ]
    assert [(phase, tracks[owner["tid"]], owner["name"]) for phase, owner in arrow_ends(chrome)[0]] == [
        ("s", "control", "predict L0 E3"),
        ("t", "link", "transfer L0 E3"),
        ("f", "target", "expert L0 E3"),
    ]
    assert [(e["name"], e["ts"], e["args"]) for e in of_phase(chrome, "C")] == [
        ("resident expert", 0.0, {"bytes": 0}),
        ("resident expert", 30.0, {"bytes": 64}),
    ]
    assert of_phase(chrome, "i")[-1]["args"] == {"step": 1, "tokens": 2, "outcome": "step", "value": 1.0, "text": ["a", "b"]}
    assert chrome["otherData"] == {"machine": "simulated", "events": 7}


def test_tracks_are_named_and_ordered() -> None:
    chrome = to_chrome_trace(make_trace(2))
    order = {event["tid"]: event["args"]["sort_index"] for event in of_phase(chrome, "M") if event["name"] == "thread_sort_index"}
    names = track_names(chrome)
    assert [names[tid] for tid in sorted(order, key=lambda tid: order[tid])] == ["draft", "target", "link", "control"]


@pytest.mark.parametrize("trace", [make_trace(4), make_trace(2, layers=9, experts=64, per_token=8), Trace.of([], "simulated")])
def test_what_goes_in_comes_out(trace: Trace) -> None:
    chrome = to_chrome_trace(trace)
    check_chrome_trace(chrome)
    assert count_events(chrome) == len(trace)
    assert json.loads(json.dumps(chrome)) == chrome
    moved = trace.of_kind("transfer")["bytes"].sum()
    assert sum(event["args"].get("bytes", 0) for event in of_phase(chrome, "X")) == moved


def test_each_copy_has_the_arrow_of_its_request() -> None:
    trace = make_trace(4)
    copies = {row["request_id"]: row for row in trace.of_kind("transfer").to_dict("records")}
    asked = trace.of_kind("predict").groupby("request_id")["start_us"].min().to_dict()
    used = set(trace.of_kind("expert")["request_id"])
    expected = {
        request: ["predict"] * (asked.get(request, math.inf) <= copy["start_us"]) + ["transfer"] + ["expert"] * (request in used)
        for request, copy in copies.items()
    }
    found = {}
    for ends in arrow_ends(to_chrome_trace(trace)).values():
        owners = [owner for _, owner in ends]
        assert "".join(phase for phase, _ in ends) == ("sf" if len(ends) == 2 else "stf")
        assert len({owner["args"]["request_id"] for owner in owners}) == 1
        found[owners[0]["args"]["request_id"]] = [owner["cat"] for owner in owners]
        if owners[-1]["cat"] == "expert":
            assert owners[-2]["ts"] + owners[-2]["dur"] <= owners[-1]["ts"] + 1e-9  # no use before arrival
    assert found == {request: kinds for request, kinds in expected.items() if len(kinds) > 1}
    assert {len(kinds) for kinds in found.values()} == {2, 3}


def test_a_prediction_without_request_is_tied_by_its_place() -> None:
    rows = [
        ("control", "predict", 0.0, 0.0, 1, 5, 2, 4, 1, 0, -1, "", "correct", 0.5),
        ("link", "transfer", 1.0, 2.0, 1, 5, 2, 4, 0, 64, 0, "prefetch", "wasted", 0.0),
    ]
    assert [[phase for phase, _ in ends] for ends in arrow_ends(to_chrome_trace(Trace.of(rows, "simulated"))).values()] == [["s", "f"]]


def test_the_counter_never_falls_below_zero() -> None:
    writer = TraceWriter("simulated")
    writer.add("control", "evict", 1.0, 1.0, layer=0, expert=9, bytes=64)  # came with an earlier request
    writer.add("link", "transfer", 1.0, 4.0, layer=0, expert=3, bytes=64, request_id=0, reason="demand")
    chrome = to_chrome_trace(writer.finish())
    assert [event["args"]["bytes"] for event in of_phase(chrome, "C")] == [0, 64]
    held = [event["args"]["bytes"] for event in of_phase(to_chrome_trace(make_trace(5)), "C")]
    assert min(held) == 0 and max(held) <= 3 * 4 * EXPERT_BYTES  # the slots of make_trace


def test_copies_that_overlap_get_tracks_of_their_own() -> None:
    writer = TraceWriter("measured on two copy engines")
    for start, end in ((0.0, 10.0), (5.0, 15.0), (10.0, 12.0), (11.0, 20.0), (12.0, 13.0)):
        writer.add("link", "transfer", start, end, bytes=1, reason="demand")
    chrome = to_chrome_trace(writer.finish())
    check_chrome_trace(chrome)
    tracks = track_names(chrome)
    assert [(tracks[e["tid"]], e["ts"]) for e in of_phase(chrome, "X")] == [
        ("link", 0.0), ("link 2", 5.0), ("link", 10.0), ("link 3", 11.0), ("link", 12.0),
    ]  # fmt: skip


def test_marks_of_one_instant_dont_pile_up_too_high() -> None:
    writer = TraceWriter("simulated")
    for expert in range(1000):
        writer.add("control", "predict", 3.0, 3.0, layer=0, expert=expert)
    chrome = to_chrome_trace(writer.finish())
    check_chrome_trace(chrome)
    assert sorted(track_names(chrome).values()) == ["control", "control 2", "control 3", "control 4"]


def test_neighbours_stay_neighbours_when_times_are_truncated() -> None:
    writer, now = TraceWriter("throttled"), 1.7e9  # an epoch in us: large, and with digits below a nanosecond
    for number in range(3000):
        end = now + 0.3 + (number % 17) / 7.0
        writer.add("target", "attention", now, end, step=0, layer=0)
        now = end
    chrome = to_chrome_trace(writer.finish())
    check_chrome_trace(chrome)
    spans = [(int(event["ts"] * 1000), int(event["dur"] * 1000)) for event in of_phase(chrome, "X")]
    assert spans[0][0] == 0
    assert all(start + length == after for (start, length), (after, _) in itertools.pairwise(spans))


HOSTILE = ['"', "\\", "\n\t\x00\x1f", "🙂", "\ud83d", "</script><b>", "{'a': 1}", "", "\u2028"]


def test_hostile_text_survives(tmp_path: Path) -> None:
    trace = make_trace(3)
    count = int(trace.of_kind("commit")["tokens"].sum())
    tokens = (HOSTILE * count)[:count]
    hostile = Trace(trace.events, machine='mea"sured\non \ud800<b>')
    path = save_chrome_trace(hostile, tmp_path / "trace.json", tokens)
    chrome = json.loads(path.read_text("utf-8"))
    check_chrome_trace(chrome)
    texts = [text for event in of_phase(chrome, "i") for text in event["args"].get("text", ())]
    assert texts == [token.encode("utf-8", "backslashreplace").decode() for token in tokens]
    assert chrome["otherData"]["machine"] == 'mea"sured\non \\ud800<b>'
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"text of each generated token; 1 texts for 3 committed tokens; leave the prompt"):
        to_chrome_trace(Trace.of([("control", "commit", 0.0, 0.0, 0, -1, -1, -1, 3, 0, -1, "", "", 0.0)], "simulated"), ["one"])
    for start, end in ((0.0, math.nan), (5.0, 4.0), (math.inf, math.inf)):
        with pytest.raises(ValueError, match=r"finite times that don't run backwards; 1 of 1 have none, the first a 'head'"):
            to_chrome_trace(Trace.of([("target", "head", start, end, 0, -1, -1, -1, 1, 0, -1, "", "", 0.0)], "simulated"))


def test_a_value_that_json_lacks_becomes_text() -> None:
    chrome = to_chrome_trace(Trace.of([("control", "predict", 0.0, 0.0, 0, -1, 0, 0, 0, 0, -1, "", "", math.nan)], "simulated"))
    check_chrome_trace(chrome)
    assert of_phase(chrome, "i")[0]["args"]["value"] == "nan"


def test_an_unfinished_file_leaves_the_old_one(tmp_path: Path) -> None:
    path = write_whole(tmp_path / "kept.txt", "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new \ud800")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def first(chrome: Chrome, phase: str) -> dict[str, Any]:
    return next(event for event in chrome["traceEvents"] if event["ph"] == phase)


def stretch_first_span(chrome: Chrome) -> None:
    tid = first(chrome, "X")["tid"]
    span = next(event for event in chrome["traceEvents"] if event["ph"] == "X" and event["tid"] == tid)
    span["dur"] += 0.5


BREAKS: dict[str, Callable[[Chrome], object]] = {
    "disjoint or nested": stretch_first_span,
    "events in equal events out": lambda chrome: chrome["traceEvents"].remove(of_phase(chrome, "X")[-1]),
    "ended once": lambda chrome: chrome["traceEvents"].remove(of_phase(chrome, "f")[-1]),
    "begun once": lambda chrome: chrome["traceEvents"].remove(first(chrome, "s")),
    "within events": lambda chrome: first(chrome, "s").update(tid=first(chrome, "X")["tid"], ts=1e9),
    "never negative": lambda chrome: first(chrome, "C")["args"].update(bytes=-1),
    "finite numbers": lambda chrome: first(chrome, "X").update(ts="12.5"),
    "plain JSON": lambda chrome: first(chrome, "X").update(ts=math.nan),
    "in UTF-8": lambda chrome: first(chrome, "X").update(name="\ud800"),
    "reads back": lambda chrome: first(chrome, "X")["args"].update({1: 2}),
    "from the first event": lambda chrome: [
        event.update(ts=event["ts"] + 1e15) for event in of_phase(chrome, "X", "i", "s", "t", "f", "C")
    ],
    "has a thread_name": lambda chrome: first(chrome, "X").update(tid=99),
    "whole numbers": lambda chrome: first(chrome, "X").update(tid="target"),
    "a span, mark, arrow": lambda chrome: first(chrome, "X").update(ph="Q"),
    "names the machine": lambda chrome: chrome.pop("otherData"),
}


@pytest.mark.parametrize("rule", BREAKS)
def test_the_check_names_the_broken_rule(rule: str) -> None:
    chrome = copy.deepcopy(to_chrome_trace(make_trace(2)))
    check_chrome_trace(chrome)
    BREAKS[rule](chrome)
    with pytest.raises(ValueError, match=rule):
        check_chrome_trace(chrome)


def test_a_long_trace_is_exported_whole() -> None:
    trace = make_long_trace(20_000)
    chrome = to_chrome_trace(trace)
    check_chrome_trace(chrome)
    assert count_events(chrome) == len(trace) >= 20_000
