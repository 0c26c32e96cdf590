"""The tokens of a target and of another model that drafts for it: which ids stand for the same token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

UNKNOWN = -1e9
"""The logit of a token that the draft doesn't have: its probability is exactly 0, unless all others are forbidden. Not
-inf: a processor that allows no other token would leave nothing to draw from."""


class Words(NamedTuple):
    """A model's ``size`` (rows of logits, padding included) and its ``tokenizer``, None if it came without one.

    >>> Words("mine", None, 32000).size
    32000
    """

    name: str
    tokenizer: Any
    size: int

    def tokens(self) -> dict[str, int]:
        """Token -> id."""
        return dict(self.tokenizer.get_vocab())

    def regular(self) -> set[str]:
        """Tokens without those that were added to the vocabulary (marks of a chat, of fill-in-the-middle, ...)."""
        return self.tokens().keys() - self.tokenizer.get_added_vocab().keys()


class SharedTokens:
    """``ids``: (target's vocabulary,) the draft's id of each token of the target, -1 where it has none.

    >>> shared = SharedTokens(torch.tensor([2, -1, 0]))
    >>> shared.read([0, 1, 2]), shared.logits(torch.tensor([0.5, 0.25, 0.75])).tolist()
    ([2, 0], [0.75, -1000000000.0, 0.5])
    """

    def __init__(self, ids: Tensor) -> None:
        self.absent, self.rows = ids < 0, ids.clamp_min(0)
        self._of = ids.tolist()

    def read(self, tokens: Sequence[int]) -> list[int]:
        """The draft's ids of the target's ``tokens``; what the draft doesn't have, it doesn't read."""
        return [own for own in (self._of[token] for token in tokens) if own >= 0]

    def logits(self, logits: Tensor) -> Tensor:
        """(draft's vocabulary,) -> (target's vocabulary,) in fp32; the draft's other tokens are left out."""
        return logits.float()[self.rows].masked_fill(self.absent, UNKNOWN)


def match(target: Words, draft: Words) -> Tensor:
    """The ``ids`` of ``SharedTokens``: tokens of equal text, whatever their ids; equal ids if either has no tokenizer.

    Both must cut text into the same regular tokens. Added tokens and padding may differ. Raises ``ValueError`` that names
    what differs otherwise.

    >>> match(Words("target", None, 4), Words("draft", None, 3)).tolist()
    [0, 1, 2, -1]
    """
    ids = torch.arange(target.size)
    ids[ids >= draft.size] = -1
    if target.tokenizer is None or draft.tokenizer is None:
        return ids
    ours, its = target.tokens(), draft.tokens()
    if ours == its:
        return ids
    if target.regular() - its.keys() or draft.regular() - ours.keys():
        raise ValueError(_difference(target, draft, ours, its))
    ids.fill_(-1)
    for token, number in ours.items():
        if number < target.size and its.get(token, draft.size) < draft.size:
            ids[number] = its[token]
    return ids


def _difference(target: Words, draft: Words, ours: Mapping[str, int], its: Mapping[str, int]) -> str:
    missing = sorted((ours[token], token) for token in target.regular() - its.keys())
    foreign = sorted((its[token], token) for token in draft.regular() - ours.keys())
    number, token = (missing or foreign)[0]
    return (
        f"A draft must cut text into the target's tokens (their ids may differ); the tokenizer of {draft.name} "
        f"({type(draft.tokenizer).__name__}) lacks {len(missing):,} of the {len(ours):,} tokens of {target.name} "
        f"({type(target.tokenizer).__name__}) and has {len(foreign):,} others; the first that differs is id {number}, {token!r}. "
        "Use a draft with the target's tokenizer, SelfDrafter, or PromptLookupDrafter, which needs no model."
    )
