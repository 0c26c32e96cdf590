"""The one loop: draft -> predict -> prefetch -> verify -> commit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specter_lab.generation import Generation, conditions_of, encode, refuse_unknown, stop_criteria
from specter_lab.machines.throttled import ThrottledMachine
from specter_lab.memory import MemoryPlan, plan_memory
from specter_lab.models import MoE, load_moe
from specter_lab.offload.eviction import LRU
from specter_lab.offload.prefetcher import Prefetcher
from specter_lab.offload.residency import Residency
from specter_lab.offload.server import OffloadServer, ResidentServer
from specter_lab.pieces import Drafter, DraftLength, EvictionPolicy, ExpertStore, Machine, Predictor
from specter_lab.records import DraftToken, ExpertKey, LayerCall, Prediction, Routing, Verification
from specter_lab.routing.predictors import DraftLookahead, NoPrediction
from specter_lab.speculate.choice import Chooser
from specter_lab.speculate.draft_length import FixedLength
from specter_lab.speculate.verification import verify_greedy, verify_sampled


class Pipeline:
    """A target whose experts wait on the host, decoded with whatever pieces it is given.

    ``target``: a ``MoE`` or what ``load_moe`` takes. ``drafter``: None decodes token by token. ``draft_length``: a number
    or a ``DraftLength`` (8 with a drafter). ``machine``: throttled at 0.05 GB/s by default. Device memory: ``slots`` a
    layer, or ``memory`` in all; ``context_length`` is what the plan counts KV for. Requests start with empty slots
    unless ``warm``. ``poison`` fills forgotten slots with NaN.

    >>> import specter_lab as sl
    >>> with sl.Pipeline("tiny-moe", slots=6, machine=sl.SimulatedMachine()) as pipeline:
    ...     len(pipeline.generate("Once upon a time", max_new_tokens=4).new_ids)
    4
    """

    def __init__(
        self,
        target: MoE | str | Path | torch.nn.Module,
        *,
        drafter: Drafter | None = None,
        predictor: Predictor | None = None,
        eviction: EvictionPolicy | None = None,
        draft_length: int | DraftLength | None = None,
        machine: Machine | None = None,
        slots: int | Sequence[int] | None = None,
        memory: int | str | None = None,
        context_length: int | None = None,
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
        self.target = target if isinstance(target, MoE) else load_moe(target)
        self.target.lease()
        try:
            store, bank = self.target.store, getattr(drafter, "bank", None)
            self.plan: MemoryPlan = plan_memory(self.target, bank=bank, slots=slots, memory=memory, context_length=context_length)
            self.residency = Residency(store, self.plan.slots, eviction or LRU(), poison=poison, device=self.target.model.device)
            self.prefetcher = Prefetcher(store, self.residency, self.machine)
        except BaseException:
            self.target.release()
            raise

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
        ids = encode(self.target, self.plan, prompt, options)
        generator = None if seed is None else torch.Generator(device=ids.device).manual_seed(seed)
        request = _Request(self, generator, streamer)
        stops = stop_criteria(self.target, options)
        if not self.warm:
            self.reset()
        self.residency.new_request()
        self.prefetcher.reset()
        self.machine.start(self.prefetcher)
        try:
            out = self.target.model.generate(
                ids, attention_mask=torch.ones_like(ids), custom_generate=request.decode, streamer=streamer, **{**options, **stops}
            )
            self.machine.stop()
        except BaseException:  # also an interrupt: whatever state the pieces were in, the next request starts clean
            self.machine.stop()
            self.reset()
            raise
        trace = self.machine.trace.finish()
        conditions = conditions_of(self, prompt_tokens=ids.shape[1], new_tokens=out.shape[1] - ids.shape[1], options=options, seed=seed)
        return Generation.of(self.target, out[0].tolist(), ids.shape[1], trace, self.plan.device, conditions)

    def reset(self) -> None:
        """Empty every slot: the next request starts cold."""
        self._refuse_closed()
        self.prefetcher.reset()
        self.residency.forget_all()

    def close(self) -> None:
        """Give up slots, threads and the model; the last pipeline of a model puts its experts back. Idempotent."""
        if not self.closed:
            self.closed = True
            self.machine.close()
            del self.residency, self.prefetcher
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


class _Request:
    """One request's state, and the draft context that its drafter sees."""

    def __init__(self, pipeline: Pipeline, generator: torch.Generator | None, streamer: Any) -> None:
        self.pipeline, self.generator, self.streamer = pipeline, generator, streamer
        self.machine, self.prefetcher, self.seam = pipeline.machine, pipeline.prefetcher, pipeline.target.seam
        self.step = 0
        self.predicted: dict[ExpertKey, Prediction] = {}

    def decode(
        self,
        model: Any,
        input_ids: Tensor,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **inputs: Any,
    ) -> Tensor:
        """The decoding method that ``model.generate`` calls with everything prepared; returns (1, tokens) ids."""
        self.model, self.ids, self.stopping = model, input_ids, stopping_criteria
        self.chooser = Chooser(logits_processor, do_sample=generation_config.do_sample, generator=self.generator)
        eos = generation_config.eos_token_id
        self.end_tokens = frozenset([eos] if isinstance(eos, int) else eos or [])
        self.cache: DynamicCache = inputs["cache"]
        self.machine.compute("target", "plan", step=0)
        logits = self._target_pass(input_ids, rows=1)
        self.cache.activate_past_recording()
        finished = self._commit([], self._verify([], logits))
        while not finished:
            self.step += 1
            left = generation_config.max_length - self.ids.shape[1]
            drafted = self._draft(self.pipeline.draft_length.choose(self.step, left - 1))
            window = (
                torch.cat([self.ids[:, -1:], self.ids.new_tensor([[d.token for d in drafted]])], dim=1) if drafted else self.ids[:, -1:]
            )
            logits = self._target_pass(window, rows=window.shape[1])
            finished = self._commit(drafted, self._verify(drafted, logits))
        if self.streamer is not None:
            self.streamer.end()
        return self.ids

    def forward(self, token: int, bank: ExpertStore) -> tuple[Tensor, DraftToken]:
        """DraftContext: one scratch token through the shared skeleton with ``bank``'s experts."""
        position = self.cache.get_seq_length()
        with self.seam.serving(ResidentServer(bank, self.machine, "draft", self.step)) as calls:
            out = self.model(input_ids=self.ids.new_tensor([[token]]), cache=self.cache, use_cache=True)
        self.scratch += 1
        self.machine.compute("draft", "head", step=self.step, tokens=1)
        return out.logits[0, -1], DraftToken(
            -1, position, routing=Routing(position, tuple(c.experts for c in calls), tuple(c.weights for c in calls))
        )

    def choose(self, logits: Tensor, prefix: Sequence[int]) -> tuple[int, Tensor | None]:
        """DraftContext: the request's own choice after the drafted ``prefix``."""
        return self.chooser.choose(self.ids, prefix, logits)

    def _draft(self, length: int) -> list[DraftToken]:
        """Draft, predicting and prefetching after each token; the cache is back at the committed prefix afterwards."""
        self.scratch, self.predicted = 0, {}
        position = self.ids.shape[1] - 1
        self._want(self.pipeline.predictor.step_begins(self.step, position, length))
        drafted: list[DraftToken] = []
        if self.pipeline.drafter is not None and length > 0:
            for token in self.pipeline.drafter.draft(self, length):
                self._want(self.pipeline.predictor.drafted(self.step, token, horizon=len(drafted)))
                self.machine.compute("draft", "plan", step=self.step)
                drafted.append(token)
        self.cache.crop(-self.scratch)
        self.machine.mark("draft_length", step=self.step, position=position, value=len(drafted))
        return drafted

    def _target_pass(self, tokens: Tensor, rows: int) -> Tensor:
        """(1, n) tokens through the target with offloaded experts -> (rows, vocabulary) logits of the last rows."""
        position = self.cache.get_seq_length()

        def predict(call: LayerCall) -> Iterable[Prediction]:
            return self._noted(self.pipeline.predictor.layer_called(self.step, position, call))

        server = OffloadServer(self.prefetcher, self.machine, self.step, position, predict)
        with self.seam.serving(server) as calls:
            out = self.model(input_ids=tokens, cache=self.cache, use_cache=True, logits_to_keep=rows)
        if self.step:
            needed = {ExpertKey(c.layer, e): n for c in calls for e, n in zip(c.needed, c.rows, strict=True)}
            self.pipeline.predictor.learn(self.step, self.predicted, needed)
        self.machine.compute("target", "head", step=self.step, tokens=rows)
        return out.logits[0, -rows:]

    def _verify(self, drafted: list[DraftToken], logits: Tensor) -> Verification:
        prefixes = [[d.token for d in drafted[:i]] for i in range(len(drafted) + 1)]
        if self.chooser.do_sample:
            return verify_sampled(drafted, lambda i: self.chooser.probs(self.ids, prefixes[i], logits[i]), self.generator)
        return verify_greedy(drafted, lambda i: self.chooser.choose(self.ids, prefixes[i], logits[i])[0])

    def _commit(self, drafted: list[DraftToken], verification: Verification) -> bool:
        """Append tokens until a stopping criterion holds; crop the cache to them; tell everyone. True when finished."""
        finished, kept = False, 0
        for token in verification.tokens:
            self.ids = torch.cat([self.ids, self.ids.new_tensor([[token]])], dim=1)
            kept += 1
            if self.streamer is not None:
                self.streamer.put(self.ids[0, -1:].cpu())
            if bool(self.stopping(self.ids, None).all()):
                finished = True
                break
        accepted = min(verification.accepted, kept)
        if self.step:
            # the pass left entries for its input token and every draft; those of accepted drafts stay
            self.cache.crop(-(len(drafted) + 1 - kept))
            self.pipeline.draft_length.learn(len(drafted), verification.accepted)
            if self.pipeline.drafter is not None:
                self.pipeline.drafter.learn(drafted, verification.accepted)
        with self.machine.lock:
            self.prefetcher.cancel(self.step, "decided")
        self.machine.compute("target", "plan", step=self.step)
        self.machine.mark(
            "commit", step=self.step, position=self.ids.shape[1] - 1, tokens=kept, value=accepted, outcome="step" if self.step else "first"
        )
        return finished

    def _want(self, predictions: Iterable[Prediction]) -> None:
        noted = list(self._noted(predictions))
        if noted:
            with self.machine.lock:
                self.prefetcher.want(noted)
                self.machine.notify()

    def _noted(self, predictions: Iterable[Prediction]) -> Iterator[Prediction]:
        for prediction in predictions:
            self.predicted.setdefault(prediction.key, prediction)
            yield prediction
