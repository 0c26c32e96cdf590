"""Figures as files of their own."""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go

from specter_lab.observe.export import write_whole


def save_html(figure: go.Figure, path: str | Path) -> Path:
    """Write one page that works offline (plotly.js, some 5 MB, is inside it) and fits the window's width.

    The file appears under its name only when it is complete.

    >>> import tempfile
    >>> save_html(go.Figure(), Path(tempfile.mkdtemp()) / "empty.html").name
    'empty.html'
    """
    return write_whole(path, figure.to_html(include_plotlyjs=True, full_html=True, config={"responsive": True, "displaylogo": False}))
