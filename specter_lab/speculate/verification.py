"""Verification: which drafts hold. Pure functions; the pipeline alone commits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specter_lab.records import DraftToken, Verification


def verify_greedy(drafted: Sequence[DraftToken], target_token: Callable[[int], int]) -> Verification:
    """Accept drafts while they equal the target's own choice; ``target_token(i)`` is its choice after i drafts.

    >>> verify_greedy([DraftToken(5, 0), DraftToken(9, 1)], lambda i: [5, 8, 7][i])
    Verification(accepted=1, tokens=(5, 8))
    """
    tokens = []
    for i, draft in enumerate(drafted):
        choice = target_token(i)
        tokens.append(choice)
        if choice != draft.token:
            return Verification(i, tuple(tokens))
    return Verification(len(drafted), (*tokens, target_token(len(drafted))))


def verify_sampled(drafted: Sequence[DraftToken], target_probs: Callable[[int], Tensor], generator: torch.Generator | None) -> Verification:
    """Speculative sampling: the committed tokens are distributed exactly as the target's.

    ``target_probs(i)``: (vocabulary,) after i drafts. A draft token x stands with probability
    min(1, target_probs[x] / draft_probs[x]); at the first that falls, a token is drawn from the positive part of
    target_probs - draft_probs. A draft without probabilities counts as certain of its token.

    Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192), section 2.3.

    >>> certain = torch.tensor([0.0, 1.0])
    >>> verify_sampled([DraftToken(1, 0, probs=certain)], lambda i: certain, None)
    Verification(accepted=1, tokens=(1, 1))
    """
    tokens: list[int] = []
    for i, draft in enumerate(drafted):
        target = target_probs(i)
        proposed = draft.probs if draft.probs is not None else torch.zeros_like(target).index_fill_(0, torch.tensor(draft.token), 1.0)
        chance = torch.rand((), generator=generator, dtype=torch.float64, device="cpu")
        if chance * proposed[draft.token].double() < target[draft.token].double():
            tokens.append(draft.token)
            continue
        rest = (target - proposed).clamp_min(0.0)
        # only rounding can leave nothing over: then both distributions are the same
        return Verification(i, (*tokens, draw(rest if rest.sum() > 0 else target, generator)))
    return Verification(len(drafted), (*tokens, draw(target_probs(len(drafted)), generator)))


def draw(probs: Tensor, generator: torch.Generator | None) -> int:
    """One token from (vocabulary,) weights that needn't sum to 1.

    >>> draw(torch.tensor([0.0, 2.0]), None)
    1
    """
    return int(torch.multinomial(probs, 1, generator=generator))
