"""One thing varied, the rest and the device memory the same: draft length, prompt length, memory, schedule, kind of request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from specter_lab.experiments.experiment import Experiment, sweep
from specter_lab.experiments.recipe import Recipe, System
from specter_lab.plots.sweeps import plot_column
from specter_lab.replay import ReplayTarget
from specter_lab.routing.chunked import SCHEDULES, ChunkedLookahead

OF_A_SYSTEM = ("target", "machine", "memory", "context_length", "bank", "residual", "library", "draft_length", "plan", "trial")


def recipe_of(system: System, options: dict[str, Any]) -> Recipe:
    """The recipe of a system, taking what it needs out of ``options``: the rest is of the request.

    >>> rest = {"target": "tiny-moe", "max_new_tokens": 3}
    >>> recipe_of("on_demand", rest).name, rest
    ('on_demand', {'max_new_tokens': 3})
    """
    return Recipe(system, **{name: options.pop(name) for name in OF_A_SYSTEM if name in options})


def draft_depth(system: System, prompts: Sequence[Any], *, lengths: Sequence[int] = (2, 4, 8, 16), **options: Any) -> Experiment:
    """Time per output token by fixed draft length.

    >>> import specter_lab as sl
    >>> kw = dict(target=sl.load_moe("tiny-moe"), machine=sl.SimulatedMachine(), memory="12MB", max_new_tokens=4)
    >>> sl.experiments.draft_depth("lookahead", ["Once"], lengths=(1, 2), **kw).table.index.name
    'draft_length'
    """
    recipe = recipe_of(system, options)
    return sweep({n: lambda n=n: recipe.build(draft_length=n) for n in lengths}, prompts, by="draft_length", **options)  # type: ignore[misc]


def cache_policies(system: System, prompts: Sequence[Any], *, schedules: Sequence[Any] = SCHEDULES, **options: Any) -> Experiment:
    """The system with its plans made in adaptive chunks, never, early or late, at the same slots.

    >>> import specter_lab as sl
    >>> kw = dict(target=sl.load_moe("tiny-moe"), machine=sl.SimulatedMachine(), memory="12MB", max_new_tokens=4)
    >>> sl.experiments.cache_policies("specter", ["Once"], **kw).table.index.tolist()
    ['adaptive', 'none', 'early', 'late']
    """
    recipe = recipe_of(system, options)
    builds = {s: lambda s=s: recipe.build(predictor=ChunkedLookahead(s)) for s in schedules}
    return sweep(builds, prompts, by="schedule", **options)


def memory_sweep(system: System, prompts: Sequence[Any], *, budgets: Sequence[int | str], **options: Any) -> Experiment:
    """One system at several budgets of device memory.

    >>> import specter_lab as sl
    >>> kw = dict(target=sl.load_moe("tiny-moe"), machine=sl.SimulatedMachine(), budgets=("8MB", "12MB"), max_new_tokens=4)
    >>> sl.experiments.memory_sweep("on_demand", ["Once"], **kw).table["hit_rate"].is_monotonic_increasing
    True
    """
    recipe, tables = recipe_of(system, options), {}
    for budget in budgets:
        tables[budget] = sweep({budget: lambda b=budget: recipe.build(memory=b)}, prompts, by="memory", **options).table  # type: ignore[misc]
    table = pd.concat(tables.values())
    return Experiment(table, plot_column(table, title=f"{recipe.name} by device memory"))


def prompt_length(system: System, prompts: Sequence[Any], *, lengths: Sequence[int] = (16, 128, 512), **options: Any) -> Experiment:
    """The same prompts (texts or token ids), cut to their first so many tokens; each must have as many.

    >>> import specter_lab as sl
    >>> kw = dict(target=sl.load_moe("tiny-moe"), machine=sl.SimulatedMachine(), memory="12MB", max_new_tokens=4)
    >>> sl.experiments.prompt_length("on_demand", [list(range(5, 40))], lengths=(4, 32), **kw).table["ttft_ms"].is_monotonic_increasing
    True
    """
    recipe, tables = recipe_of(system, options), []
    options.pop("prompt_tokens", None)  # what varies
    for length in lengths:
        cut = prompts if isinstance(recipe.target, ReplayTarget) else [_cut(recipe.target, prompt, length) for prompt in prompts]
        more = {"prompt_tokens": length} if isinstance(recipe.target, ReplayTarget) else {}
        tables.append(sweep({length: recipe.build}, cut, by="prompt_tokens", **options, **more).table)
    table = pd.concat(tables)
    return Experiment(table, plot_column(table, title=f"{recipe.name} by prompt length"))


def sensitivity(
    systems: System | Sequence[System],
    groups: Mapping[str, Sequence[Any]],
    *,
    variations: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> Experiment:
    """Systems over groups of prompts (kinds of text, input lengths) and variations of the request (temperatures, lengths).

    ``groups``: name -> prompts; ``variations``: name -> options of the request (none, if not given).

    >>> import specter_lab as sl
    >>> kw = dict(target=sl.load_moe("tiny-moe"), machine=sl.SimulatedMachine(), memory="12MB", max_new_tokens=4)
    >>> sl.experiments.sensitivity("on_demand", {"short": ["Once"], "long": ["Once upon a time"]}, **kw).table.shape[0]
    2
    """
    listed = list(systems) if isinstance(systems, Sequence) and not isinstance(systems, str) else [systems]
    tables = {}
    for group, prompts in groups.items():
        for variation, changes in (variations or {"as given": {}}).items():
            request = {**options, **changes}
            recipes = {recipe.name: recipe for recipe in (recipe_of(system, dict(request)) for system in listed)}
            request = {name: value for name, value in request.items() if name not in OF_A_SYSTEM}
            tables[group, variation] = sweep({name: r.build for name, r in recipes.items()}, prompts, by="system", **request).table
    table = pd.concat(tables, names=["group", "variation"])
    flat = table.set_axis([" ".join(map(str, key)) for key in table.index])
    return Experiment(table, plot_column(flat, title="time per output token"))


def _cut(target: Any, prompt: Any, length: int) -> list[int]:
    ids = target.tokenizer(prompt).input_ids if isinstance(prompt, str) else list(prompt)
    if len(ids) < length:
        raise ValueError(f"A prompt is cut to {length} tokens; one has {len(ids)}. Join some, or leave that length out.")
    return ids[:length]
