"""Drafters: what proposes the tokens of a step, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from specter_lab.pieces import DraftContext, ExpertStore
from specter_lab.records import DraftToken


class SelfDrafter:
    """The target itself with low-bit experts, all of them on the device.

    Everything but the routed experts is the target's own tensor, shared by reference: the very same model runs with
    ``bank`` in its experts seam. It reads the target's committed KV prefix and leaves scratch entries behind, which
    the pipeline crops.

    Source: Specter ("Fast MoE Inference via Quantization-Enabled Multi-Step Speculative Offloading"), draft design.

    >>> import specter_lab as sl
    >>> with sl.load_moe("tiny-moe") as moe: SelfDrafter(moe.quantize("qint4")).name
    'self-draft (qint4 group 128)'
    """

    def __init__(self, bank: ExpertStore) -> None:
        self.bank = bank
        self.name = f"self-draft ({bank.name})"

    def draft(self, context: DraftContext, length: int) -> Iterator[DraftToken]:
        """One forward a token; stops after an end-of-sequence token."""
        token = int(context.ids[0, -1])
        prefix: list[int] = []
        for _ in range(length):
            logits, unchosen = self.forward(context, token)
            token, probs = context.choose(logits, prefix)
            prefix.append(token)
            yield replace(unchosen, token=token, probs=probs)
            if token in context.end_tokens:
                return

    def forward(self, context: DraftContext, token: int) -> tuple[Tensor, DraftToken]:
        """One token through the draft."""
        return context.forward(token, self.bank)

    def learn(self, drafted: Sequence[DraftToken], accepted: int) -> None:
        """Nothing to learn."""


class ResidentDrafter(SelfDrafter):
    """A self-draft that computes with the target's exact experts where the device's slots hold them, and with codes elsewhere.

    The more slots, the closer to the target: acceptance rises, and nothing more crosses the link. But an exact expert costs
    the target's time (and where slots hold residuals, a rebuilding), so that drafts take longer.

    Source: our own.

    >>> import specter_lab as sl
    >>> with sl.load_moe("tiny-moe") as moe: ResidentDrafter(moe.quantize("qint4")).name
    'self-draft (qint4 group 128, slots first)'
    """

    reads_slots = True

    def __init__(self, bank: ExpertStore) -> None:
        super().__init__(bank)
        self.name = f"self-draft ({bank.name}, slots first)"

    def forward(self, context: DraftContext, token: int) -> tuple[Tensor, DraftToken]:
        """One token, with what the slots hold at that moment."""
        return context.forward(token, self.bank, slots_first=True)


class PromptLookupDrafter:
    """Continues the latest earlier occurrence of the last ``ngram`` tokens (then of fewer): no model, no routing.

    Source: Saxena, "Prompt Lookup Decoding" (2023); Yang et al., "Inference with Reference" (arXiv 2304.04487).

    >>> PromptLookupDrafter(ngram=2).continuation([7, 8, 9, 7, 8], most=3)
    [9, 7, 8]
    """

    name = "prompt lookup"

    def __init__(self, ngram: int = 3) -> None:
        if ngram < 1:
            raise ValueError(f"A lookup matches at least one token; got ngram={ngram}; give 1 or more (3 is usual).")
        self.ngram = ngram

    def continuation(self, ids: Sequence[int], most: int) -> list[int]:
        """At most ``most`` tokens that followed the same ending before; empty if it is new."""
        for size in range(min(self.ngram, len(ids) - 1), 0, -1):
            ending = list(ids[-size:])
            for start in range(len(ids) - size - 1, -1, -1):
                if list(ids[start : start + size]) == ending:
                    return list(ids[start + size : start + size + most])
        return []

    def draft(self, context: DraftContext, length: int) -> Iterator[DraftToken]:
        """At most ``length`` tokens, without probabilities and routing."""
        ids = context.ids[0].tolist()
        for i, token in enumerate(self.continuation(ids, length) if length else []):
            yield DraftToken(token, position=len(ids) - 1 + i)

    def learn(self, drafted: Sequence[DraftToken], accepted: int) -> None:
        """Nothing to learn."""
