"""Where tokens are routed: by draft and target, in windows, on identical inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pandas as pd
import torch

from specter_lab.comparison import compare
from specter_lab.experiments.experiment import Experiment
from specter_lab.experiments.recipe import System
from specter_lab.experiments.sweeps import recipe_of
from specter_lab.fidelity import fidelity as compare_routing
from specter_lab.fidelity import routing_match
from specter_lab.generation import Generation
from specter_lab.oracle import text_routing
from specter_lab.plots.charts import plot_lines
from specter_lab.plots.sweeps import plot_column
from specter_lab.replay import ReplayTarget
from specter_lab.routing.log import RoutingLog
from specter_lab.routing.predictors import DraftLookahead


def routing(system: System, groups: Mapping[str, Sequence[Any]] | Sequence[Any], **options: Any) -> Experiment:
    """By group of prompts: how alike neighbouring tokens are routed, what a pass needs of a layer, and what the draft knew of it.

    ``reuse``: experts of a token that the next one uses too, beside ``chance``. ``union``: distinct experts that a pass needs of a
    layer, and ``diversity``, their share of all. ``window_recall``, ``window_precision``: those that the draft of the window went
    to as well (None without a draft that has experts), ``accepted_recall`` of the rows that were accepted. ``hit_rate``: of slots.

    >>> import specter_lab as sl
    >>> kw = dict(target=sl.load_moe("tiny-moe"), machine=sl.SimulatedMachine(), memory="12MB", max_new_tokens=12)
    >>> sl.experiments.routing("lookahead", {"prose": ["Once upon a time"]}, **kw).table["window_recall"].item() > 0.7
    True
    """
    recipe = recipe_of(system, options)
    named = groups if isinstance(groups, Mapping) else {"all": groups}
    rows: dict[str, dict[str, float | None]] = {}
    with ExitStack() as stack:
        pipeline = stack.enter_context(recipe.build())
        drafts = getattr(pipeline.drafter, "bank", None) is not None
        if drafts:  # what the draft was routed to is seen in predictions
            pipeline = stack.enter_context(recipe.build(predictor=DraftLookahead()))
        for group, prompts in named.items():
            done = compare({"system": pipeline}, prompts, **options)
            rows[group] = _routes(done.generations["system"], recipe.target.geometry.experts, drafts)
    table = pd.DataFrame(rows).T.astype(float).rename_axis("group")
    return Experiment(table, plot_column(table, "union", title=f"{recipe.name}: distinct experts that a pass needs of a layer"))


def working_set(system: System, prompts: Sequence[Any], *, lengths: Sequence[int] = (0, 1, 2, 4, 8, 16), **options: Any) -> Experiment:
    """How the experts that a pass needs of a layer grow with the draft, and what that costs, by draft length.

    Before the figures of ``compare``: ``union``, ``diversity`` as in ``routing``, and ``experts_per_token``: the experts of a pass
    for each token that it commits, the figure that speculation can lower.

    >>> import specter_lab as sl
    >>> kw = dict(target=sl.load_moe("tiny-moe"), machine=sl.SimulatedMachine(), memory="12MB", max_new_tokens=12)
    >>> sl.experiments.working_set("lookahead", ["Once upon a time"], lengths=(1, 4), **kw).table["union"].is_monotonic_increasing
    True
    """
    recipe = recipe_of(system, options)
    experts = recipe.target.geometry.experts
    with ExitStack() as stack:
        pipelines = {str(n): stack.enter_context(recipe.build(draft_length=n)) for n in lengths}
        done = compare(pipelines, prompts, **options)
    table = done.table.set_axis(pd.Index(lengths, name="draft_length"))
    unions = pd.Series([_union(done.generations[str(n)]) for n in lengths], index=table.index)
    table.insert(0, "union", unions)
    table.insert(1, "diversity", unions / np.mean(experts))
    table.insert(2, "experts_per_token", unions * len(experts) / table["tokens_per_step"])
    return Experiment(table, plot_column(table, "union", title=f"experts that a pass needs of a layer · {done.machine}"))


def fidelity(system: System, texts: Sequence[Any], *, temperature: float = 1.0, **options: Any) -> Experiment:
    """The system's draft against the target on identical inputs, apart from any cache or schedule: a row a layer.

    Columns as in ``routing_match``; for a model also ``top1_agreement`` and ``acceptance`` at ``temperature``, of all layers at
    once. For a replay the rows are horizons instead, of the texts' own drafts. ``ValueError`` for a system whose draft has no experts.

    >>> import specter_lab as sl
    >>> kw = dict(target=sl.load_moe("tiny-moe"), machine=sl.SimulatedMachine(), memory="12MB")
    >>> sl.experiments.fidelity("specter", ["Once upon a time"], **kw).table.loc[0, "recall"].item()  # before any expert
    1.0
    """
    recipe = recipe_of(system, options)
    with recipe.build() as pipeline:
        bank = getattr(pipeline.drafter, "bank", None)
        if bank is None:
            raise ValueError(f"Fidelity is of a draft with experts; {recipe.name} has none. Take a system with a self-draft.")
        if isinstance(recipe.target, ReplayTarget):
            horizons = zip(*(text.draft for text in texts), strict=True)
            target = torch.cat([torch.from_numpy(text.experts.astype(np.int64)) for text in texts])
            means = [routing_match(target, torch.from_numpy(np.concatenate(rows).astype(np.int64))).mean() for rows in horizons]
            table = pd.DataFrame(means, index=pd.RangeIndex(1, len(means) + 1, name="horizon"))
        else:
            found = compare_routing(recipe.target, bank, texts, temperature=temperature)
            table = found.routing.assign(top1_agreement=found.top1_agreement, acceptance=found.acceptance)
    by = str(table.index.name)
    lines = table.reset_index().melt(by, ["set_match", "part_match", "recall"], var_name="which", value_name="share")
    return Experiment(table, plot_lines(lines, x=by, y="share", by="which", title=f"{recipe.name}: draft against target", share=True))


def _union(runs: Sequence[Generation]) -> float:
    """Mean number of experts that a pass of the decoding phase needs of a layer."""
    needs = pd.concat([run.trace.of_kind("need").assign(run=i) for i, run in enumerate(runs)]).query("step >= 1")
    return float(needs.groupby(["run", "step", "layer"]).size().mean())


def _routes(runs: Sequence[Generation], counts: Sequence[int], drafts: bool) -> dict[str, float | None]:
    logs = [_log(run, counts).reuse() for run in runs]
    figures = pd.DataFrame([run.metrics for run in runs]).astype(float).mean()
    known = {"window_recall": "recall", "accepted_recall": "recall_accepted", "window_precision": "precision"}
    return {
        "reuse": float(np.nanmean([log["reuse"].mean() for log in logs])),
        "chance": float(np.nanmean([log["chance"].mean() for log in logs])),
        "union": _union(runs),
        "diversity": _union(runs) / float(np.mean(counts)),
        **{name: figures[source] if drafts else None for name, source in known.items()},
        **{name: figures[name] for name in ("hit_rate", "acceptance_rate", "tokens_per_step")},
    }


def _log(run: Generation, counts: Sequence[int]) -> RoutingLog:
    """The routing of a run's own text, after the prompt."""
    prompt = run.conditions["prompt_tokens"]
    width = int(run.trace.of_kind("route").groupby(["step", "position", "layer"]).size().max())
    experts = torch.from_numpy(text_routing(run.trace, prompt, width)[prompt:])
    places, zeros = torch.arange(len(experts)), torch.zeros(len(experts), dtype=torch.int64)
    return RoutingLog(experts, (experts >= 0).float(), zeros, places, zeros, tuple(counts), tuple(range(len(counts))), "a run")
