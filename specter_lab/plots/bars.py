"""From a trace to bars: which events a figure shows, in which category, and the numbers of its subtitle.

Every figure starts here, so that the interactive timeline and the static picture can't disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from specter_lab.observe.trace import COMPUTE_KINDS, INSTANT_KINDS, Trace
from specter_lab.plots.steps import StepSpan, choose_steps
from specter_lab.plots.style import COLOURS


@dataclass(frozen=True)
class Bars:
    """The bars of one figure, all times in milliseconds since the request began.

    ``table`` has one row a bar: the columns of the trace, and ``category``, ``start_ms``, ``duration_ms``, ``count``
    (events it stands for) and ``drawn_ms`` (where it is drawn: its start, unless bars were merged).

    >>> trace_bars(Trace.of([("link", "transfer", 0.0, 5.0, 0, -1, 0, 3, 0, 64, 0, "demand", "used", 0.0)], "simulated")).transfer_ms
    0.005
    """

    table: pd.DataFrame
    steps: list[StepSpan]
    window_ms: tuple[float, float]
    transfer_ms: float
    overlap_ms: float
    exposed_ms: float
    machine: str

    @property
    def title(self) -> str:
        """What is shown, and which machine made it; not yet escaped."""
        numbers = [step.step for step in self.steps]
        what = f" of steps {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f" of step {numbers[0]}" if numbers else ""
        return f"Timeline{what} · {self.machine}"

    @property
    def subtitle(self) -> str:
        """The three times that must not be confused."""
        return (
            f"transfers {self.transfer_ms:,.3f} ms · of these beside compute (overlap) {self.overlap_ms:,.3f} ms · "
            f"exposed (stalls) {self.exposed_ms:,.3f} ms"
        )


def trace_bars(trace: Trace, *, steps: tuple[int, int] | None = None, tokens: tuple[int, int] | None = None) -> Bars:
    """The bars of a trace, of its steps ``first..last``, or of the steps that committed tokens ``first..last``.

    A bar belongs to a selection when it lies in that time, whichever step it was for; the three
    totals count only the time inside the selection. ``ValueError`` when there is nothing to show.

    >>> trace_bars(Trace.of([("target", "head", 0.0, 5.0, 0, -1, -1, -1, 1, 0, -1, "", "", 0.0)], "simulated")).table["category"].tolist()
    ['head']
    """
    chosen = choose_steps(trace, steps, tokens)
    events = trace.events[~trace.events["kind"].isin(INSTANT_KINDS) & (trace.events["lane"] != "control")]
    if events.empty:
        raise ValueError(
            f"A timeline needs events that last (compute, stalls, transfers); this trace has none among its {len(trace)} events; "
            "pass the trace of a finished run."
        )
    table = events.assign(
        category=_categories(events, trace.of_kind("need")),
        start_ms=events["start_us"] / 1000.0,
        duration_ms=(events["end_us"] - events["start_us"]) / 1000.0,
        count=1,
    )
    table["drawn_ms"] = table["start_ms"]
    ends_ms = table["end_us"] / 1000.0
    if steps is None and tokens is None:
        window_ms = (float(table["start_ms"].min()), float(ends_ms.max()))
    else:
        window_ms = (chosen[0].start_ms, max(step.end_ms for step in chosen))
        table = table[(table["start_ms"] < window_ms[1]) & (ends_ms > window_ms[0])]
    table = table.sort_values(["start_ms", "duration_ms"], kind="stable").reset_index(drop=True)
    return Bars(table, chosen, window_ms, *_totals(table, window_ms), trace.machine)


def merge_bars(table: pd.DataFrame, span_ms: float, most: int) -> pd.DataFrame:
    """At most ``most`` bars (or one a lane and category): within a stretch too short to see, those of a kind become one.

    A merged bar is as long as what it stands for took together, and lies within the stretch, so each colour keeps
    its true share of the lane and nothing is lengthened; only the order inside a stretch is lost. Bars longer than a
    stretch stay exact. The stretch starts at ``span_ms / 2000``, about a pixel, and doubles until there are few enough.

    >>> bars = trace_bars(Trace.of([("target", "head", i, i + 0.5, 0, -1, -1, -1, 1, 0, -1, "", "", 0.0) for i in range(99)], ""))
    >>> int(merge_bars(bars.table, 10.0, most=50)["count"].sum())
    99
    """
    if len(table) <= most:
        return table
    stretch_ms = max(span_ms, 1e-9) / 2000.0
    # With one stretch as long as the span there is one bar a lane and category: no need to look further.
    while _count_merged(table, stretch_ms) > most and stretch_ms <= span_ms:
        stretch_ms *= 2.0
    return _merged(table, stretch_ms)


def _count_merged(table: pd.DataFrame, stretch_ms: float) -> int:
    short = table[table["duration_ms"] < stretch_ms]
    slots = short[["lane", "category"]].assign(slot=np.floor(short["start_ms"] / stretch_ms))
    return len(table) - len(short) + len(slots.drop_duplicates())


def _merged(table: pd.DataFrame, stretch_ms: float) -> pd.DataFrame:
    short = table["duration_ms"] < stretch_ms
    slot = np.floor(table["start_ms"] / stretch_ms)
    keys = ["lane", "slot", "category"]
    rows = table[short].assign(slot=slot[short], end_ms=table["start_ms"] + table["duration_ms"])
    groups = rows.groupby(keys, sort=False)
    # What differs within a bar is unknown (-1 or ""), as it is for an event that has none.
    firsts = groups.first()
    for column in ("step", "position", "layer", "expert", "request_id", "kind", "reason", "outcome"):
        unknown: Any = "" if column in ("kind", "reason", "outcome") else -1
        firsts[column] = firsts[column].where(groups[column].nunique() == 1, unknown)
    for column in ("count", "bytes", "tokens", "duration_ms"):
        firsts[column] = groups[column].sum()
    firsts["end_us"] = groups["end_us"].max()
    firsts["end_ms"] = groups["end_ms"].max()
    merged = firsts.reset_index().sort_values("start_ms", kind="stable")
    # The categories of one stretch stand one after another; bars that overlapped share the room there is.
    stretches = merged.groupby(["lane", "slot"], sort=False)
    room_ms = stretches["end_ms"].transform("max") - stretches["start_ms"].transform("min")
    share = (room_ms / stretches["duration_ms"].transform("sum").where(lambda total: total > 0, 1.0)).clip(upper=1.0)
    merged["duration_ms"] *= share
    alone = stretches["start_ms"].transform("size") == 1
    packed_ms = stretches["start_ms"].transform("min") + stretches["duration_ms"].cumsum() - merged["duration_ms"]
    merged["drawn_ms"] = merged["start_ms"].where(alone, packed_ms)
    return pd.concat([table[~short], merged[table.columns]]).sort_values("start_ms", kind="stable").reset_index(drop=True)


def _categories(events: pd.DataFrame, needs: pd.DataFrame) -> pd.Series:
    """The category of each event; ``needs`` says how the target's experts were found."""
    category = events["kind"].where(events["kind"].isin(COLOURS), "other")
    category = category.mask((events["kind"] == "expert") & (events["lane"] == "draft"), "expert: draft")
    keys = ["step", "layer", "expert"]
    outcomes = needs.drop_duplicates(keys, keep="last").set_index(keys)["outcome"]
    places = pd.MultiIndex.from_frame(events[keys])
    found = pd.Series(outcomes.reindex(places).to_numpy(), index=events.index)
    # Only the target's experts come over the link: the draft computes with experts of its own.
    known = (events["kind"] == "expert") & (events["lane"] == "target") & found.isin(["hit", "late", "miss"])
    category = category.mask(known, "expert: " + found.where(known, "").astype(str))
    transfers = events["kind"] == "transfer"
    prefetched = transfers & (events["reason"] != "demand")
    category = category.mask(transfers, "transfer: demand")
    category = category.mask(prefetched, "transfer: prefetch wasted")
    return category.mask(prefetched & (events["outcome"] == "used"), "transfer: prefetch used")


def _totals(table: pd.DataFrame, window_ms: tuple[float, float]) -> tuple[float, float, float]:
    """Transfer time, transfer time beside compute, and stalls, in ms within the window."""
    start = table["start_ms"].clip(*window_ms)
    end = (table["start_ms"] + table["duration_ms"]).clip(*window_ms)
    compute = table["kind"].isin(COMPUTE_KINDS)
    # Compute time passed until any moment, as a curve: steep where compute runs, flat where it doesn't.
    edges = np.concatenate([start[compute], end[compute]])
    marks = np.concatenate([np.ones(compute.sum()), -np.ones(compute.sum())])
    order = np.argsort(edges, kind="stable")
    edges, running = edges[order], np.cumsum(marks[order]) > 0
    passed = np.concatenate([[0.0], np.cumsum(np.diff(edges) * running[:-1])]) if len(edges) else np.zeros(1)
    moving, stalls = table["kind"] == "transfer", table["kind"] == "stall"
    beside = np.interp(end[moving], edges, passed) - np.interp(start[moving], edges, passed) if len(edges) else np.zeros(1)
    return float((end - start)[moving].sum()), float(beside.sum()), float((end - start)[stalls].sum())
