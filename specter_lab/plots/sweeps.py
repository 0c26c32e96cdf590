"""A figure of one column of a comparison: bars for systems, a line for a numeric sweep, with their intervals."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from specter_lab.plots.style import COLOURS


def plot_column(table: pd.DataFrame, column: str = "tpot_ms.mean", *, title: str = "") -> go.Figure:
    """``table`` is indexed by system or by the swept number; ``column`` names what is drawn. Mean TPOT gets its interval over
    prompts, where there is one.

    >>> plot_column(pd.DataFrame({"tpot_ms.mean": [3.0, 2.0]}, index=["a", "b"])).data[0].type
    'bar'
    """
    if column not in table:
        raise ValueError(f"A figure draws a column of its table; {column!r} isn't one. Columns: {', '.join(map(str, table.columns))}.")
    colour = COLOURS["attention"]
    index, values = list(table.index), table[column].tolist()
    bars = _error_bars(table, values) if column == "tpot_ms.mean" else None
    mark: go.Bar | go.Scatter
    if all(isinstance(i, int | float) for i in index):
        mark = go.Scatter(x=index, y=values, mode="lines+markers", line={"color": colour}, error_y=bars)
    else:
        mark = go.Bar(x=[str(i) for i in index], y=values, marker={"color": colour}, error_y=bars)
    layout = {"title": title, "xaxis": {"title": table.index.name or ""}, "yaxis": {"title": column, "rangemode": "tozero"}}
    return go.Figure(mark, layout={**layout, "template": "plotly_white", "height": 360})


def _error_bars(table: pd.DataFrame, values: list[float]) -> dict[str, object] | None:
    """From the value to either bound of the column "tpot_ms_ci95"."""
    bounds = table.get("tpot_ms_ci95")
    if bounds is None or not all(isinstance(pair, list) for pair in bounds):
        return None
    above = [high - value for (_, high), value in zip(bounds, values, strict=True)]
    return {"type": "data", "array": above, "arrayminus": [value - low for (low, _), value in zip(bounds, values, strict=True)]}
