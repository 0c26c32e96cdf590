"""The timeline: what compute and link did when, as bars on an axis in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any, cast

import pandas as pd
import plotly.graph_objects as go

from specter_lab.observe.trace import Trace
from specter_lab.plots.bars import merge_bars, trace_bars
from specter_lab.plots.steps import StepSpan
from specter_lab.plots.style import COLOURS, HATCHES, LANES, LINE_COLOUR, MEANINGS

# Browsers draw some 12,000 bars slowly (plotly.js issue 4922); below this many every event keeps a bar of its own.
MOST_BARS = 5000
MOST_BOUNDARIES = 60
MOST_LABELS = 16
MOST_LONG_LABELS = 6
# An outline shows bars too short to see; among many it would hide their neighbours.
MOST_OUTLINES = 1000
# Without any outline plotly widens thin bars to a whole pixel, over their neighbours.
HAIRLINE_PX = 0.02
AT_TOP_LEFT = {"x": 0.0, "xref": "paper", "xanchor": "left", "y": 1.0, "yref": "container", "yanchor": "top", "pad": {"t": 14}}
AT_BOTTOM_LEFT = {"orientation": "h", "x": 0.0, "xanchor": "left", "y": 0.0, "yref": "container", "yanchor": "bottom"}


def plot_timeline(
    trace: Trace, *, steps: tuple[int, int] | None = None, tokens: tuple[int, int] | None = None, height: int | None = None
) -> go.Figure:
    """Draw a trace: a row each for draft, target and link, a colour for what a bar is and what came of it.

    ``steps=(first, last)`` shows these steps, ``tokens=(first, last)`` the steps that committed these generated tokens
    (counted from 0, both ends included). Thin lines mark where a step's tokens were committed. The subtitle keeps
    transfer time, transfer time beside compute, and exposed time (stalls) apart. Above 5,000 bars, those too close to
    tell apart are merged, and say so when pointed at. ``height`` is in pixels. ``ValueError`` for an empty selection.

    >>> rows = [("link", "transfer", 0.0, 5.0, 0, -1, 0, 3, 0, 64, 0, "demand", "used", 0.0)]
    >>> plot_timeline(Trace.of(rows, "simulated")).data[0].x
    (0.005,)
    """
    bars = trace_bars(trace, steps=steps, tokens=tokens)
    first_ms, last_ms = bars.window_ms
    shown = merge_bars(bars.table, last_ms - first_ms, MOST_BARS)
    figure = go.Figure(
        [_bar_trace(name, rows, outline_px=0.6 if len(shown) <= MOST_OUTLINES else HAIRLINE_PX) for name, rows in in_legend_order(shown)]
    )
    lanes = in_lane_order(shown)
    margin_ms = max((last_ms - first_ms) * 0.01, 1e-6)
    shapes, labels = _boundaries(bars.steps)
    figure.update_layout(
        template="plotly_white",
        barmode="overlay",  # bars carry their own start: stacking would move them
        bargap=0.25,
        height=height or 200 + 70 * len(lanes),
        margin={"l": 60, "r": 20, "t": 92, "b": 108},
        title={"text": f"{escape(bars.title)}<br><span style='font-size:12px'>{escape(bars.subtitle)}</span>", **AT_TOP_LEFT},
        xaxis={"type": "linear", "range": [first_ms - margin_ms, last_ms + margin_ms], "zeroline": False},
        xaxis_title={"text": "time since the request began (ms)", "standoff": 6},
        yaxis={"categoryorder": "array", "categoryarray": lanes[::-1], "type": "category", "fixedrange": True, "showgrid": False},
        legend={"traceorder": "normal", **AT_BOTTOM_LEFT},
        hoverlabel={"align": "left"},
        modebar={"remove": ["select2d", "lasso2d"]},
        shapes=shapes,
        annotations=labels,
    )
    return figure


def in_legend_order(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Each category that has bars, with its bars, in the order of the legend.

    >>> [name for name, _ in in_legend_order(pd.DataFrame({"category": ["stall", "head"]}))]
    ['head', 'stall']
    """
    groups = dict(iter(table.groupby("category")))
    return ((name, groups[name]) for name in COLOURS if name in groups)


def in_lane_order(table: pd.DataFrame) -> list[str]:
    """The lanes that have bars, from the top row down.

    >>> in_lane_order(pd.DataFrame({"lane": ["link", "draft"]}))
    ['draft', 'link']
    """
    present = list(dict.fromkeys(table["lane"]))
    return [lane for lane in LANES if lane in present] + sorted(set(present) - set(LANES))


def _bar_trace(name: str, rows: pd.DataFrame, *, outline_px: float) -> go.Bar:
    colour = COLOURS[name]
    marker: dict[str, Any] = {"color": colour, "line": {"color": colour, "width": outline_px}}
    if name in HATCHES:
        hatch = {"fillmode": "overlay", "fgcolor": "white", "fgopacity": 0.55, "size": 6, "solidity": 0.25}
        marker["pattern"] = {"shape": HATCHES[name], **hatch}
    # Lists rather than arrays: viewers older than plotly 6 can't read its packed arrays.
    return go.Bar(
        name=name,
        orientation="h",
        base=rows["drawn_ms"].tolist(),
        x=rows["duration_ms"].tolist(),
        y=rows["lane"].tolist(),
        marker=marker,
        hovertext=[_hover(name, row) for row in cast(list[dict[str, Any]], rows.to_dict("records"))],
        hoverinfo="text",
        meta=MEANINGS[name],
    )


def _hover(name: str, row: dict[str, Any]) -> str:
    """What a bar says when pointed at; all text is escaped, since plotly reads some tags."""
    end_ms = row["end_us"] / 1000.0
    if row["count"] > 1:
        lines = [f"<b>{row['count']:,} × {escape(name)}</b>", f"{row['duration_ms']:,.4f} ms together"]
        lines.append(f"between {row['start_ms']:,.4f} and {end_ms:,.4f} ms")
    else:
        lines = [f"<b>{escape(name)}</b>", f"start {row['start_ms']:,.4f} ms, duration {row['duration_ms']:,.4f} ms"]
    place = [f"{what} {row[what]}" for what in ("step", "position", "layer", "expert") if row[what] >= 0]
    if place:
        lines.append(" · ".join(place))
    kind = [f"{what.replace('_', ' ')} {escape(str(row[what]))}" for what in ("kind", "reason", "outcome") if row[what]]
    if row["request_id"] >= 0:
        kind.append(f"request {row['request_id']}")
    lines.append(" · ".join(kind))
    amounts = [f"{row[what]:,} {unit}" for what, unit in (("bytes", "bytes"), ("tokens", "rows")) if row[what]]
    if amounts:
        lines.append(" · ".join(amounts))
    return "<br>".join(line for line in lines if line)


def _boundaries(steps: list[StepSpan]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A line where each step ends and a label over its middle; thinned when there are too many to tell apart."""
    ended = every_nth(steps, MOST_BOUNDARIES if len(steps) <= MOST_BOUNDARIES else MOST_LABELS)
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"color": LINE_COLOUR, "width": 1, "dash": "dot"}}
    shapes = [{**line, "x0": step.end_ms, "x1": step.end_ms} for step in ended]
    shared = {"y": 1.0, "yref": "paper", "yanchor": "bottom", "showarrow": False, "font": {"size": 11, "color": LINE_COLOUR}}
    labels = [
        {
            **shared,
            "x": (step.start_ms + step.end_ms) / 2.0,
            "text": step.label(long=len(steps) <= MOST_LONG_LABELS),
            "hovertext": f"step {step.step}: {step.accepted} of {step.drafted} drafted tokens accepted, {step.tokens} committed",
        }
        for step in every_nth(steps, MOST_LABELS)
    ]
    return shapes, labels


def every_nth(steps: list[StepSpan], most: int) -> list[StepSpan]:
    """At most ``most`` of the steps, evenly spread from the first one.

    >>> steps = [StepSpan(number, 0.0, 0.0, 0, 0, 0, 0) for number in range(10)]
    >>> [step.step for step in every_nth(steps, most=4)]
    [0, 3, 6, 9]
    """
    return steps[:: max(1, -(-len(steps) // most))]
