"""A text that a model decodes: token by token or block by block, on one cache that target and draft share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specter_lab.loop import Committed
from specter_lab.offload.residency import Residency
from specter_lab.offload.server import OffloadServer
from specter_lab.pieces import Drafter, Machine
from specter_lab.records import DraftToken, Verification
from specter_lab.scratch import Scratch, branch
from specter_lab.seam import ExpertsSeam
from specter_lab.speculate.choice import Chooser
from specter_lab.speculate.forked import in_pieces
from specter_lab.speculate.stream import LONGEST, Pieces
from specter_lab.speculate.verification import verify_greedy, verify_sampled


class Decoding:
    """One request's ids and cache.

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

    @property
    def longest_draft(self) -> int:
        """Most tokens of a stream: what memory is counted for."""
        return LONGEST

    @property
    def last_token(self) -> int:
        """The last committed token."""
        return int(self.ids[0, -1])

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
        scratch = Scratch(self, self.cache, lambda: step)
        try:
            yield from self.drafter.draft(scratch, length)
        finally:  # also when the loop stops drafting early
            self._crop(scratch.tokens)

    def stream(self, step: Callable[[], int]) -> Pieces:
        """The same layer by layer on a cache of its own, so that it may go on while the target's pass uses this one."""
        drafter, most = self.drafter, min(self.left(), LONGEST)
        assert drafter is not None and self.cache is not None
        own = branch(self.cache)  # now: a first piece may be taken inside a pass, when some layers hold its window already
        return in_pieces(lambda pause: drafter.draft(Scratch(self, own, step, pause), most), self.seam)

    def verify(self, step: int, drafted: Sequence[DraftToken], server: OffloadServer) -> Committed:
        """One pass over the last token and the drafts; of its cache entries, those of committed tokens stay."""
        window = torch.cat([self.ids[:, -1:], self.ids.new_tensor([[d.token for d in drafted]], dtype=torch.long)], dim=1)
        committed = self._judge(drafted, self._target_pass(window, window.shape[1], server))
        self._crop(len(drafted) + 1 - committed.tokens)
        return committed

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
