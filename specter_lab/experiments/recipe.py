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
        self._made: dict[str, Any] | None = None
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
        """The system with these pieces instead of its own, named as in ``Pipeline``.

        A named system is made anew only for another ``memory``: packing experts, or trying plans, is slow.
        """
        if isinstance(self.system, Pipeline) or set(changes) - {"memory"}:
            kind = type(self.system) if isinstance(self.system, Pipeline) else Pipeline
            return kind(self.target, **{**self.sizes, **self.pieces(), **changes})
        make = named(self.system) if isinstance(self.system, str) else self.system
        return make(self.target, **{**self.options, **changes})

    def bare(self, **pieces: Any) -> Pipeline:
        """These pieces alone, at the same memory: without any, LRU slots on demand."""
        return Pipeline(self.target, **self.sizes, **pieces)

    @property
    def sizes(self) -> dict[str, Any]:
        """Machine, memory and context, as every variant has them."""
        return {name: self.options[name] for name in ("machine", "memory", "context_length")}

    def pieces(self) -> dict[str, Any]:
        """The system's own pieces, fit for one more pipeline."""
        if self._made is None:
            if isinstance(self.system, Pipeline):
                self._made = pieces_of(self.system)
            else:
                with self.build() as donor:
                    self._made = pieces_of(donor)
        return {name: copy.deepcopy(piece, {id(s): s for s in self._shared()}) for name, piece in self._made.items()}

    def _shared(self) -> tuple[Any, ...]:
        """What pieces hold and copies must hold too."""
        made = self._made or {}
        return (self.target, self.options["machine"], made.get("drafter"), made.get("residual"))


def pieces_of(pipeline: Pipeline) -> dict[str, Any]:
    """What a pipeline is put together from, by the names of ``Pipeline``'s options; copies, unbound, of all that learns.

    >>> import specter_lab as sl
    >>> with sl.baselines.specter(sl.load_moe("tiny-moe"), machine=sl.SimulatedMachine()) as pipeline: pieces_of(pipeline)["barrier"]
    True
    """
    residency = pipeline.residency
    kept = (pipeline.target, pipeline.machine, residency.store, pipeline.drafter, getattr(pipeline.drafter, "bank", None))

    def fresh(piece: Any) -> Any:
        memo = {id(shared): shared for shared in kept} | {id(view): None for view in (pipeline.prefetcher, residency)}
        return copy.deepcopy(piece, memo)

    return {
        "drafter": pipeline.drafter,  # forgets at each request, and holds whole banks
        "predictor": fresh(pipeline.predictor),
        "eviction": fresh(residency.eviction),
        "draft_length": fresh(pipeline.draft_length),
        "barrier": pipeline.assembly.barrier,
        "split": pipeline.assembly.split,
        "residual": residency.store if residency.rebuilds else False,
        "on_arrival": residency.on_arrival,
        "draft_ahead": pipeline.assembly.draft_ahead,
    }
