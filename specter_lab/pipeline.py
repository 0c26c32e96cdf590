"""A target and its pieces, ready to decode requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specter_lab.decoding import Decoding
from specter_lab.generation import Generation, conditions_of, encode, refuse_unknown, stop_criteria
from specter_lab.loop import Assembly
from specter_lab.machines.throttled import ThrottledMachine
from specter_lab.memory import MemoryPlan, plan_memory
from specter_lab.models import MoE, load_moe
from specter_lab.offload.eviction import LRU
from specter_lab.offload.prefetcher import Prefetcher
from specter_lab.offload.residency import Residency
from specter_lab.offload.server import MissSplit
from specter_lab.pieces import Drafter, DraftLength, EvictionPolicy, Machine, Predictor
from specter_lab.replay import ReplayableText, Replayed, ReplayTarget
from specter_lab.routing.predictors import DraftLookahead, NoPrediction
from specter_lab.speculate.draft_length import FixedLength


class Pipeline:
    """A target whose experts wait on the host, decoded with whatever pieces it is given.

    ``target``: a ``MoE`` or what ``load_moe`` takes. ``drafter``: None decodes token by token. ``draft_length``: a number
    or a ``DraftLength`` (8 with a drafter). ``machine``: throttled at 0.05 GB/s by default. Device memory: ``slots`` a
    layer, or ``memory`` in all; ``context_length`` is what the plan counts KV for. Requests start with empty slots
    unless ``warm``. ``barrier``: verification waits for all planned copies. ``split``: which misses the host computes
    (none by default; ``SplitByFinish``). ``poison`` fills forgotten slots with NaN.

    >>> import specter_lab as sl
    >>> with sl.Pipeline("tiny-moe", slots=6, machine=sl.SimulatedMachine()) as pipeline:
    ...     len(pipeline.generate("Once upon a time", max_new_tokens=4).new_ids)
    4
    """

    def __init__(
        self,
        target: MoE | ReplayTarget | str | Path | torch.nn.Module,
        *,
        drafter: Drafter | None = None,
        predictor: Predictor | None = None,
        eviction: EvictionPolicy | None = None,
        draft_length: int | DraftLength | None = None,
        machine: Machine | None = None,
        slots: int | Sequence[int] | None = None,
        memory: int | str | None = None,
        context_length: int | None = None,
        barrier: bool = False,
        split: MissSplit | None = None,
        warm: bool = False,
        poison: bool = False,
        **unknown: Any,
    ) -> None:
        refuse_unknown(unknown, Pipeline.__init__)
        length = (8 if drafter else 0) if draft_length is None else draft_length
        self.drafter, self.predictor = drafter, predictor or NoPrediction()
        self.draft_length: DraftLength = FixedLength(length) if isinstance(length, int) else length
        if isinstance(self.predictor, DraftLookahead) and getattr(drafter, "bank", None) is None:
            raise ValueError(
                f"Draft lookahead reads the draft's routing; the drafter is {getattr(drafter, 'name', None)!r}, which has no experts. "
                "Use SelfDrafter, or another predictor (NextLayerGate, NoPrediction)."
            )
        self.machine: Machine = machine or ThrottledMachine()
        self.warm, self.closed = warm, False
        self.target: MoE | ReplayTarget = target if isinstance(target, MoE | ReplayTarget) else load_moe(target)
        self.target.lease()
        try:
            bank = getattr(drafter, "bank", None)
            self.plan: MemoryPlan = plan_memory(self.target, bank=bank, slots=slots, memory=memory, context_length=context_length)
            self.assembly = Assembly(
                self.target.store, self.plan.slots, self.machine, drafter=drafter, predictor=self.predictor, eviction=eviction or LRU(),
                draft_length=self.draft_length, barrier=barrier, split=split, poison=poison, device=str(self.target.device),
            )  # fmt: skip
        except BaseException:
            self.target.release()
            raise

    @property
    def residency(self) -> Residency:
        """The device slots."""
        return self.assembly.residency

    @property
    def prefetcher(self) -> Prefetcher:
        """The queues to the link."""
        return self.assembly.prefetcher

    def generate(
        self,
        prompt: str | Sequence[int] | Tensor,
        *,
        seed: int | None = None,
        streamer: Any = None,
        **options: Any,
    ) -> Generation:
        """Decode one request. ``prompt``: text or token ids; ``options``: what the model's own ``generate`` takes
        (``max_new_tokens``, ``do_sample``, ``temperature``, ``generation_config``, ...). ``seed`` makes sampling repeatable.

        Returns text, ids, trace, metrics and conditions. Raises ``ValueError`` for a prompt or length that can't be.
        """
        self._refuse_closed()
        if isinstance(self.target, ReplayTarget):
            raise TypeError(f"A replay target has no weights to generate with; {self.target.name} is one. Use replay(text, ...).")
        ids = encode(self.target, self.plan, prompt, options)
        generator = None if seed is None else torch.Generator(device=ids.device).manual_seed(seed)
        seam, assembly = self.target.seam, self.assembly
        decoding = Decoding(seam, self.machine, self.drafter, assembly.run, generator=generator, streamer=streamer)
        stops = stop_criteria(self.target, options)
        assembly.start(warm=self.warm)
        try:
            out = self.target.model.generate(
                ids, attention_mask=torch.ones_like(ids), custom_generate=decoding.decode, streamer=streamer, **{**options, **stops}
            )
            self.machine.stop()
        except BaseException:  # also an interrupt: whatever state the pieces were in, the next request starts clean
            self.machine.stop()
            self.reset()
            raise
        trace = self.machine.trace.finish()
        conditions = conditions_of(self, prompt_tokens=ids.shape[1], new_tokens=out.shape[1] - ids.shape[1], options=options, seed=seed)
        return Generation.of(self.target, out[0].tolist(), ids.shape[1], trace, self.plan.device, conditions)

    def replay(self, text: ReplayableText, *, prompt_tokens: int, max_new_tokens: int) -> Generation:
        """Run the loop over recorded or synthetic routing (see ``replay.py`` for its semantics); for a ``ReplayTarget``.

        The result's ids are the text's places, since a replayed text has no tokens.
        """
        self._refuse_closed()
        if not isinstance(self.target, ReplayTarget):
            raise TypeError(f"A replay needs a ReplayTarget; {self.target.name} has weights. Use generate(prompt, ...).")
        self.target.text = text
        replayed = Replayed(text, self.machine, prompt_tokens=prompt_tokens, new_tokens=max_new_tokens)
        self.assembly.start(warm=self.warm)
        try:
            self.assembly.run(replayed)
            self.machine.stop()
        except BaseException:
            self.machine.stop()
            self.reset()
            raise
        places = tuple(range(prompt_tokens + max_new_tokens))
        conditions = conditions_of(self, prompt_tokens=prompt_tokens, new_tokens=max_new_tokens, options={}, seed=None)
        return Generation(None, places, places[prompt_tokens:], self.machine.trace.finish(), self.plan.device, conditions)

    def reset(self) -> None:
        """Empty every slot: the next request starts cold."""
        self._refuse_closed()
        self.assembly.reset()

    def close(self) -> None:
        """Give up slots, threads and the model; the last pipeline of a model puts its experts back. Idempotent."""
        if not self.closed:
            self.closed = True
            self.machine.close()
            del self.assembly
            self.target.release()

    def _refuse_closed(self) -> None:
        if self.closed:
            raise RuntimeError("A closed pipeline has given up its slots; this one was closed. Build a new one from the same target.")

    def __enter__(self) -> Pipeline:
        self._refuse_closed()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        drafter = "closed" if self.closed else getattr(self.drafter, "name", "no draft")
        slots = f"slots {min(self.plan.slots)}-{max(self.plan.slots)}"
        return f"Pipeline({self.target.name}, {drafter}, {self.predictor.name}, {self.machine.label}, {slots})"
