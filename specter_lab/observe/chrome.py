"""The rules of a Chrome trace file, checked the way Perfetto reads it.

Perfetto truncates times to nanoseconds, sorts by time with the longer of two spans first and all else in the order of
the file, drops spans that partly overlap on a track or stand too deep, and ties an arrow to whatever is then on top.

Source: google/perfetto, importers/json, importers/common/slice_tracker.cc and flow_tracker.cc, sorter/trace_sorter.h.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

# Perfetto drops what stands more than 512 deep, and marks of one instant stand on one another.
DEEPEST = 256


def count_events(chrome: dict[str, Any]) -> int:
    """How many events of the trace a Chrome trace holds: its spans and marks, without names, arrows and counters.

    >>> count_events({"traceEvents": [{"ph": "M"}, {"ph": "X"}, {"ph": "i"}]})
    2
    """
    return sum(event["ph"] in ("X", "i") for event in chrome["traceEvents"])


def check_chrome_trace(chrome: dict[str, Any]) -> None:
    """Return if a viewer will show every event; else ``ValueError`` names the rule that is broken, and where.

    >>> check_chrome_trace({"traceEvents": [], "otherData": {"machine": "simulated", "events": 0}})
    """
    if not isinstance(chrome.get("traceEvents"), list) or not isinstance(chrome.get("otherData", {}).get("machine"), str):
        raise _broken("the file has a list traceEvents, and otherData names the machine", f"keys {sorted(chrome)}")
    try:
        same = json.loads(json.dumps(chrome, allow_nan=False, ensure_ascii=False).encode()) == chrome
    except (TypeError, ValueError) as error:  # a UnicodeEncodeError is a ValueError
        raise _broken("everything is plain JSON in UTF-8", str(error)) from error
    if not same:
        raise _broken("everything reads back from JSON as it was written", "a key or a value that JSON changes")
    timed = [event for event in chrome["traceEvents"] if _is_timed(event)]
    _check_names(chrome["traceEvents"], timed)
    _check_order(timed)
    if count_events(chrome) != chrome["otherData"].get("events"):
        raise _broken("events in equal events out", f"{chrome['otherData'].get('events')} in, {count_events(chrome)} out")


def _broken(rule: str, found: str) -> ValueError:
    return ValueError(f"A Chrome trace needs this rule: {rule}; found: {found}; write the file with to_chrome_trace().")


def _is_timed(event: dict[str, Any]) -> bool:
    """Check one event by itself; False for those that only name things."""
    phase = event.get("ph")
    if phase not in ("M", "X", "i", "s", "t", "f", "C"):
        raise _broken("each event is a span, mark, arrow, counter or name (X, i, s, t, f, C, M)", f"ph {phase!r}")
    if phase == "M":
        return False
    times = [event.get("ts")] + ([event.get("dur")] if phase == "X" else [])
    if not all(isinstance(time, (int, float)) and not isinstance(time, bool) and math.isfinite(time) and time >= 0 for time in times):
        raise _broken("times are finite numbers of microseconds, at least 0", f"{times} in {event.get('name')!r}")
    if not isinstance(event.get("pid"), int) or not isinstance(event.get("tid"), int):
        raise _broken("process and track are whole numbers", f"pid {event.get('pid')!r}, tid {event.get('tid')!r}")
    if phase == "C" and not all(isinstance(value, (int, float)) and value >= 0 for value in event["args"].values()):
        raise _broken("a count of bytes is never negative", f"{event['args']} at {event['ts']} us")
    return True


def _check_names(events: list[dict[str, Any]], timed: list[dict[str, Any]]) -> None:
    named = {(event["pid"], event["tid"]) for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    nameless = {(event["pid"], event["tid"]) for event in timed if event["ph"] != "C"} - named
    if nameless:
        raise _broken("each track has a thread_name", f"none for (pid, tid) {sorted(nameless)}")
    if timed and min(event["ts"] for event in timed) != 0:
        raise _broken("times count from the first event (large times lose their digits)", f"first at {min(e['ts'] for e in timed)} us")


def _check_order(timed: list[dict[str, Any]]) -> None:
    """Put events on their tracks as the viewer does."""
    read = [(int(event["ts"] * 1000), -int(event.get("dur", 0) * 1000), place) for place, event in enumerate(timed)]
    stacks: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)  # start, end, name
    arrows: dict[Any, list[str]] = defaultdict(list)
    for start, minus_dur, place in sorted(read):
        event = timed[place]
        end, stack = start - minus_dur, stacks[event["pid"], event["tid"]]
        if event["ph"] in ("X", "i"):
            while stack and (stack[-1][1] < start or (stack[-1][1] == start and not stack[-1][0] == stack[-1][1] == end)):
                stack.pop()
            if stack and end > stack[-1][1]:
                raise _broken(
                    "spans of one track are disjoint or nested",
                    f"{event['name']!r} from {start} to {end} ns partly overlaps {stack[-1][2]!r} from {stack[-1][0]} to {stack[-1][1]} ns",
                )
            if len(stack) >= 2 * DEEPEST:
                raise _broken(f"at most {2 * DEEPEST} events stand on one another", f"one more at {start} ns")
            stack.append((start, end, event["name"]))
        elif event["ph"] in ("s", "t", "f"):
            if not stack or stack[-1][1] < start:
                raise _broken("an arrow begins and ends within events", f"{event['ph']} of arrow {event['id']} at {start} ns is outside")
            arrows[event["id"]].append(event["ph"])
    for arrow, phases in arrows.items():
        if phases[0] != "s" or phases[-1] != "f" or set(phases[1:-1]) - {"t"}:
            raise _broken("an arrow is begun once (s), continued (t) and ended once (f), in this order", f"{phases} of arrow {arrow}")
