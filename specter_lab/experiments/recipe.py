"""How to build a system again, with some of its pieces changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from specter_lab.baselines import named
from specter_lab.pieces import Machine
from specter_lab.pipeline import Pipeline

System = str | Callable[..., Pipeline] | Pipeline


class Recipe:
    """Builds a system as often as asked, always with the same target, machine and device memory.

    ``system``: a name of ``baselines``, a function like those (both with ``target``, ``machine``, ``memory``, and ``options`` of
    their own), or a pipeline, which brings all of that; what it learned isn't shared with what is built here. Raises
    ``ValueError`` for a system without a target.

    >>> import specter_lab as sl
    >>> recipe = Recipe("specter", target=sl.load_moe("tiny-moe"), machine=sl.SimulatedMachine(), memory="12MB")
    >>> with recipe.build(barrier=False) as pipeline: pipeline.assembly.barrier
    False
    """

    def __init__(
        self,
        system: System,
        *,
        target: Any = None,
        machine: Machine | None = None,
        memory: int | str | None = None,
        context_length: int | None = None,
        **options: Any,
    ) -> None:
        self.system = system
        self.options = {"machine": machine, "memory": memory, "context_length": context_length, **options}
        if isinstance(system, Pipeline):
            budget = system.plan.budget or system.plan.device.total
            self.target: Any = system.target
            self.name = type(system.predictor).__name__
            self.options = {"machine": system.machine, "memory": budget, "context_length": system.plan.context_length}
        else:
            self.target, self.name = target, system if isinstance(system, str) else system.__name__
        if self.target is None:
            raise ValueError(f"A system runs on a target; {self.name} was given none. Give target=..., machine=... and memory=...")

    def build(self, **changes: Any) -> Pipeline:
        """The system with these pieces instead of its own, named as in ``Pipeline``."""
        if isinstance(self.system, Pipeline):
            return Pipeline(self.target, **{**self.options, **self.pieces(), **changes})
        make = named(self.system) if isinstance(self.system, str) else self.system
        pipeline = make(self.target, **{**self.options, **changes})
        if not changes:  # packing is slow: the next one takes what this one made
            bank = getattr(pipeline.drafter, "bank", None)
            if bank is not None:
                self.options.setdefault("bank", bank)
            if pipeline.residency.rebuilds:
                self.options.setdefault("residual", pipeline.residency.store)
        return pipeline

    def bare(self, **pieces: Any) -> Pipeline:
        """These pieces alone, at the same memory: without any, LRU slots on demand."""
        return Pipeline(self.target, **self.sizes, **pieces)

    @property
    def sizes(self) -> dict[str, Any]:
        """Machine, memory and context, as every variant has them."""
        return {name: self.options[name] for name in ("machine", "memory", "context_length")}

    def pieces(self) -> dict[str, Any]:
        """The system's own pieces, fit for one more pipeline."""
        if isinstance(self.system, Pipeline):
            return pieces_of(self.system)
        with self.build() as donor:
            return pieces_of(donor)


def pieces_of(pipeline: Pipeline) -> dict[str, Any]:
    """What a pipeline is put together from, by the names of ``Pipeline``'s options; copies of all that learns.

    >>> import specter_lab as sl
    >>> with sl.baselines.specter(sl.load_moe("tiny-moe"), machine=sl.SimulatedMachine()) as pipeline: pieces_of(pipeline)["barrier"]
    True
    """
    kept = (pipeline.target, pipeline.machine, pipeline.prefetcher, pipeline.residency, pipeline.residency.store, pipeline.drafter)

    def fresh(piece: Any) -> Any:
        return copy.deepcopy(piece, {id(shared): shared for shared in kept})

    return {
        "drafter": pipeline.drafter,  # forgets at each request, and holds whole banks
        "predictor": fresh(pipeline.predictor),
        "eviction": fresh(pipeline.residency.eviction),
        "draft_length": fresh(pipeline.draft_length),
        "barrier": pipeline.assembly.barrier,
        "split": pipeline.assembly.split,
        "residual": pipeline.residency.store if pipeline.residency.rebuilds else False,
        "on_arrival": pipeline.residency.on_arrival,
    }
