"""What a router does, told from what it returns: how scores become weights, and how experts are chosen.

A softmax over all experts that is normalised over the chosen ones, and a softmax over the chosen ones alone, are the
same numbers; both are called "softmax, normalised".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrt softplus": lambda x: functional.softplus(x).sqrt(),
    "probabilities": lambda x: x,
}


def router_kind(logits: Tensor, weights: Tensor, ids: Tensor, biases: Iterable[Tensor] = ()) -> str:
    """One line on a router from many rows of its work.

    ``logits`` (rows, experts or more), ``weights`` and ``ids`` (rows, experts_per_token); ``biases``: tensors that may be
    added to the scores for the choice. Rows whose weights are 0 (skipped) are left out.

    >>> logits = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    >>> weights, ids = logits.softmax(-1).topk(2)
    >>> router_kind(logits, weights, ids)
    'softmax, not normalised; top-k'
    >>> router_kind(logits, weights / weights.sum(-1, keepdim=True), ids)
    'softmax, normalised; top-k'
    """
    logits, weights = logits.float(), weights.float()
    used = (weights > 0).all(-1)
    logits, weights, ids = logits[used], weights[used], ids[used]
    name, weighting = _weighting(logits, weights, ids)
    return f"{weighting}; {_choice(logits, _SCORES[name](logits), ids, list(biases))}"


def _weighting(logits: Tensor, weights: Tensor, ids: Tensor) -> tuple[str, str]:
    """The score function by which ``weights`` are proportional within each row, and its name with the factor."""
    total = weights.sum(-1)
    for name, score in _SCORES.items():
        factor = weights / score(logits).gather(1, ids)
        if not torch.allclose(factor, factor[:, :1].expand_as(factor), rtol=1e-3):
            continue
        if name == "probabilities" and not torch.allclose(logits.sum(-1), torch.ones(len(logits)), rtol=1e-3):
            continue
        if ids.shape[1] > 1 and torch.allclose(total, total[:1].expand_as(total), rtol=1e-3):
            return name, f"{name}, normalised{_times(total[0])}"
        if torch.allclose(factor, factor[:1, :1].expand_as(factor), rtol=1e-3):
            return name, f"{name}, not normalised{_times(factor[0, 0])}"
        return name, f"{name}, normalised together with the shared experts"
    if ids.shape[1] == 2 and torch.allclose(weights, _sparsemixer(logits, ids), rtol=1e-3):
        return "softmax", "sparsemixer: each expert by a softmax of its own"
    return "softmax", f"of its own kind (weights sum to {total.min():.2f}-{total.max():.2f})"


def _times(factor: Tensor) -> str:
    return "" if abs(float(factor) - 1) < 1e-3 else f" x {float(factor):.4g}"


def _choice(logits: Tensor, scores: Tensor, ids: Tensor, biases: list[Tensor]) -> str:
    k, chosen = ids.shape[1], ids.sort(-1).values
    fitting = [b.float().flatten() for b in biases if b.numel() == scores.shape[1]]
    rules = [("", scores)]
    for bias in fitting:
        rules += [(" + correction bias", scores + bias), (" of logits + correction bias", logits + bias)]
    for name, ranked in rules:
        if torch.equal(ranked.topk(k).indices.sort(-1).values, chosen):
            return f"top-k{name}"
        for kept in _in_best_groups(ranked, k):
            if torch.equal(kept.topk(k).indices.sort(-1).values, chosen):
                return f"top-k in the best groups{name}"
    return "by another rule than its scores"


def _in_best_groups(scores: Tensor, k: int) -> Iterator[Tensor]:
    """``scores`` with all but the best groups at -inf: for every number of groups, kept groups and way to rank them."""
    count = scores.shape[1]
    for groups in (n for n in range(2, count) if count % n == 0):
        grouped = scores.view(len(scores), groups, -1)
        for ranks in (grouped.amax(-1), grouped.topk(min(2, grouped.shape[-1])).values.sum(-1)):
            for kept in range(1, groups):
                if kept * grouped.shape[-1] >= k:
                    mask = torch.zeros_like(ranks, dtype=torch.bool).scatter_(1, ranks.topk(kept).indices, True)
                    yield grouped.masked_fill(~mask[..., None], float("-inf")).flatten(1)


def _sparsemixer(logits: Tensor, ids: Tensor, jitter: float = 0.01) -> Tensor:
    """(rows, 2): the weight of each chosen expert among those within a jitter of the best that is left.

    Source: SparseMixer, Liu et al. (arXiv 2310.00811), as transformers has it for PhiMoE.
    """
    weights, left = [], logits
    for rank in range(2):
        best = left.amax(-1, keepdim=True)
        far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * jitter
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(1, ids[:, rank, None]))
        left = left.scatter(1, ids[:, rank, None], float("-inf"))
    return torch.cat(weights, dim=1)
