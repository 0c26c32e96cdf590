"""A target and its pieces, ready to decode requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from specter_lab.decoding import Decoding
from specter_lab.generation import Generation, conditions_of
from specter_lab.loop import Assembly
from specter_lab.machines.throttled import ThrottledMachine
from specter_lab.memory import MemoryPlan, divide_memory
from specter_lab.models import MoE
from specter_lab.offload.eviction import LRU
from specter_lab.offload.prefetcher import Prefetcher
from specter_lab.offload.residency import Residency
from specter_lab.offload.server import MissSplit
from specter_lab.opening import load_moe
from specter_lab.pieces import Drafter, DraftLength, EvictionPolicy, ExpertStore, Machine, Predictor
from specter_lab.replay import ReplayableText, Replayed, ReplayTarget
from specter_lab.request import (
    encode,
    refuse_ahead,
    refuse_drafter,
    refuse_inputs,
    refuse_length,
    refuse_predictor,
    refuse_replay,
    refuse_unknown,
    stop_criteria,
)
from specter_lab.routing.predictors import NoPrediction
from specter_lab.speculate.draft_length import FixedLength


class Pipeline:
    """A target whose experts wait on the host, decoded with whatever pieces it is given.

    ``target``: a ``MoE`` or what ``load_moe`` takes. ``drafter``: None decodes token by token. ``draft_length``: a number
    or a ``DraftLength`` (8 with a drafter). ``machine``: throttled at 0.05 GB/s by default. Device memory: ``slots`` a
    layer, or ``memory`` in all; ``context_length`` is what the plan counts KV for. Requests start with empty slots
    unless ``warm``. ``barrier``: verification waits for all planned copies. ``split``: which misses the host computes
    (none by default; ``SplitByFinish``). ``residual``: the link moves what is missing beside the draft's codes to rebuild an
    expert bit for bit (True, or a ``ResidualBank`` built for that bank), or experts compressed by themselves, which need no
    codes ("compressed", or a ``CompressedBank``). Slots hold the same, and experts are rebuilt at each use, or ``on_arrival``:
    then slots hold rebuilt ones. ``draft_ahead``: the next window is drafted while this one's verification waits, on a
    cache of its own behind the committed prefix, 32 tokens at most. Sampled tokens then depend on how long waits were;
    their distribution doesn't.
    ``poison`` fills forgotten slots with NaN.

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
        residual: bool | str | ExpertStore = False,
        on_arrival: bool = False,
        warm: bool = False,
        poison: bool = False,
        draft_ahead: bool = False,
        **unknown: Any,
    ) -> None:
        refuse_unknown(unknown, Pipeline.__init__)
        length = (8 if drafter else 0) if draft_length is None else draft_length
        self.drafter, self.predictor = drafter, predictor or NoPrediction()
        self.draft_length: DraftLength = FixedLength(length) if isinstance(length, int) else length
        refuse_predictor(self.predictor, drafter)
        self.machine: Machine = machine or ThrottledMachine()
        self.warm, self.closed = warm, False
        self.last: Generation | None = None
        self.target: MoE | ReplayTarget = target if isinstance(target, MoE | ReplayTarget) else load_moe(target)
        if drafter is not None:
            refuse_drafter(self.target, drafter)
        refuse_ahead(draft_ahead, drafter)
        self.target.lease()
        try:
            store = self._store(residual, getattr(drafter, "bank", None))
            self.plan: MemoryPlan = divide_memory(
                self.target, drafter=drafter, store=store, on_arrival=on_arrival, slots=slots, memory=memory, context_length=context_length,
                draft_ahead=draft_ahead,
            )  # fmt: skip
            self.assembly = Assembly(
                store, self.plan.slots, self.machine, drafter=drafter, predictor=self.predictor, eviction=eviction or LRU(),
                draft_length=self.draft_length, barrier=barrier, split=split, poison=poison, device=str(self.target.device),
                host_store=self.target.store, on_arrival=on_arrival, draft_ahead=draft_ahead,
            )  # fmt: skip
        except BaseException:
            self.target.release()
            raise

    def _store(self, residual: bool | str | ExpertStore, bank: Any) -> ExpertStore:
        """What crosses the link: the target's experts, residuals beside the draft's codes, or compressed ones."""
        if residual is False:
            return self.target.store
        if isinstance(residual, str):
            if residual != "compressed":
                raise ValueError(
                    f"What crosses the link is True, False, 'compressed' or a bank; got residual={residual!r}. Give one of them."
                )
            return self.target.compressed()
        if bank is None and (residual is True or hasattr(residual, "codes")):
            raise ValueError("Residual experts are rebuilt beside a draft's codes; this pipeline has no draft bank. Give a SelfDrafter.")
        return self.target.residuals(bank) if isinstance(residual, bool) else residual

    @property
    def residency(self) -> Residency:
        """The device slots."""
        return self.assembly.residency

    @property
    def prefetcher(self) -> Prefetcher:
        """The queues to the link."""
        return self.assembly.prefetcher

    def generate(self, prompt: Any = None, *, seed: int | None = None, streamer: Any = None, **options: Any) -> Generation:
        """Decode one request. ``prompt``: text, chat messages, token ids, or what a tokenizer returned (also as
        ``input_ids=...``). ``options``: what the model's own ``generate`` takes, as far as it makes sense for one
        sequence (``max_new_tokens``, ``do_sample``, ``generation_config``, ``stop_strings``, ...). ``seed`` makes
        sampling repeatable.

        Returns text, ids, trace, metrics and conditions. Raises ``ValueError`` for a prompt or option that can't be.
        """
        model = self._decodable().model
        ids = encode(self._decodable(), self.plan, prompt, options)
        decoding, stops = self._decoding(ids, seed, streamer), stop_criteria(self._decodable(), options)

        def custom(model: Any, input_ids: Tensor, **prepared: Any) -> Tensor:
            return self._decode(decoding, model, input_ids, prepared)

        def run() -> None:
            model.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=custom, streamer=streamer, **{**options, **stops})

        return self._run(decoding, ids.shape[1], seed, run)

    def __call__(self, model: Any, input_ids: Tensor, *, seed: int | None = None, stream_to: Any = None, **prepared: Any) -> Any:
        """The same loop as ``pipeline.target.model.generate(ids, custom_generate=pipeline, ...)``, returning what
        ``generate`` returns; ``pipeline.last`` then has trace and metrics. transformers hands a custom decoding method
        neither streamer nor tokenizer: give the streamer as ``stream_to``, and stop strings as a stopping criterion.

        >>> import specter_lab as sl; import torch
        >>> with sl.Pipeline("tiny-moe", machine=sl.SimulatedMachine()) as pipeline:
        ...     pipeline.target.model.generate(torch.tensor([[5, 6]]), custom_generate=pipeline, max_new_tokens=3).shape
        torch.Size([1, 5])
        """
        target, config = self._decodable(), prepared["generation_config"]
        refuse_length(target, self.plan, input_ids.shape[1], config.max_length)
        decoding = self._decoding(input_ids, seed, stream_to)
        if stream_to is not None:
            stream_to.put(input_ids.cpu())
        self._run(decoding, input_ids.shape[1], seed, lambda: self._decode(decoding, model, input_ids, prepared))
        if not config.return_dict_in_generate:
            return decoding.ids
        lists = {"scores": decoding.scores, "logits": decoding.logits}
        outputs = {name: None if values is None else tuple(values) for name, values in lists.items()}
        return GenerateDecoderOnlyOutput(sequences=decoding.ids, cache=decoding.cache, **outputs)  # type: ignore[arg-type]

    def _decodable(self) -> MoE:
        self._refuse_closed()
        if isinstance(self.target, ReplayTarget):
            raise TypeError(f"A replay target has no weights to generate with; {self.target.name} is one. Use replay(text, ...).")
        return self.target

    def _decoding(self, ids: Tensor, seed: int | None, streamer: Any) -> Decoding:
        generator = None if seed is None else torch.Generator(device=ids.device).manual_seed(seed)
        pieces = (self._decodable().seam, self.machine, self.drafter, self.assembly.run)
        return Decoding(*pieces, residency=self.residency, generator=generator, streamer=streamer)

    def _decode(self, decoding: Decoding, model: Any, ids: Tensor, prepared: dict[str, Any]) -> Tensor:
        inputs = {n: v for n, v in prepared.items() if n not in ("generation_config", "logits_processor", "stopping_criteria")}
        refuse_inputs(self._decodable(), model, ids, prepared["generation_config"], inputs)
        return decoding.decode(model, ids, **prepared)

    def _run(self, decoding: Decoding, prompt_tokens: int, seed: int | None, run: Callable[[], Any]) -> Generation:
        target = self._decodable()
        self.assembly.start(warm=self.warm)
        try:
            run()
            self.machine.stop()
        except BaseException:  # also an interrupt: whatever state the pieces were in, the next request starts clean
            self.machine.stop()
            self.reset()
            raise
        ids = decoding.ids[0].tolist()
        conditions = conditions_of(
            self, prompt_tokens=prompt_tokens, new_tokens=len(ids) - prompt_tokens, sampling=decoding.sampling, seed=seed
        )
        outputs = {name: values and tuple(values) for name, values in (("scores", decoding.scores), ("logits", decoding.logits))}
        trace, device = self.machine.trace.finish(), self.plan.device
        self.last = Generation.of(target, ids, prompt_tokens, trace, device, conditions, **outputs)
        return self.last

    def replay(self, text: ReplayableText, *, prompt_tokens: int, max_new_tokens: int) -> Generation:
        """Run the loop over recorded or synthetic routing (see ``replay.py`` for its semantics); for a ``ReplayTarget``.

        The result's ids are the text's places, since a replayed text has no tokens.
        """
        self._refuse_closed()
        if not isinstance(self.target, ReplayTarget):
            raise TypeError(f"A replay needs a ReplayTarget; {self.target.name} has weights. Use generate(prompt, ...).")
        refuse_replay(self.drafter)
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
        conditions = conditions_of(self, prompt_tokens=prompt_tokens, new_tokens=max_new_tokens, sampling=False, seed=None)
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
            getattr(self.drafter, "close", lambda: None)()
            self.drafter = None  # it may hold a model
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
