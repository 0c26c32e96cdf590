"""A trace as a Chrome trace file: open it in https://ui.perfetto.dev, or drag it into chrome://tracing.

One track a lane, a span for what lasts, a mark for what doesn't, arrows prediction -> transfer -> use, and a counter
of the expert bytes on the device. Perfetto drops, without a word, spans that partly overlap on a track; it
truncates times to nanoseconds and sorts what happens at one instant by its place in the file. All three decide how
this file is written, and ``check_chrome_trace`` reads it the way Perfetto does.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

from specter_lab.observe.chrome import DEEPEST, check_chrome_trace, count_events
from specter_lab.observe.trace import INSTANT_KINDS, Trace

__all__ = ["check_chrome_trace", "count_events", "save_chrome_trace", "to_chrome_trace", "write_whole"]

PID = 1
LANE_ORDER = ("draft", "target", "link", "disk", "control")
_ARGS = ("step", "position", "layer", "expert", "request_id", "tokens", "bytes", "reason", "outcome", "value")


def to_chrome_trace(trace: Trace, tokens: Sequence[str] | None = None) -> dict[str, Any]:
    """The trace in the Chrome trace event format, times in microseconds from its first event.

    ``tokens``: the text of each generated token, shown where it was committed. ``ValueError`` for times that are not
    finite or run backwards, and for a wrong number of tokens.

    >>> chrome = to_chrome_trace(Trace.of([("link", "transfer", 2.0, 5.0, 0, -1, 0, 3, 0, 64, 0, "demand", "used", 0.0)], "simulated"))
    >>> [(event["name"], event["ts"], event["dur"]) for event in chrome["traceEvents"] if event["ph"] == "X"]
    [('transfer L0 E3', 0.0, 3.0)]
    """
    events = _timed(trace.events)
    tracks, arguments, arrows = _tracks(events), _arguments(events, tokens), _arrows(events)
    tids = {track: tid for tid, track in enumerate(sorted(set(tracks), key=_track_order), start=1)}
    written = [_named("process_name", 0, f"specter_lab · {trace.machine}")]
    for (lane, number), tid in tids.items():
        written.append(_named("thread_name", tid, lane if number == 0 else f"{lane} {number + 1}"))
        written.append({"ph": "M", "pid": PID, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    # At one instant: causes before effects, so that an arrow is begun before it is continued; the outer span first.
    cause = events["lane"].map({"control": 0, "link": 1}).fillna(2)
    for event in _records(events.assign(cause=cause).sort_values(["start_ns", "cause", "shorter"], kind="stable")):
        row = event["row"]
        place = {"ts": _exact_us(event["start_ns"]), "pid": PID, "tid": tids[tracks[row]]}
        what = {"name": _name(event), "cat": _clean(event["kind"]), "args": arguments[row]}
        if event["kind"] in INSTANT_KINDS:
            written.append({"ph": "i", **place, "s": "t", **what})
        else:
            written.append({"ph": "X", **place, "dur": _exact_us(event["dur_ns"]), **what})
        for phase, arrow in arrows.get(row, ()):
            written.append({"ph": phase, **place, "id": arrow, "name": "copy", "cat": "copy", **({} if phase == "s" else {"bp": "e"})})
    for at, held in _resident(events).items():
        # Perfetto shows name and series together: "resident expert bytes".
        written.append({"ph": "C", "ts": _exact_us(at), "pid": PID, "tid": 0, "name": "resident expert", "args": {"bytes": held}})
    return {"traceEvents": written, "otherData": {"machine": _clean(trace.machine), "events": len(events)}}


def save_chrome_trace(trace: Trace, path: str | Path, tokens: Sequence[str] | None = None) -> Path:
    """Write ``to_chrome_trace`` as JSON; the file appears under its name only when it is complete.

    >>> import tempfile
    >>> save_chrome_trace(Trace.of([], "simulated"), Path(tempfile.mkdtemp()) / "empty.json").name
    'empty.json'
    """
    return write_whole(path, json.dumps(to_chrome_trace(trace, tokens), allow_nan=False))


def write_whole(path: str | Path, text: str) -> Path:
    """Write ``text`` as UTF-8 under a temporary name, then rename: a reader never sees half a file.

    >>> import tempfile
    >>> write_whole(Path(tempfile.mkdtemp()) / "note.txt", "all of it").read_text()
    'all of it'
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return cast(list[dict[str, Any]], frame.to_dict("records"))


def _named(what: str, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": PID, "tid": tid, "name": what, "args": {"name": _clean(name)}}


def _timed(events: pd.DataFrame) -> pd.DataFrame:
    """The events with whole nanoseconds from the first one: rounding both ends alike keeps neighbours apart."""
    events = events.reset_index(drop=True)
    bad = ~(np.isfinite(events["start_us"]) & np.isfinite(events["end_us"]) & (events["end_us"] >= events["start_us"]))
    if bad.any():
        first = events[bad].iloc[0]
        raise ValueError(
            f"An event needs finite times that don't run backwards; {int(bad.sum())} of {len(events)} have none, the first a "
            f"{first['kind']!r} from {first['start_us']} to {first['end_us']} us; finish the trace after the machine has stopped."
        )
    origin = events["start_us"].min() if len(events) else 0.0
    start = ((events["start_us"] - origin) * 1000.0).round().astype("int64")
    end = ((events["end_us"] - origin) * 1000.0).round().astype("int64")
    return events.assign(row=range(len(events)), start_ns=start, dur_ns=end - start, shorter=start - end)


def _tracks(events: pd.DataFrame) -> list[tuple[str, int]]:
    """(lane, number) for each event, so that on a track spans are disjoint or nested and marks don't pile too high."""
    tracks: list[tuple[str, int]] = [("", 0)] * len(events)
    open_ends: dict[str, list[list[int]]] = defaultdict(list)
    order = events.sort_values(["start_ns", "shorter"], kind="stable")
    for row, lane, start, dur in zip(*(order[name].tolist() for name in ("row", "lane", "start_ns", "dur_ns")), strict=True):
        for number in range(len(open_ends[lane]) + 1):
            if number == len(open_ends[lane]):
                open_ends[lane].append([])
            stack = open_ends[lane][number]
            # What ended before is closed; a mark keeps the marks of the same instant open below it.
            while stack and (stack[-1] < start or (stack[-1] == start and dur > 0)):
                stack.pop()
            if len(stack) < DEEPEST and (not stack or start + dur <= stack[-1]):
                stack.append(start + dur)
                tracks[row] = (lane, number)
                break
    return tracks


def _track_order(track: tuple[str, int]) -> tuple[int, str, int]:
    lane, number = track
    return (LANE_ORDER.index(lane) if lane in LANE_ORDER else len(LANE_ORDER), lane, number)


def _arguments(events: pd.DataFrame, tokens: Sequence[str] | None) -> list[dict[str, Any]]:
    """What a click on an event shows: its columns, without those that say nothing."""
    nothing: dict[str, Any] = {"reason": "", "outcome": "", "tokens": 0, "bytes": 0, "value": 0.0}
    arguments: list[dict[str, Any]] = []
    for row in _records(events[list(_ARGS)]):
        kept = {name: value for name, value in row.items() if value != nothing.get(name, -1)}
        if "value" in kept and not math.isfinite(kept["value"]):
            kept["value"] = str(kept["value"])  # JSON has no such numbers
        arguments.append({name: _clean(value) if isinstance(value, str) else value for name, value in kept.items()})
    if tokens is None:
        return arguments
    commits = events[events["kind"] == "commit"].sort_values("start_ns", kind="stable")
    if len(tokens) != commits["tokens"].sum():
        raise ValueError(
            f"tokens needs the text of each generated token; {len(tokens)} texts for {commits['tokens'].sum()} committed tokens; "
            "leave the prompt's tokens out, or pass no tokens."
        )
    first = 0
    for number, count in zip(commits["row"].tolist(), commits["tokens"].tolist(), strict=True):
        arguments[number]["text"] = [_clean(text) for text in tokens[first : first + count]]
        first += count
    return arguments


def _name(event: dict[str, Any]) -> str:
    parts = [event["kind"], f"L{event['layer']}" if event["layer"] >= 0 else "", f"E{event['expert']}" if event["expert"] >= 0 else ""]
    return _clean(" ".join(part for part in parts if part))


def _clean(text: str) -> str:
    """Lone halves of surrogate pairs, as broken-up token bytes give them, are no text in UTF-8: shown as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _exact_us(ns: int) -> float:
    """Microseconds which times 1000, truncated as Perfetto does, are these nanoseconds again."""
    us = ns / 1000.0
    return us if int(us * 1000.0) == ns else us + 1e-4


def _arrows(events: pd.DataFrame) -> dict[int, list[tuple[str, int]]]:
    """row -> the arrow ends to write behind it: (phase, id), the id counting the copies that have an arrow.

    A copy's arrow comes from the first prediction of its request (or, without one, of its step, layer and expert) and
    goes to the first expert computed with what it brought.
    """
    by_time = events.sort_values(["start_ns", "row"], kind="stable")
    by_kind = {kind: _records(rows) for kind, rows in by_time.groupby("kind") if kind in ("predict", "transfer", "expert")}
    by_request: dict[int, dict[str, Any]] = {}
    by_place: dict[tuple[int, int, int], dict[str, Any]] = {}
    for event in by_kind.get("predict", ()):
        if event["request_id"] >= 0:
            by_request.setdefault(event["request_id"], event)
        else:
            by_place.setdefault((event["step"], event["layer"], event["expert"]), event)
    uses: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in by_kind.get("expert", ()):
        uses[event["request_id"]].append(event)
    arrows: dict[int, list[tuple[str, int]]] = defaultdict(list)
    number = 0
    for copy in by_kind.get("transfer", ()):
        cause = by_request.get(copy["request_id"]) or by_place.get((copy["step"], copy["layer"], copy["expert"]))
        arrival = copy["start_ns"] + copy["dur_ns"]
        use = next((use for use in uses.get(copy["request_id"], ()) if use["start_ns"] >= arrival), None)
        stations = [copy] if cause is None or cause["start_ns"] > copy["start_ns"] else [cause, copy]
        stations += [use] if use is not None and copy["request_id"] >= 0 else []
        for place, station in enumerate(stations):
            if len(stations) > 1:
                arrows[station["row"]].append(("s" if place == 0 else "f" if place == len(stations) - 1 else "t", number))
        number += len(stations) > 1
    return arrows


def _resident(events: pd.DataFrame) -> dict[int, int]:
    """Nanosecond -> bytes of experts on the device, for each instant at which that changes."""
    moved = events[events["kind"].isin(("transfer", "evict"))]
    if moved.empty:
        return {}
    change = moved["bytes"].where(moved["kind"] == "transfer", -moved["bytes"])
    held = change.groupby(moved["start_ns"] + moved["dur_ns"]).sum().sort_index().cumsum()
    # Evictions of what an earlier request left there: the count starts with at least those bytes.
    before = max(0, -int(held.min()))
    return {0: before, **dict(zip(held.index.tolist(), (held + before).tolist(), strict=True))}
