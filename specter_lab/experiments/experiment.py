"""A table and its figure, and the sweep that makes most of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import pandas as pd
import plotly.graph_objects as go

from specter_lab.comparison import compare
from specter_lab.pipeline import Pipeline
from specter_lab.plots.sweeps import plot_column


class Experiment(NamedTuple):
    """A table and the figure of its main column.

    >>> Experiment(pd.DataFrame({"a": [1]}), go.Figure()).table.shape
    (1, 1)
    """

    table: pd.DataFrame
    figure: go.Figure


def sweep(builds: Mapping[Any, Callable[[], Pipeline]], prompts: Sequence[Any], *, by: str, **options: Any) -> Experiment:
    """Compare what each of ``builds`` makes, keyed by the swept value; ``by`` names it. ``options`` go to ``compare``.

    >>> import specter_lab as sl
    >>> moe, machine = sl.load_moe("tiny-moe"), sl.SimulatedMachine()
    >>> builds = {n: lambda n=n: sl.Pipeline(moe, machine=machine, slots=6) for n in (1, 2)}
    >>> sl.experiments.sweep(builds, ["Once"], by="copy", max_new_tokens=3).table.index.tolist()
    [1, 2]
    """
    with ExitStack() as stack:
        pipelines = {str(value): stack.enter_context(build()) for value, build in builds.items()}
        done = compare(pipelines, prompts, **options)
    table = done.table.set_axis(pd.Index(list(builds), name=by))
    return Experiment(table, plot_column(table, title=f"time per output token by {by} · {done.machine}"))
