"""What better, or worse, predictions would give: an oracle that is wrong about a share of the identities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specter_lab.experiments.experiment import Experiment, sweep
from specter_lab.experiments.recipe import System
from specter_lab.experiments.sweeps import recipe_of
from specter_lab.oracle import OraclePipeline


def oracle_replay(
    system: System, prompts: Sequence[Any], *, replaced: Sequence[float] = (0.0, 0.25, 0.5, 0.75), seed: int = 0, **options: Any
) -> Experiment:
    """The system with the predictions of an oracle, of which a share of the expert identities are replaced by others.

    Drafter, eviction, draft length and the rest stay the system's own; for "oracle" the drafts are perfect too. Greedy only:
    each request is rehearsed to know its text. The oracle knows the text, not where rejected drafts are routed.

    >>> import specter_lab as sl
    >>> kw = dict(target=sl.load_moe("tiny-moe"), machine=sl.SimulatedMachine(0.1), memory="12MB", max_new_tokens=12, do_sample=False)
    >>> sl.experiments.oracle_replay("on_demand", ["Once"], replaced=(0.0, 0.5), **kw).table["recall"].round(1).tolist()
    [1.0, 0.5]
    """
    recipe = recipe_of(system, options)

    def build(share: float) -> OraclePipeline:
        return OraclePipeline(recipe.target, replaced=share, seed=seed, **{**recipe.pieces(), **recipe.sizes})

    return sweep({share: lambda share=share: build(share) for share in replaced}, prompts, by="replaced", **options)  # type: ignore[misc]
