"""The timeline as data: bars, selections, totals, escaping and size; and the static picture of the same bars."""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import plotly.graph_objects as go
import pytest

from specter_lab.observe.metrics import merged, overlap_us
from specter_lab.observe.trace import COMPUTE_KINDS, Trace, TraceWriter
from specter_lab.plots.bars import merge_bars, trace_bars
from specter_lab.plots.html import save_html
from specter_lab.plots.picture import save_timeline_svg
from specter_lab.plots.style import COLOURS, HATCHES, LINE_COLOUR, MEANINGS, describe_colours
from specter_lab.plots.timeline import MOST_BARS, plot_timeline
from tests.traces import make_long_trace, make_trace

LONG = make_long_trace(100_000)
HOSTILE = "<img src=x onerror=alert(1)>&\"'"


def bars_of(figure: go.Figure) -> dict[str, go.Bar]:
    return {trace.name: trace for trace in figure.data}


def written_out() -> Trace:
    """Two steps, every number by hand: the prefill misses; step 1 finds one hit, one late, and wastes one copy."""
    writer = TraceWriter("simulated")
    writer.add("target", "attention", 0.0, 10.0, step=0, layer=0, tokens=1)
    writer.add("control", "need", 10.0, 10.0, step=0, layer=0, expert=1, request_id=0, outcome="miss")
    writer.add("link", "transfer", 10.0, 30.0, step=0, layer=0, expert=1, bytes=64, request_id=0, reason="demand")
    writer.add("target", "stall", 10.0, 30.0, step=0, layer=0, expert=1, request_id=0)
    writer.add("target", "expert", 30.0, 40.0, step=0, layer=0, expert=1, tokens=1, request_id=0)
    writer.add("control", "commit", 40.0, 40.0, step=0, tokens=1, outcome="first")
    writer.add("control", "draft_length", 40.0, 40.0, step=1, value=2.0)
    writer.add("draft", "expert", 40.0, 50.0, step=1, layer=0, tokens=1)
    writer.add("link", "transfer", 45.0, 60.0, step=1, layer=0, expert=2, bytes=64, request_id=1, reason="prefetch")
    writer.add("target", "attention", 50.0, 55.0, step=1, layer=0, tokens=3)
    writer.add("control", "need", 55.0, 55.0, step=1, layer=0, expert=1, request_id=0, outcome="hit")
    writer.add("control", "need", 55.0, 55.0, step=1, layer=0, expert=2, request_id=1, outcome="late")
    writer.add("target", "expert", 55.0, 57.0, step=1, layer=0, expert=1, tokens=3, request_id=0)
    writer.add("target", "stall", 57.0, 60.0, step=1, layer=0, expert=2, request_id=1)
    writer.add("target", "expert", 60.0, 70.0, step=1, layer=0, expert=2, tokens=3, request_id=1)
    writer.add("link", "transfer", 60.0, 75.0, step=1, layer=0, expert=5, bytes=64, request_id=2, reason="prefetch")
    writer.add("control", "commit", 70.0, 70.0, step=1, tokens=3, value=2.0, outcome="step")
    writer.use(0)
    writer.use(1)
    return writer.finish()


def test_every_bar_as_written_out() -> None:
    figure = plot_timeline(written_out())
    assert {name: list(zip(bar.y, bar.base, bar.x, strict=True)) for name, bar in bars_of(figure).items()} == {
        "attention": [("target", 0.0, 0.010), ("target", 0.050, 0.005)],
        "expert: draft": [("draft", 0.040, 0.010)],
        "expert: hit": [("target", 0.055, 0.002)],
        "expert: late": [("target", 0.060, 0.010)],
        "expert: miss": [("target", 0.030, 0.010)],
        "stall": [("target", 0.010, 0.020), ("target", 0.057, 0.003)],
        "transfer: demand": [("link", 0.010, 0.020)],
        "transfer: prefetch used": [("link", 0.045, 0.015)],
        "transfer: prefetch wasted": [("link", 0.060, 0.015)],
    }
    assert figure.layout.xaxis.type == "linear" and figure.layout.barmode == "overlay"
    assert figure.layout.yaxis.categoryarray == ("link", "target", "draft")
    assert all(bar.marker.color == COLOURS[name] for name, bar in bars_of(figure).items())
    assert all((bar.marker.pattern.shape or "") == HATCHES.get(name, "") for name, bar in bars_of(figure).items())


def test_the_title_has_machine_and_three_times() -> None:
    title = plot_timeline(written_out()).layout.title.text
    assert title.startswith("Timeline of steps 0 to 1 · simulated<br>")
    # beside compute: 45..57 of the second copy, 60..70 of the third
    assert "transfers 0.050 ms · of these beside compute (overlap) 0.022 ms · exposed (stalls) 0.023 ms" in title
    for machine in ("throttled", "measured on NVIDIA H200"):
        assert f"· {machine}<br>" in plot_timeline(Trace(written_out().events, machine)).layout.title.text


def test_totals_agree_with_the_metrics() -> None:
    trace = make_trace(6)
    bars = trace_bars(trace)
    transfers, stalls = trace.of_kind("transfer"), trace.of_kind("stall")
    assert bars.transfer_ms == pytest.approx((transfers["end_us"] - transfers["start_us"]).sum() / 1e3)
    assert bars.exposed_ms == pytest.approx((stalls["end_us"] - stalls["start_us"]).sum() / 1e3)
    assert bars.overlap_ms == pytest.approx(overlap_us(merged(transfers), merged(trace.of_kind(*COMPUTE_KINDS))) / 1e3)


def test_boundaries_come_from_commits() -> None:
    figure = plot_timeline(written_out())
    assert [shape.x0 for shape in figure.layout.shapes] == [0.040, 0.070]
    assert [label.text for label in figure.layout.annotations] == ["prefill", "step 1: 2/2 accepted"]
    assert figure.layout.annotations[1].hovertext == "step 1: 2 of 2 drafted tokens accepted, 3 committed"


def test_hover_says_everything_about_a_bar() -> None:
    hover = bars_of(plot_timeline(written_out()))["transfer: prefetch used"].hovertext[0]
    for part in ("transfer: prefetch used", "start 0.0450 ms, duration 0.0150 ms", "step 1", "layer 0", "expert 2", "64 bytes"):
        assert part in hover
    for part in ("kind transfer", "reason prefetch", "outcome used", "request 1"):
        assert part in hover


@pytest.mark.parametrize("tokens", [(1, 1), (1, 3), (3, 3)])
def test_a_selection_of_steps_or_of_their_tokens(tokens: tuple[int, int]) -> None:
    figure = plot_timeline(written_out(), tokens=tokens)
    assert figure.to_dict() == plot_timeline(written_out(), steps=(1, 1)).to_dict()
    bars = bars_of(figure)
    assert "expert: miss" not in bars and "transfer: demand" not in bars
    assert sum(len(bar.x) for bar in bars.values()) == 7
    assert "Timeline of step 1 ·" in figure.layout.title.text
    # the last copy runs 5 us past the commit: drawn whole, counted to the end of the step
    assert "transfers 0.025 ms · of these beside compute (overlap) 0.022 ms · exposed (stalls) 0.003 ms" in figure.layout.title.text
    assert figure.layout.xaxis.range[0] <= 0.040 and figure.layout.xaxis.range[1] < 0.072


def test_a_copy_on_the_link_in_that_time_is_shown_whoever_asked() -> None:
    rows = written_out().events.copy()
    rows.loc[rows["request_id"].eq(1) & rows["kind"].eq("transfer"), "step"] = 0
    shown = bars_of(plot_timeline(Trace(rows, "simulated"), steps=(1, 1)))
    assert shown["transfer: prefetch used"].base == (0.045,)


@pytest.mark.parametrize(
    ("selection", "says"),
    [
        ({"steps": (0, 1), "tokens": (0, 1)}, r"not both; you gave steps=\(0, 1\) and tokens=\(0, 1\).*leave one out"),
        ({"steps": (1, 0)}, r"first <= last.*you gave steps=\(1, 0\) and this trace has 2 steps \(0 to 1\).*leave steps out"),
        ({"steps": (0, 2)}, r"2 steps \(0 to 1\)"),
        ({"steps": (-1, 0)}, r"2 steps \(0 to 1\)"),
        ({"tokens": (2, 4)}, r"you gave tokens=\(2, 4\) and this trace has .* 4 generated tokens \(0 to 3\).*leave tokens out"),
        ({"tokens": (3, 2)}, r"4 generated tokens"),
        ({"steps": 1}, r"takes two numbers"),
        ({"steps": (0.5, 1)}, r"takes two numbers"),
        ({"tokens": (0, 1, 2)}, r"takes two numbers"),
    ],
)
def test_a_wrong_selection_says_what_there_is(selection: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plot_timeline(written_out(), **selection)


def test_nothing_to_draw_is_an_error_with_a_way_out() -> None:
    with pytest.raises(ValueError, match=r"none among its 0 events; pass the trace of a finished run"):
        plot_timeline(Trace.of([], "simulated"))
    with pytest.raises(ValueError, match=r"this trace has 0 steps and 0 generated tokens"):
        plot_timeline(Trace.of([("link", "transfer", 0.0, 1.0, -1, -1, 0, 0, 0, 1, 0, "demand", "used", 0.0)], "simulated"), steps=(0, 0))


def test_hostile_text_is_escaped_everywhere(tmp_path: Path) -> None:
    rows = [
        ("target", HOSTILE, 0.0, 1.0, 0, -1, 0, 0, 0, 1, 0, HOSTILE, HOSTILE, 0.0),
        ("link", "transfer", 0.0, 1.0, 0, -1, 0, 0, 0, 1, 0, "prefetch", HOSTILE, 0.0),
        ("target", "head", 1.0, 2.0, 0, -1, -1, -1, 1, 0, -1, "", "", 0.0),
    ]
    trace = Trace.of(rows, HOSTILE + "\x00")
    figure = plot_timeline(trace)
    texts = [figure.layout.title.text, *(text for bar in figure.data for text in bar.hovertext)]
    assert not any("<img" in text for text in texts) and sum("&lt;img" in text for text in texts) == 3
    assert set(bars_of(figure)) == {"head", "other", "transfer: prefetch wasted"}
    drawn = save_timeline_svg(trace, tmp_path / "hostile.svg").read_text("utf-8")
    ElementTree.fromstring(drawn)
    assert "<img" not in drawn


def test_a_small_figure_keeps_each_bar_and_lists_that_any_viewer_reads() -> None:
    trace = make_trace(20)
    figure = plot_timeline(trace)
    lasting = trace.events[trace.events["end_us"] > trace.events["start_us"]]
    assert sum(len(bar.x) for bar in figure.data) == len(lasting)
    assert sum(sum(bar.x) for bar in figure.data) * 1e3 == pytest.approx((lasting["end_us"] - lasting["start_us"]).sum())
    assert "bdata" not in figure.to_json()


def test_a_hundred_thousand_events_stay_small_and_quick() -> None:
    begin = time.perf_counter()
    figure = plot_timeline(LONG)
    text = figure.to_json()
    assert time.perf_counter() - begin < 10.0
    assert len(LONG) >= 100_000 and len(text) < 3_000_000
    assert sum(len(bar.x) for bar in figure.data) <= MOST_BARS
    assert len(figure.layout.shapes) <= 60 and len(figure.layout.annotations) <= 16
    assert any(" × expert: hit" in hover for hover in bars_of(figure)["expert: hit"].hovertext)


@pytest.mark.parametrize("most", [50, 800, 5000])
def test_merging_keeps_counts_times_and_bytes(most: int) -> None:
    bars = trace_bars(LONG)
    span_ms = bars.window_ms[1] - bars.window_ms[0]
    merged_bars = merge_bars(bars.table, span_ms, most)
    assert len(merged_bars) <= most
    keys = ["lane", "category"]
    for column in ("count", "bytes", "duration_ms"):
        before, after = (table.groupby(keys)[column].sum() for table in (bars.table, merged_bars))
        assert after.to_numpy() == pytest.approx(before.reindex(after.index).to_numpy())
    for _, lane in merged_bars.sort_values("drawn_ms").groupby("lane"):
        ends = lane["drawn_ms"] + lane["duration_ms"]
        assert (lane["drawn_ms"].iloc[1:].to_numpy() >= ends.iloc[:-1].to_numpy() - 1e-9).all()  # never over a neighbour
    assert (merged_bars["duration_ms"] <= merged_bars["end_us"] / 1e3 - merged_bars["start_ms"] + 1e-9).all()


def test_bars_that_overlap_share_the_room_when_merged() -> None:
    rows = [("link", "transfer", i / 10, i / 10 + 1, 0, -1, 0, 0, 0, 1, i, "demand", "used", 0.0) for i in range(100)]
    bars = trace_bars(Trace.of(rows, "two copy engines"))
    one = merge_bars(bars.table, 20.0, most=1)
    assert one[["drawn_ms", "count"]].to_numpy().tolist() == [[0.0, 100.0]]
    assert one["duration_ms"].tolist() == [pytest.approx(0.0109)]


def test_a_page_works_offline(tmp_path: Path) -> None:
    page = save_html(plot_timeline(written_out()), tmp_path / "timeline.html").read_text("utf-8")
    assert "<script src=" not in page and "plotly.js v" in page
    assert [entry.name for entry in tmp_path.iterdir()] == ["timeline.html"]


def test_the_picture_has_the_bars_of_the_figure(tmp_path: Path) -> None:
    root = ElementTree.parse(save_timeline_svg(written_out(), tmp_path / "timeline.svg")).getroot()
    svg = "{http://www.w3.org/2000/svg}"
    assert (root.get("width"), root.get("height")) == ("1000", "320")
    drawn = [float(rect.get("width", "nan")) for group in root.iter(f"{svg}g") for rect in group.iter(f"{svg}rect")]
    expected = [length * 902 / 0.075 for bar in plot_timeline(written_out()).data for length in bar.x]
    assert drawn == pytest.approx(expected, abs=0.01)
    texts = [text.text for text in root.iter(f"{svg}text")]
    for text in ("Timeline of steps 0 to 1 · simulated", "draft", "target", "link", "ms", "0.05", "prefill", "expert: late", "stall"):
        assert text in texts
    only = ElementTree.parse(save_timeline_svg(written_out(), tmp_path / "one.svg", steps=(1, 1))).getroot()
    assert "Timeline of step 1 · simulated" in [text.text for text in only.iter(f"{svg}text")]
    assert save_timeline_svg(LONG, tmp_path / "long.svg").stat().st_size < 300_000
    with pytest.raises(ValueError, match="takes two numbers"):
        save_timeline_svg(written_out(), tmp_path / "none.svg", steps=(5, 9))


def test_the_helper_makes_the_same_trace_each_time() -> None:
    assert make_trace(2, seed=3).events.equals(make_trace(2, seed=3).events)
    assert not make_trace(2, seed=3).events.equals(make_trace(2, seed=4).events)


# How red-, green- and blue-blind readers see linear RGB. Source: Machado, Oliveira, Fernandes 2009, severity 1.0.
SIGHT = {
    "full": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
SAME_LANE = (
    ("attention", "head", "plan", "expert: hit", "expert: late", "expert: miss", "stall"),
    ("attention", "head", "plan", "expert: draft"),
    ("transfer: demand", "transfer: prefetch used", "transfer: prefetch wasted"),
)


def linear(colour: str) -> list[float]:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]


def contrast(one: str, other: str) -> float:
    """WCAG contrast ratio."""
    low, high = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in (linear(one), linear(other)))
    return (high + 0.05) / (low + 0.05)


def lab(colour: str, sight: str) -> tuple[float, float, float]:
    """CIELAB as that reader sees it."""
    seen = [sum(weight * value for weight, value in zip(row, linear(colour), strict=True)) for row in SIGHT[sight]]
    r, g, b = (min(1.0, max(0.0, value)) for value in seen)
    x, y, z = 0.4124 * r + 0.3576 * g + 0.1805 * b, 0.2126 * r + 0.7152 * g + 0.0722 * b, 0.0193 * r + 0.1192 * g + 0.9505 * b
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x / 0.95047, y, z / 1.08883))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("name", COLOURS)
def test_each_colour_stands_out_on_white_and_on_dark(name: str) -> None:
    assert contrast(COLOURS[name], "#ffffff") >= 3.0 and contrast(COLOURS[name], "#1e1e1e") >= 3.0
    assert contrast(LINE_COLOUR, "#ffffff") >= 3.5 and contrast(LINE_COLOUR, "#1e1e1e") >= 3.5


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_of_one_lane_stay_apart_for_every_reader(sight: str) -> None:
    for lane in SAME_LANE:
        for one, other in itertools.combinations(lane, 2):
            assert math.dist(lab(COLOURS[one], sight), lab(COLOURS[other], sight)) >= 20.0, (one, other)


def test_the_legend_explains_each_colour() -> None:
    table = describe_colours()
    assert table["category"].tolist() == list(COLOURS) == list(MEANINGS)
    assert table["meaning"].str.len().min() > 10
