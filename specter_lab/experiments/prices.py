"""What things cost: the time of a token by its parts, and the memory of a draft that shares or copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from specter_lab.comparison import Comparison, compare
from specter_lab.experiments.experiment import Experiment, sweep
from specter_lab.experiments.recipe import System
from specter_lab.experiments.sweeps import OF_A_SYSTEM, recipe_of
from specter_lab.memory import BudgetError
from specter_lab.observe.analysis import critical_path
from specter_lab.observe.trace import Trace
from specter_lab.plots.style import COLOURS
from specter_lab.plots.sweeps import plot_column
from specter_lab.speculate.copied import CopiedDrafter

PARTS = {"draft": "head", "attention": "attention", "experts": "expert", "other": "plan", "stalls": "stall"}
"""Parts of a token's time, and the colour of each."""


def latency(done: Comparison | System | Sequence[System], prompts: Sequence[Any] = (), **options: Any) -> Experiment:
    """Where each system's decoding time goes, in ms a token: a row a system, from the traces of a comparison (or of a new one).

    ``draft``: all its compute. Of the target: ``attention`` (and router), ``experts`` (with rebuilding), ``other`` (head and planning).
    ``stalls``, split by what is waited for: ``for_demand``, ``for_prefetch`` (late ones, and those in the way), ``for_host``. Beside
    them ``hidden``: copies during which nothing waited. The parts add up to ``tpot``.

    >>> import specter_lab as sl
    >>> done = sl.compare(["on_demand"], ["Once"], target="tiny-moe", machine=sl.SimulatedMachine(), max_new_tokens=3)
    >>> sl.experiments.latency(done).table["draft"].item()
    0.0
    """
    if not isinstance(done, Comparison):
        listed = list(done) if isinstance(done, Sequence) and not isinstance(done, str) else [done]
        recipes = [recipe_of(system, dict(options)) for system in listed]
        request = {name: value for name, value in options.items() if name not in OF_A_SYSTEM}
        builds = {recipe.name: recipe.build() for recipe in recipes}
        try:
            done = compare(builds, prompts, **request)
        finally:
            for pipeline in builds.values():
                pipeline.close()
    table = pd.DataFrame({name: _mean([_parts(run.trace) for run in runs]) for name, runs in done.generations.items()}).T
    table = table.rename_axis("system")
    bars = [go.Bar(x=list(table.index), y=table[part].tolist(), name=part, marker={"color": COLOURS[PARTS[part]]}) for part in PARTS]
    layout = {"title": f"time of a token · {done.machine}", "barmode": "stack", "yaxis": {"title": "ms"}, "template": "plotly_white"}
    return Experiment(table, go.Figure(bars, layout={**layout, "height": 380}))


def memory(system: System, prompts: Sequence[Any], **options: Any) -> Experiment:
    """What a self-draft that shares the target's weights and KV saves, at equal device memory: a row a way to draft.

    "shared": as the system is. "copied KV": the same with a KV cache for the draft beside the target's; nothing else differs,
    so it runs with that much less for slots. "copied weights and KV": ``CopiedDrafter``. ``bytes_short``: what a variant lacks
    where it doesn't fit; then it has no other figures. ``ValueError`` for a system without a self-draft.

    >>> import specter_lab as sl
    >>> kw = dict(target=sl.load_moe("tiny-moe"), machine=sl.SimulatedMachine(), memory="12MB", max_new_tokens=6)
    >>> sl.experiments.memory("specter", ["Once"], **kw).table["device_bytes.slots"].is_monotonic_decreasing
    True
    """
    recipe = recipe_of(system, options)
    with recipe.build() as shared:
        bank, device = getattr(shared.drafter, "bank", None), shared.plan.device
        budget = shared.plan.budget or device.total
    if bank is None:
        raise ValueError(f"A copy of the target is a self-draft's; {recipe.name} has none. Take a system that drafts with low-bit experts.")
    builds = {
        "shared": recipe.build,
        "copied KV": lambda: recipe.build(memory=budget - device.kv),
        "copied weights and KV": lambda: recipe.build(drafter=CopiedDrafter(recipe.target, bank)),
    }
    tables = []
    for name, build in builds.items():
        try:
            table = sweep({name: build}, prompts, by="draft", **options).table.assign(bytes_short=0)
            if name == "copied KV":
                for column in ("device_bytes.kv", "device_bytes.total"):
                    table[column] += device.kv
        except BudgetError as error:
            table = pd.DataFrame({"bytes_short": error.short}, index=pd.Index([name], name="draft"))
        tables.append(table)
    table = pd.concat(tables)
    return Experiment(table, plot_column(table, title=f"{recipe.name}: what the draft shares"))


def _parts(trace: Trace) -> Mapping[str, float]:
    """One run's parts, in ms a token after the first."""
    commits, events = trace.of_kind("commit"), trace.events
    begin, end, tokens = commits["start_us"].iloc[0], commits["start_us"].iloc[-1], commits["tokens"].sum() - 1
    events = events[(events["step"] >= 1) & (events["end_us"] > events["start_us"])]
    us = events["end_us"].clip(begin, end) - events["start_us"].clip(begin, end)

    def spent(where: pd.Series) -> float:
        return float(us[where].sum() / tokens / 1e3)

    kind, draft, target = events["kind"], events["lane"] == "draft", events["lane"] == "target"
    path = critical_path(trace).query("step >= 1")
    waited = path.groupby("reason")["exposed_us"].sum() / tokens / 1e3
    return {
        "draft": spent(draft),
        "attention": spent(target & (kind == "attention")),
        "experts": spent(target & kind.isin(["expert", "rebuild"])),
        "other": spent(target & kind.isin(["head", "plan"])),
        "stalls": spent(target & (kind == "stall")),
        **{f"for_{reason}": float(waited.get(reason, 0.0)) for reason in ("demand", "prefetch", "host")},
        "hidden": float(path["hidden_us"].sum() / tokens / 1e3),
        "tpot": float((end - begin) / tokens / 1e3),
    }


def _mean(rows: Sequence[Mapping[str, float]]) -> pd.Series:
    return pd.DataFrame(rows).mean()
