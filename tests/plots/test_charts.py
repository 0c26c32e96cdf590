"""Charts as data: what each draws, by hand, and what it refuses."""

from __future__ import annotations

import itertools
import math

import pandas as pd
import plotly.graph_objects as go
import pytest
import torch

import specter_lab as sl
from specter_lab.plots.charts import SERIES, TIMES, expert_use, plot_heatmap, plot_lines, plot_scores, plot_steps, plot_times
from specter_lab.plots.style import COLOURS, HATCHES, LINE_COLOUR
from tests.plots.test_timeline import HOSTILE, SIGHT, lab, written_out

LOG = sl.RoutingLog(
    experts=torch.tensor([[[0, 2], [1, -1]], [[2, 1], [1, 0]]]), weights=torch.ones(2, 2, 2), tokens=torch.tensor([7, 8]),
    positions=torch.arange(2), forwards=torch.zeros(2, dtype=torch.int64), expert_counts=(4, 2), decoder_layers=(0, 1), model_type="toy",
)  # fmt: skip


@pytest.fixture(scope="module")
def traces():
    moe = sl.load_moe("tiny-moe", dtype="float32")
    with moe:
        bank = moe.quantize("qint4")
        shared = {"drafter": sl.SelfDrafter(bank), "draft_length": 3, "slots": 8, "machine": sl.SimulatedMachine(0.25)}
        found = {}
        for name, predictor in {"on demand": None, "lookahead": sl.DraftLookahead()}.items():
            with sl.Pipeline(moe, predictor=predictor, **shared) as pipeline:
                found[name] = pipeline.generate("Once upon a time", max_new_tokens=9, do_sample=False).trace
    return found


def points(figure: go.Figure) -> dict[str, list[tuple[float, float]]]:
    return {line.name: list(zip(line.x, line.y, strict=True)) for line in figure.data}


def test_expert_use_by_hand() -> None:
    table = expert_use(LOG)
    assert table.loc[0].tolist() == [0.5, 0.5, 1.0, 0.0]
    assert table.loc[1].iloc[:2].tolist() == [0.5, 1.0] and table.loc[1].iloc[2:].isna().all()
    assert (table.index.name, table.columns.name) == ("layer", "expert")


def test_a_heat_map_keeps_rows_and_columns() -> None:
    figure = plot_heatmap(expert_use(LOG), title="use")
    (cells,) = figure.data
    assert cells.z[0] == [0.5, 0.5, 1.0, 0.0] and list(cells.y) == [0, 1] and list(cells.x) == [0, 1, 2, 3]
    assert figure.layout.yaxis.autorange == "reversed" and cells.zmin == 0
    assert figure.layout.yaxis.title.text == "layer" and figure.layout.xaxis.title.text == "expert"


def test_lines_and_chance() -> None:
    rows = [("a", 1, 0.1, 0.5), ("a", 2, 0.2, 0.5), ("b", 1, 0.3, 0.5), ("b", 2, float("nan"), 0.5)]
    figure = plot_lines(pd.DataFrame(rows, columns=["name", "layer", "reuse", "chance"]), x="layer", y="reuse", by="name", chance="chance")
    assert [line.name for line in figure.data] == ["chance", "a", "b"]
    drawn = points(figure)
    assert drawn["chance"] == [(1, 0.5), (2, 0.5)] and drawn["a"] == [(1, 0.1), (2, 0.2)]
    assert math.isnan(drawn["b"][1][1])
    assert figure.data[0].line.color == LINE_COLOUR and [line.line.color for line in figure.data[1:]] == list(SERIES[:2])
    assert figure.layout.xaxis.title.text == "layer" and figure.layout.yaxis.title.text == "reuse"


def test_one_line_without_groups() -> None:
    table = pd.DataFrame({"length": [1, 2], "tokens": [1.5, 2.5]})
    assert points(plot_lines(table, x="length", y="tokens")) == {"tokens": [(1, 1.5), (2, 2.5)]}
    assert plot_lines(table, x="length", y="tokens", share=True).layout.yaxis.range == (0, 1.03)


def test_names_are_escaped() -> None:
    table = pd.DataFrame({"x": [1], "y": [1], "name": [HOSTILE]})
    hostile = {HOSTILE: written_out()}
    figures = [plot_lines(table, x="x", y="y", by="name"), plot_times(hostile), plot_steps(hostile, step=1)]
    assert all("<img" not in figure.to_json() for figure in figures)


def test_scores_are_those_of_the_table(traces) -> None:
    for by in ("layer", "horizon"):
        figure, scores = plot_scores(traces, by=by), sl.prediction_scores(traces["lookahead"], by=by)
        scores = scores[scores["predicted"] > 0]
        assert [line.name for line in figure.data] == ["lookahead"] * 3, "who predicts nothing has no line"
        for line, column in zip(figure.data, ("recall", "precision", "on_time"), strict=True):
            assert list(line.x) == scores.index.tolist()
            assert list(line.y) == pytest.approx(scores[column].tolist(), nan_ok=True)
        assert "simulated" in figure.layout.title.text


def test_times_are_those_of_the_metrics(traces) -> None:
    figure = plot_times(traces)
    heights = {bar.name: dict(zip(bar.x, bar.y, strict=True)) for bar in figure.data}
    for name, trace in traces.items():
        row = sl.summarize(trace)
        assert heights["transfer"][name] == row["transfer_ms_per_token"] and heights["exposed"][name] == row["exposed_ms_per_token"]
        assert heights["overlap"][name] == pytest.approx(row["overlap"] * row["transfer_ms_per_token"])
        assert heights["overlap"][name] <= heights["transfer"][name]
    assert [bar.marker.color for bar in figure.data] == [COLOURS[category] for category in TIMES.values()]
    assert figure.data[2].marker.pattern.shape == HATCHES["stall"]


def test_a_step_begins_at_zero_in_every_run(traces) -> None:
    figure = plot_steps({**traces, "by hand": written_out()}, step=1)
    rows = figure.layout.yaxis.categoryarray[::-1]
    lanes = [f"{name} · {lane}" for name in traces for lane in ("draft", "target", "link")]
    assert list(rows) == [*lanes, "by hand · draft", "by hand · target", "by hand · link"]
    bars = [box for bar in figure.data for box in zip(itertools.repeat(bar.name), bar.y, bar.base, bar.x)]
    mine = {(name, row, round(begin, 9), length) for name, row, begin, length in bars if row.startswith("by hand")}
    assert ("expert: draft", "by hand · draft", 0.0, 0.010) in mine
    assert ("transfer: prefetch used", "by hand · link", 0.005, 0.015) in mine
    assert ("stall", "by hand · target", 0.017, 0.003) in mine
    assert min(begin for _, row, begin, _ in bars if not row.endswith("link")) == pytest.approx(0.0)


def test_no_packed_arrays(traces) -> None:
    figures = [plot_scores(traces), plot_times(traces), plot_steps(traces, step=1), plot_heatmap(expert_use(LOG))]
    assert all("bdata" not in figure.to_json() for figure in figures)


@pytest.mark.parametrize("sight", SIGHT)
def test_lines_stay_apart_for_every_reader(sight: str) -> None:
    for one, other in itertools.combinations(SERIES, 2):
        assert math.dist(lab(one, sight), lab(other, sight)) >= 20.0


def test_refusals(traces) -> None:
    table = pd.DataFrame({"x": range(7), "y": range(7), "name": list("abcdefg")})
    with pytest.raises(ValueError, match=r"\['z'\] are none. Columns: x, y, name"):
        plot_lines(table, x="x", y="z")
    with pytest.raises(ValueError, match="tells 1 to 6 lines apart; got 7"):
        plot_lines(table, x="x", y="y", by="name")
    with pytest.raises(ValueError, match="'layer' or by 'horizon'"):
        plot_scores(traces, by="expert")
    with pytest.raises(ValueError, match="takes two numbers"):
        plot_steps(traces, step=99)
    for draw in (plot_times, lambda none: plot_steps(none, step=1)):
        with pytest.raises(ValueError, match="at least one trace"):
            draw({})
