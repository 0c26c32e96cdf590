"""Figures beside the timeline: lines, heat maps, prediction scores, the three times of a system, one step side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Protocol

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from specter_lab.observe.metrics import prediction_scores, summarize
from specter_lab.observe.trace import Trace
from specter_lab.plots.bars import trace_bars
from specter_lab.plots.style import COLOURS, HATCHES, LINE_COLOUR, MEANINGS
from specter_lab.plots.timeline import AT_BOTTOM_LEFT, AT_TOP_LEFT, in_legend_order

# Of the colours there are, six that every reader can tell apart; the markers say the same once more.
SERIES = tuple(COLOURS[name] for name in ("head", "expert: late", "expert: hit", "attention", "expert: miss", "transfer: prefetch wasted"))
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "star")
SCORES = {"recall": "recall", "precision": "precision", "on_time": "on time"}
TIMES = {"transfer": "transfer: prefetch used", "overlap": "expert: hit", "exposed": "stall"}


class PickedExperts(Protocol):
    """What ``expert_use`` needs of a routing log."""

    expert_counts: tuple[int, ...]

    def frame(self) -> pd.DataFrame:
        """A row for each pick, with the columns token, layer and expert."""

    def __len__(self) -> int:
        """Number of tokens."""


def expert_use(log: PickedExperts) -> pd.DataFrame:
    """[layer x expert]: the share of the log's tokens that were routed there; NaN where a layer has no such expert.

    >>> from types import SimpleNamespace
    >>> class Log(SimpleNamespace): __len__ = lambda self: 2
    >>> picks = pd.DataFrame({"token": [0, 1], "layer": [0, 0], "expert": [2, 2]})
    >>> expert_use(Log(expert_counts=(3,), frame=lambda: picks)).loc[0].tolist()
    [0.0, 0.0, 1.0]
    """
    counts = log.frame().groupby(["layer", "expert"]).size().unstack()
    experts, layers = range(max(log.expert_counts, default=0)), range(len(log.expert_counts))
    table = counts.reindex(index=pd.Index(layers, name="layer"), columns=pd.Index(experts, name="expert")).fillna(0.0) / max(1, len(log))
    return table.where([[expert < count for expert in experts] for count in log.expert_counts])


def plot_heatmap(table: pd.DataFrame, *, title: str = "", value: str = "share of tokens") -> go.Figure:
    """The cells of a table as colours from 0 up: its index runs down, its columns run across. ``value`` names the numbers.

    >>> plot_heatmap(pd.DataFrame([[0.0, 1.0]])).data[0].z[0]
    [0.0, 1.0]
    """
    down, across = table.index.name or "row", table.columns.name or "column"
    cells = go.Heatmap(
        z=table.to_numpy().tolist(),
        x=list(table.columns),
        y=list(table.index),
        zmin=0.0,
        colorscale=[[0.0, "#f7f7f7"], [1.0, COLOURS["transfer: prefetch used"]]],
        colorbar={"title": {"text": value, "side": "right"}},
        hovertemplate=f"{down} %{{y}} · {across} %{{x}}<br>{value} %{{z:.3f}}<extra></extra>",
        xgap=1,
        ygap=1,
    )
    figure = _figure([cells], title, across, down, height=150 + 22 * len(table))
    return figure.update_yaxes(autorange="reversed", dtick=1, showgrid=False).update_xaxes(showgrid=False)


def plot_lines(
    table: pd.DataFrame, *, x: str, y: str, by: str | None = None, chance: str | None = None, title: str = "", share: bool = False
) -> go.Figure:
    """Column ``y`` over column ``x``: a line for each value of ``by``, at most 6, in order of appearance.

    ``chance``: a column drawn dashed and grey, each different curve once. ``share``: the axis runs from 0 to 1.

    >>> plot_lines(pd.DataFrame({"length": [1, 2], "tokens": [1.9, 2.8]}), x="length", y="tokens").data[0].y
    (1.9, 2.8)
    """
    missing = [column for column in (x, y, by, chance) if column is not None and column not in table]
    if missing:
        raise ValueError(f"A figure draws columns of its table; {missing} are none. Columns: {', '.join(map(str, table.columns))}.")
    groups = {str(name): rows for name, rows in table.groupby(by, sort=False)} if by else {y: table}
    colours = _series(groups)
    curves = {tuple(zip(rows[x], rows[chance], strict=True)) for rows in groups.values()} if chance else set()
    dash = {"color": LINE_COLOUR, "dash": "dash"}
    lines = [go.Scatter(x=[a for a, _ in c], y=[b for _, b in c], name="chance", mode="lines", line=dash) for c in sorted(curves)]
    for name, rows in groups.items():
        lines.append(go.Scatter(x=rows[x].tolist(), y=rows[y].tolist(), name=escape(name), mode="lines+markers", **colours[name]))
    return _figure(lines, title, x, y, yaxis={"range": [0, 1.03]} if share else {"rangemode": "tozero"})


def plot_scores(traces: Mapping[str, Trace], *, by: str = "layer") -> go.Figure:
    """Recall, precision and on-time share of each trace's predictions, by "layer" or by "horizon": see ``prediction_scores``.

    >>> list(plot_scores({"none": Trace.of([], "simulated")}).data)
    []
    """
    title = f"Predictions by {by} · {_machines(traces)}"
    figure = make_subplots(rows=1, cols=3, shared_yaxes=True, subplot_titles=tuple(SCORES.values()), horizontal_spacing=0.03)
    for name, look in _series(traces).items():
        scores = prediction_scores(traces[name], by=by)
        scores = scores[scores["predicted"] > 0]
        for column, score in enumerate(SCORES, start=1):
            line = go.Scatter(x=scores.index.tolist(), y=scores[score].tolist(), name=escape(name), mode="lines+markers", **look)
            if len(scores):
                figure.add_trace(line.update(legendgroup=name, showlegend=column == 1), row=1, col=column)
    _lay_out(figure, title)
    return figure.update_xaxes(title={"text": by, "standoff": 6}).update_yaxes(range=[0, 1.03])


def plot_times(traces: Mapping[str, Trace]) -> go.Figure:
    """Milliseconds a token of each trace's decoding: transfers, transfers beside compute (overlap), and exposed (stalls).

    >>> import specter_lab as sl
    >>> with sl.Pipeline("tiny-moe", machine=sl.SimulatedMachine()) as p: trace = p.generate("Once", max_new_tokens=3).trace
    >>> [bar.name for bar in plot_times({"on demand": trace}).data]
    ['transfer', 'overlap', 'exposed']
    """
    title = f"Transfer time, overlap and exposed time · {_machines(traces)}"
    figures = {name: summarize(trace) for name, trace in traces.items()}
    heights = {
        "transfer": [row["transfer_ms_per_token"] or 0.0 for row in figures.values()],
        "overlap": [(row["transfer_ms_per_token"] or 0.0) * (row["overlap"] or 0.0) for row in figures.values()],
        "exposed": [row["exposed_ms_per_token"] or 0.0 for row in figures.values()],
    }
    names = [escape(name) for name in figures]
    bars = [go.Bar(x=names, y=values, name=what, marker=_marker(TIMES[what])) for what, values in heights.items()]
    return _figure(bars, title, "", "ms a token")


def plot_steps(traces: Mapping[str, Trace], *, step: int, height: int | None = None) -> go.Figure:
    """One step of several runs below each other, each from its own begin, on one axis in milliseconds.

    ``height`` is in pixels. ``ValueError`` if a trace doesn't hold the step.

    >>> import specter_lab as sl
    >>> with sl.Pipeline("tiny-moe", machine=sl.SimulatedMachine()) as p: trace = p.generate("Once", max_new_tokens=3).trace
    >>> plot_steps({"on demand": trace}, step=1).layout.yaxis.categoryarray
    ('on demand · link', 'on demand · target')
    """
    title, parts, lanes, longest = f"Step {step} · {_machines(traces)}", [], [], 0.0
    for name, trace in traces.items():
        bars = trace_bars(trace, steps=(step, step))
        begin, end = bars.window_ms
        parts.append(bars.table.assign(row=escape(name) + " · " + bars.table["lane"], begin_ms=bars.table["start_ms"] - begin))
        lanes += [f"{escape(name)} · {lane}" for lane in ("draft", "target", "host", "link", "disk") if lane in set(bars.table["lane"])]
        longest = max(longest, end - begin)
    table = pd.concat(parts)
    boxes = [
        go.Bar(
            orientation="h", name=name, base=rows["begin_ms"].tolist(), x=rows["duration_ms"].tolist(), y=rows["row"].tolist(),
            marker=_marker(name, outline_px=0.4), meta=MEANINGS[name], customdata=rows[["layer", "expert"]].to_numpy().tolist(),
            hovertemplate=f"<b>{name}</b> %{{x:.4f}} ms<br>layer %{{customdata[0]}} · expert %{{customdata[1]}}<extra></extra>",
        )
        for name, rows in in_legend_order(table)
    ]  # fmt: skip
    height = height or 190 + 30 * len(lanes)
    figure = _figure(boxes, title, "time since the step began (ms)", "", height=height)
    figure.update_layout(barmode="overlay", bargap=0.2, xaxis={"range": [-0.01 * longest, 1.01 * longest]})
    return figure.update_yaxes(categoryorder="array", categoryarray=lanes[::-1], type="category", showgrid=False)


def _series(names: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The look of each line."""
    if not 0 < len(names) <= len(SERIES):
        raise ValueError(
            f"A reader tells 1 to {len(SERIES)} lines apart; got {len(names)} ({', '.join(map(str, names))}). Choose some of them."
        )
    looks = [{"line": {"color": colour}, "marker": {"symbol": symbol, "size": 7}} for colour, symbol in zip(SERIES, MARKERS, strict=True)]
    return dict(zip(names, looks, strict=False))


def _marker(category: str, outline_px: float = 0.0) -> dict[str, Any]:
    """A bar in the colour and hatch of its category."""
    hatch = {"fillmode": "overlay", "fgcolor": "white", "fgopacity": 0.55, "size": 6, "solidity": 0.25}
    marker: dict[str, Any] = {"color": COLOURS[category], "line": {"color": COLOURS[category], "width": outline_px}}
    return {**marker, "pattern": {"shape": HATCHES[category], **hatch}} if category in HATCHES else marker


def _machines(traces: Mapping[str, Trace]) -> str:
    """Whose time it is: stands in every title. ``ValueError`` for no trace."""
    if not traces:
        raise ValueError("A figure of runs needs at least one trace; got none. Give them by name, such as {'on demand': run.trace}.")
    return escape(", ".join(dict.fromkeys(trace.machine for trace in traces.values())))


def _figure(marks: Sequence[Any], title: str, x: str, y: str, *, height: int = 380, yaxis: Mapping[str, Any] | None = None) -> go.Figure:
    figure = go.Figure(marks)
    _lay_out(figure, title, height)
    return figure.update_layout(xaxis={"title": {"text": x, "standoff": 6}}, yaxis={"title": y, **(yaxis or {})})


def _lay_out(figure: go.Figure, title: str, height: int = 380) -> None:
    figure.update_layout(
        template="plotly_white", height=height, title={"text": title, **AT_TOP_LEFT}, legend=AT_BOTTOM_LEFT,
        margin={"l": 60, "r": 20, "t": 64, "b": 96},
    )  # fmt: skip
