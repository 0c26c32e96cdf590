"""A text that a model decodes: token by token or block by block, on one cache that target and draft share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specter_lab.loop import Committed
from specter_lab.offload.server import OffloadServer, ResidentServer
from specter_lab.pieces import Drafter, ExpertStore, Machine
from specter_lab.records import DraftToken, Routing, Verification
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
        generator: torch.Generator | None,
        streamer: Any,
    ) -> None:
        self.seam, self.machine, self.drafter = seam, machine, drafter
        self.run, self.generator, self.streamer = run, generator, streamer
        self.step = 0

    def decode(
        self, model: Any, input_ids: Tensor, *, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **inputs: Any
    ) -> Tensor:
        """What ``model.generate`` calls with everything prepared; returns (1, tokens) ids."""
        self.model, self.ids, self.stopping = model, input_ids, stopping_criteria
        self.max_length = generation_config.max_length
        self.chooser = Chooser(logits_processor, do_sample=generation_config.do_sample, generator=self.generator)
        eos = generation_config.eos_token_id
        self.end_tokens = frozenset([eos] if isinstance(eos, int) else eos or [])
        self.cache: DynamicCache = inputs["cache"]
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
        self.cache.activate_past_recording()
        return self._commit(self._verify([], logits))

    def draft(self, step: int, length: int) -> Iterator[DraftToken]:
        """The drafter's tokens; afterwards the cache is back at the committed prefix."""
        assert self.drafter is not None
        self.step, self.scratch = step, 0
        try:
            yield from self.drafter.draft(self, length)
        finally:  # also when the loop stops drafting early
            self.cache.crop(-self.scratch)

    def verify(self, step: int, drafted: Sequence[DraftToken], server: OffloadServer) -> Committed:
        """One pass over the last token and the drafts; of its cache entries, those of committed tokens stay."""
        window = torch.cat([self.ids[:, -1:], self.ids.new_tensor([[d.token for d in drafted]], dtype=torch.long)], dim=1)
        committed = self._commit(self._verify(drafted, self._target_pass(window, window.shape[1], server)))
        self.cache.crop(-(len(drafted) + 1 - committed.tokens))
        return committed

    def forward(self, token: int, bank: ExpertStore) -> tuple[Tensor, DraftToken]:
        """DraftContext: one scratch token through the shared skeleton with ``bank``'s experts."""
        position = self.cache.get_seq_length()
        with self.seam.serving(ResidentServer(bank, self.machine, "draft", self.step)) as calls:
            out = self.model(input_ids=self.ids.new_tensor([[token]]), cache=self.cache, use_cache=True)
        self.scratch += 1
        self.machine.compute("draft", "head", step=self.step, tokens=1)
        routing = Routing(position, tuple(c.experts for c in calls), tuple(c.weights for c in calls if c.weights is not None))
        return out.logits[0, -1], DraftToken(-1, position, routing=routing)

    def choose(self, logits: Tensor, prefix: Sequence[int]) -> tuple[int, Tensor | None]:
        """DraftContext: the request's own choice after the drafted ``prefix``."""
        return self.chooser.choose(self.ids, prefix, logits)

    def _target_pass(self, tokens: Tensor, rows: int, server: OffloadServer) -> Tensor:
        """(1, n) tokens through the target with offloaded experts -> (rows, vocabulary) logits of the last rows."""
        with self.seam.serving(server):
            out = self.model(input_ids=tokens, cache=self.cache, use_cache=True, logits_to_keep=rows)
        self.machine.compute("target", "head", step=server.step, tokens=rows)
        return out.logits[0, -rows:]

    def _verify(self, drafted: Sequence[DraftToken], logits: Tensor) -> Verification:
        prefixes = [[d.token for d in drafted[:i]] for i in range(len(drafted) + 1)]
        if self.chooser.do_sample:
            return verify_sampled(drafted, lambda i: self.chooser.probs(self.ids, prefixes[i], logits[i]), self.generator)
        return verify_greedy(drafted, lambda i: self.chooser.choose(self.ids, prefixes[i], logits[i])[0])

    def _commit(self, verification: Verification) -> Committed:
        """Append tokens until a stopping criterion holds."""
        for kept, token in enumerate(verification.tokens, start=1):
            self.ids = torch.cat([self.ids, self.ids.new_tensor([[token]])], dim=1)
            if self.streamer is not None:
                self.streamer.put(self.ids[0, -1:].cpu())
            if bool(self.stopping(self.ids, None).all()):
                return Committed(kept, verification.accepted, finished=True)
        return Committed(len(verification.tokens), verification.accepted, finished=False)
