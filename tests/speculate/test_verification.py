"""Verification: greedy prefixes by hand, and sampled tokens distributed as the target's."""

import pytest
import torch
from scipy.stats import chisquare

from specter_lab.records import DraftToken, Verification
from specter_lab.speculate.verification import draw, verify_greedy, verify_sampled


def drafts(tokens, probs=None):
    return [DraftToken(t, i, probs=None if probs is None else probs[i]) for i, t in enumerate(tokens)]


@pytest.mark.parametrize(
    ("drafted", "target", "expected"),
    [
        ([], [4], Verification(0, (4,))),
        ([1, 2, 3], [1, 2, 3, 9], Verification(3, (1, 2, 3, 9))),
        ([1, 2, 3], [1, 7, 3, 9], Verification(1, (1, 7))),
        ([1], [5, 6], Verification(0, (5,))),
    ],
)
def test_greedy(drafted, target, expected):
    assert verify_greedy(drafts(drafted), lambda i: target[i]) == expected


TARGET = torch.tensor([[0.5, 0.2, 0.2, 0.1, 0.0], [0.1, 0.1, 0.6, 0.1, 0.1], [0.2, 0.2, 0.2, 0.2, 0.2]])
DRAFTS = {
    "near": torch.tensor([[0.45, 0.25, 0.2, 0.1, 0.0], [0.1, 0.15, 0.55, 0.1, 0.1]]),
    "far": torch.tensor([[0.05, 0.05, 0.1, 0.4, 0.4], [0.6, 0.1, 0.1, 0.1, 0.1]]),
    "disjoint": torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0, 0.0]]),
    "equal": TARGET[:2],
    "lookup": None,  # no distribution: certain of token 3
}


@pytest.mark.parametrize("kind", list(DRAFTS))
def test_sampled_tokens_are_distributed_as_the_targets(kind):
    """First tokens, and second tokens given that the first draft stood, against the target's own rows."""
    generator = torch.Generator().manual_seed(7)
    first, second = torch.zeros(5), torch.zeros(5)
    for _ in range(6000):
        probs = DRAFTS[kind]
        tokens = [3, 3] if probs is None else [draw(row, generator) for row in probs]
        result = verify_sampled(drafts(tokens, probs), lambda i: TARGET[i], generator)
        first[result.tokens[0]] += 1
        if result.accepted:
            second[result.tokens[1]] += 1
    possible = TARGET[0] > 0
    assert first[~possible].sum() == 0
    assert chisquare(first[possible].numpy(), (TARGET[0, possible] * first.sum()).numpy()).pvalue > 1e-3
    if second.sum() > 100:
        assert chisquare(second.numpy(), (TARGET[1] * second.sum()).numpy()).pvalue > 1e-3
    acceptance = 1 - (TARGET[0] - (probs[0] if probs is not None else torch.eye(5)[3])).clamp_min(0).sum()
    stood = second.sum() / first.sum()
    assert stood == pytest.approx(float(acceptance), abs=0.03)


def test_a_draft_equal_to_the_target_always_stands():
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        tokens = [draw(row, generator) for row in TARGET[:2]]
        assert verify_sampled(drafts(tokens, TARGET), lambda i: TARGET[i], generator).accepted == 2


def test_a_token_the_draft_could_not_draw_is_judged_all_the_same():
    """draft_probs[token] = 0 (a broken drafter): no division by zero; the target's probability alone decides."""
    broken = [DraftToken(0, 0, probs=torch.tensor([0.0, 1.0]))]
    assert verify_sampled(broken, lambda i: torch.tensor([1.0, 0.0]), None).tokens[0] == 0
