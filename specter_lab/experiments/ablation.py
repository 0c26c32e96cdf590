"""What each mechanism of a system is worth: removed from the whole, and alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specter_lab.experiments.experiment import Experiment, sweep
from specter_lab.experiments.recipe import System
from specter_lab.experiments.sweeps import recipe_of
from specter_lab.offload.eviction import LRU
from specter_lab.pipeline import Pipeline
from specter_lab.plots.sweeps import plot_column
from specter_lab.replay import ReplayTarget
from specter_lab.routing.chunked import ChunkedLookahead
from specter_lab.speculate.draft_length import FixedLength
from specter_lab.speculate.drafters import PromptLookupDrafter

Pieces = dict[str, Any]
NOTHING_AHEAD: Pieces = {"predictor": None, "barrier": False}
WHOLE_EXPERTS: Pieces = {"residual": False, "on_arrival": False}
DRAFT = ("drafter", "draft_length")
BYTES = ("drafter", "residual", "on_arrival")


@dataclass(frozen=True)
class Mechanism:
    """``has``: does the system have it? ``without``: what replaces its pieces. ``alone``: the pieces, by themselves or with
    the least that the mechanism needs; each gets the pipeline, and the last its ``pieces``.

    >>> MECHANISMS["barrier"].without(None)
    {'barrier': False}
    """

    has: Callable[[Pipeline], bool]
    without: Callable[[Any], Pieces]
    alone: Callable[[Pieces], Pieces]


def _reads_draft(pipeline: Pipeline) -> bool:
    return bool(getattr(pipeline.predictor, "reads_routing", False))


def _needs_codes(pipeline: Pipeline) -> bool:
    """Whether what crosses the link is rebuilt beside the draft's codes."""
    return pipeline.residency.rebuilds and getattr(pipeline.drafter, "bank", None) is not None


def _only(pieces: Pieces, *names: str, **more: Any) -> Pieces:
    return {**{name: pieces[name] for name in names}, **more}


MECHANISMS: dict[str, Mechanism] = {
    "quantization": Mechanism(
        lambda p: getattr(p.drafter, "bank", None) is not None and not isinstance(p.target, ReplayTarget),
        lambda p: {"drafter": PromptLookupDrafter(), **WHOLE_EXPERTS, **(NOTHING_AHEAD if _reads_draft(p) else {})},
        lambda pieces: _only(pieces, *BYTES, draft_length=0),
    ),
    "speculation": Mechanism(
        lambda p: p.drafter is not None,
        # residuals need the draft's codes, drafted with or not
        lambda p: {"draft_length": 0, "draft_ahead": False, **NOTHING_AHEAD, **({} if _needs_codes(p) else {"drafter": None})},
        lambda pieces: _only(pieces, *DRAFT),
    ),
    "lookahead": Mechanism(
        _reads_draft,
        lambda p: NOTHING_AHEAD,
        lambda pieces: _only(pieces, *DRAFT, predictor=ChunkedLookahead("late")),
    ),
    "prefetch timing": Mechanism(
        _reads_draft,
        lambda p: {"predictor": ChunkedLookahead("late")},
        lambda pieces: _only(pieces, *DRAFT, "predictor"),
    ),
    "eviction": Mechanism(
        lambda p: type(p.residency.eviction) is not LRU,
        lambda p: {"eviction": LRU()},
        lambda pieces: _only(pieces, "eviction"),
    ),
    "barrier": Mechanism(
        lambda p: p.assembly.barrier,
        lambda p: {"barrier": False},
        lambda pieces: _only(pieces, *DRAFT, predictor=ChunkedLookahead("late"), barrier=True),
    ),
    "fewer bytes": Mechanism(
        lambda p: p.residency.rebuilds,
        lambda p: WHOLE_EXPERTS,
        lambda pieces: _only(pieces, *BYTES, draft_length=0),
    ),
    "draft length": Mechanism(
        lambda p: p.drafter is not None and not isinstance(p.draft_length, FixedLength),
        lambda p: {"draft_length": 8},
        lambda pieces: _only(pieces, *DRAFT),
    ),
    "drafting ahead": Mechanism(
        lambda p: p.assembly.draft_ahead,
        lambda p: {"draft_ahead": False},
        lambda pieces: _only(pieces, *DRAFT, "draft_ahead"),
    ),
    "host lane": Mechanism(
        lambda p: p.assembly.split is not None,
        lambda p: {"split": None},
        lambda pieces: _only(pieces, "split"),
    ),
}


def ablate(system: System, prompts: Sequence[Any] | None = None, **options: Any) -> Experiment:
    """Each mechanism of a system removed, and each alone, at the same memory; one row a variant, over ``prompts``.

    ``share``: of the whole system's gain in mean TPOT over LRU slots on demand (of its loss, where it is slower), what is lost
    without the mechanism (removed) or reached with it (alone). The shares needn't add up: mechanisms need
    one another. Device memory that a mechanism took goes to slots when it is removed. A mechanism that can't be alone is
    joined by the least that it needs: lookahead, its timing and the barrier by the draft, and what is looked ahead at is then
    planned once, at the end of the draft. Quantization removed is a draft by prompt lookup, since a full-precision draft
    would have to be offloaded itself (left out in replays, whose drafts have no tokens); alone, it is the codes resident and,
    with residual experts, used, without drafting. "fewer bytes": residual or compressed experts. ``prompts``: bundled ones, one
    of each kind, if not given.

    >>> import specter_lab as sl
    >>> kw = dict(target=sl.load_moe("tiny-moe"), machine=sl.SimulatedMachine(), memory="12MB", max_new_tokens=6)
    >>> float(sl.ablate("specter", ["Once upon a time"], **kw).table.loc["whole", "share"])
    1.0
    """
    if prompts is None:
        from specter_lab.bundled import load_prompts

        prompts = [prompt.text for prompt in load_prompts(per_kind=1)]
    recipe = recipe_of(system, options)
    builds: dict[str, Callable[[], Pipeline]] = {"on_demand": recipe.bare, "whole": recipe.build}
    with recipe.build() as whole:
        for name, mechanism in MECHANISMS.items():
            if mechanism.has(whole):
                changes = mechanism.without(whole)
                builds[f"without {name}"] = lambda changes=changes: recipe.build(**changes)  # type: ignore[misc]
                builds[f"{name} alone"] = lambda m=mechanism: recipe.bare(**m.alone(recipe.pieces()))  # type: ignore[misc]
    table = sweep(builds, prompts, by="variant", **options).table
    tpot = table["tpot_ms.mean"]
    gain = tpot["on_demand"] - tpot["whole"]
    lost = table.index.str.startswith("without")
    table.insert(0, "share", ((tpot - tpot["whole"]).where(lost, tpot["on_demand"] - tpot) / gain) if gain else float("nan"))
    return Experiment(table, plot_column(table, title=f"{recipe.name}: each mechanism removed and alone"))
