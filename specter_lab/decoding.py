"""A text that a model decodes: token by token or block by block, on one cache that target and draft share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specter_lab.loop import Committed
from specter_lab.offload.residency import Residency
from specter_lab.offload.server import OffloadServer, ResidentServer
from specter_lab.offload.slots_first import SlotsFirstServer
from specter_lab.pieces import Drafter, ExpertStore, Machine
from specter_lab.records import DraftToken, LayerCall, Routing, Verification
from specter_lab.seam import ExpertsSeam
from specter_lab.speculate.choice import Chooser
from specter_lab.speculate.verification import verify_greedy, verify_sampled


class Decoding:
    """One request's ids and cache; also the ``DraftContext`` that its drafter sees.

    ``run`` gets everything ready from ``decode``, which ``model.generate`` calls as its decoding method.
    """

    def __init__(
        self,
        seam: ExpertsSeam,
        machine: Machine,
        drafter: Drafter | None,
        run: Callable[[Decoding], None],
        *,
        residency: Residency,
        generator: torch.Generator | None,
        streamer: Any,
    ) -> None:
        self.seam, self.machine, self.drafter, self.residency = seam, machine, drafter, residency
        self.run, self.generator, self.streamer = run, generator, streamer
        self.step = 0

    def decode(
        self, model: Any, input_ids: Tensor, *, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **inputs: Any
    ) -> Tensor:
        """What ``model.generate`` calls with everything prepared; returns (1, tokens) ids."""
        self.model, self.ids, self.stopping = model, input_ids, stopping_criteria
        self.max_length, self.sampling = generation_config.max_length, bool(generation_config.do_sample)
        self.scores: list[Tensor] | None = [] if generation_config.output_scores else None
        self.logits: list[Tensor] | None = [] if generation_config.output_logits else None
        self.chooser = Chooser(logits_processor, do_sample=generation_config.do_sample, generator=self.generator)
        eos = generation_config.eos_token_id
        self.end_tokens = frozenset([eos] if isinstance(eos, int) else eos or [])
        self.cache: DynamicCache | None = inputs.get("cache")  # None: the model makes one of its own kind
        self.machine.compute("target", "plan", step=0)
        self.run(self)
        if self.streamer is not None:
            self.streamer.end()
        return self.ids

    @property
    def position(self) -> int:
        """The last committed token's place."""
        return int(self.ids.shape[1]) - 1

    def left(self) -> int:
        """How many tokens may still come."""
        return int(self.max_length - self.ids.shape[1])

    def prefill(self, server: OffloadServer) -> Committed:
        """The prompt through the target; commits the first token."""
        logits = self._target_pass(self.ids, 1, server)
        if self.drafter is not None and self.cache is not None:  # without drafts nothing is ever taken back
            self.cache.activate_past_recording()
        return self._judge([], logits)

    def draft(self, step: int, length: int) -> Iterator[DraftToken]:
        """The drafter's tokens; afterwards the cache is back at the committed prefix."""
        assert self.drafter is not None
        self.step, self.scratch = step, 0
        try:
            yield from self.drafter.draft(self, length)
        finally:  # also when the loop stops drafting early
            self._crop(self.scratch)

    def verify(self, step: int, drafted: Sequence[DraftToken], server: OffloadServer) -> Committed:
        """One pass over the last token and the drafts; of its cache entries, those of committed tokens stay."""
        window = torch.cat([self.ids[:, -1:], self.ids.new_tensor([[d.token for d in drafted]], dtype=torch.long)], dim=1)
        committed = self._judge(drafted, self._target_pass(window, window.shape[1], server))
        self._crop(len(drafted) + 1 - committed.tokens)
        return committed

    def forward(self, token: int, bank: ExpertStore, *, slots_first: bool = False) -> tuple[Tensor, DraftToken]:
        """DraftContext: one scratch token through the shared skeleton with ``bank``'s experts, or those in the slots."""
        position, lane = self.position + self.scratch, (self.machine, "draft", self.step)
        server = SlotsFirstServer(bank, self.residency, *lane) if slots_first else ResidentServer(bank, *lane)
        with self.seam.serving(server) as calls:
            out = self.model(input_ids=self.ids.new_tensor([[token]]), cache=self.cache, use_cache=True)
        self.scratch += 1
        self.machine.compute("draft", "head", step=self.step, tokens=1)
        return out.logits[0, -1], DraftToken(-1, position, routing=self._routing(position, calls))

    def choose(self, logits: Tensor, prefix: Sequence[int]) -> tuple[int, Tensor | None]:
        """DraftContext: the request's own choice after the drafted ``prefix``."""
        return self.chooser.choose(self.ids, prefix, logits)

    def spent(self, kind: str, *, layer: int = -1, tokens: int = 1, experts: int = 1) -> None:
        """DraftContext: a segment of the draft's lane."""
        self.machine.compute("draft", kind, step=self.step, layer=layer, tokens=tokens, experts=experts)

    def _target_pass(self, tokens: Tensor, rows: int, server: OffloadServer) -> Tensor:
        """(1, n) tokens through the target with offloaded experts -> (rows, vocabulary) logits of the last rows."""
        with self.seam.serving(server):
            out = self.model(input_ids=tokens, cache=self.cache, use_cache=True, logits_to_keep=rows)
        self.cache = out.cache
        self.machine.compute("target", "head", step=server.step, tokens=rows)
        return out.logits[0, -rows:]

    def _crop(self, tokens: int) -> None:
        """Take the last ``tokens`` entries off the cache; also with 0, which lets sliding layers forget what slid out."""
        if self.drafter is not None and self.cache is not None:
            self.cache.crop(-tokens)

    def _routing(self, position: int, calls: Sequence[LayerCall]) -> Routing:
        """One row's experts a MoE layer: of all its calls, where a model loops over layers; without ids of skipped experts."""
        experts: list[list[Tensor]] = [[] for _ in self.seam.modules]
        weights: list[list[Tensor]] = [[] for _ in self.seam.modules]
        for call in calls:
            assert call.weights is not None  # only a replay has none
            ids, odds = call.experts, call.weights
            if len(call.needed) < ids.shape[1]:
                there = ids[0] < self.seam.experts(call.layer)
                ids, odds = ids[:, there], odds[:, there]
            experts[call.layer].append(ids)
            weights[call.layer].append(odds)
        joined = ((parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) for parts in lists) for lists in (experts, weights))
        return Routing(position, *map(tuple, joined))

    def _judge(self, drafted: Sequence[DraftToken], logits: Tensor) -> Committed:
        """Verify and commit, from (drafts + 1, vocabulary) logits; each row is processed once."""
        prefix = [d.token for d in drafted]
        scores: dict[int, Tensor] = {}

        def row(i: int) -> Tensor:
            if i not in scores:
                scores[i] = self.chooser.scores(self.ids, prefix[:i], logits[i])
            return scores[i]

        if self.sampling:
            verification = verify_sampled(drafted, lambda i: row(i).softmax(-1), self.generator)
        else:
            verification = verify_greedy(drafted, lambda i: int(row(i).argmax()))
        return self._commit(verification, scores, logits)

    def _commit(self, verification: Verification, scores: Mapping[int, Tensor], logits: Tensor) -> Committed:
        """Append tokens until a stopping criterion holds."""
        for i, token in enumerate(verification.tokens):
            self.ids = torch.cat([self.ids, self.ids.new_tensor([[token]])], dim=1)
            if self.scores is not None:
                self.scores.append(scores[i][None])
            if self.logits is not None:
                self.logits.append(logits[i].float()[None])
            if self.streamer is not None:
                self.streamer.put(self.ids[0, -1:].cpu())
            if bool(self.stopping(self.ids, None if self.scores is None else tuple(self.scores)).all()):
                return Committed(i + 1, verification.accepted, finished=True)
        return Committed(len(verification.tokens), verification.accepted, finished=False)
