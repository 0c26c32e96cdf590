"""Sampling with a draft from another model is distributed exactly as the target's own, whatever the draft's vocabulary. Cases 32, 34, 40.

Two toys, tables of logits by the last two tokens with caches of their own, go through the real decoding and the real drafter.
The exact probability of every outcome of four tokens comes from transformers' own processors, by enumeration. The draft's
vocabulary is as big as the target's, bigger (its extra token is its favourite), smaller, or in another order.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import specter_lab as sl
from tests.speculate.test_processors import PROCESSORS, TABLE, VOCABULARY, sample
from tests.speculate.test_vocabulary import Tokenizer

SIZES = {"equal": 3, "bigger": 5, "smaller": 2, "renumbered": 3}
ORDER = torch.tensor([2, 0, 1])  # the draft's id of each of the target's tokens

CASES = [(processor, ("bigger", "smaller")[i % 2]) for i, processor in enumerate(PROCESSORS) if processor != "all of them"]
CASES += [("all of them", vocabulary) for vocabulary in SIZES]


class Cache:
    """What the draft has read; it can be taken back."""

    is_croppable, layers = True, ()

    def __init__(self) -> None:
        self.read: list[int] = []

    def crop(self, tokens: int) -> None:
        assert tokens <= 0
        del self.read[len(self.read) + tokens :]

    def activate_past_recording(self) -> None:
        pass


class Draft(nn.Module):
    """The target's table with noise, over a vocabulary of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.size, noise = SIZES[kind], torch.randn(5, 5, 5, generator=torch.Generator().manual_seed(2))
        table = noise.clone()
        table[:VOCABULARY, :VOCABULARY, :VOCABULARY] = TABLE + noise[:VOCABULARY, :VOCABULARY, :VOCABULARY]
        table[:, :, VOCABULARY:] += 4
        if kind == "renumbered":
            other = torch.empty(3, 3, 3)
            other[ORDER[:, None, None], ORDER[None, :, None], ORDER[None, None, :]] = table[:3, :3, :3]
            table = other
        self.embedding = nn.Embedding(self.size, 1)
        self.register_buffer("table", table[: self.size, : self.size, : self.size].contiguous())
        config = SimpleNamespace(model_type="toy", num_hidden_layers=1)
        self.config = SimpleNamespace(get_text_config=lambda: config, _name_or_path="toy")
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.eval()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: Tensor, use_cache: bool, cache: Cache | None = None, logits_to_keep: int = 0) -> Any:
        cache = cache or Cache()
        rows = []
        for token in input_ids[0].tolist():
            cache.read.append(token)
            rows.append(self.table[cache.read[-2] if len(cache.read) > 1 else 0, token])
        return SimpleNamespace(logits=torch.stack(rows)[None, -logits_to_keep:], cache=cache)


def drafter(kind: str) -> Any:
    tokens, other = ("abc", "bca") if kind == "renumbered" else (None, None)  # a is the draft's 2, b its 0, c its 1
    geometry = SimpleNamespace(vocab_size=VOCABULARY, model_type="toy", layers=1, experts=(2,))
    target: Any = SimpleNamespace(
        device=torch.device("cpu"), model=None, name="toy", tokenizer=tokens and Tokenizer(tokens), geometry=geometry
    )
    return sl.SeparateDrafter(Draft(kind), target, tokenizer=other and Tokenizer(other))


@pytest.mark.parametrize(("processor", "vocabulary"), CASES)
def test_tokens_are_distributed_as_the_targets(processor: str, vocabulary: str) -> None:
    draft = drafter(vocabulary)
    if vocabulary == "renumbered":
        assert draft.tokens.rows.tolist() == ORDER.tolist()
    proposed = accepted = 0

    def learn(drafted: Any, held: int) -> None:
        nonlocal proposed, accepted
        proposed, accepted = proposed + len(drafted), accepted + held

    draft.learn = learn
    sample(PROCESSORS[processor], draft)
    assert 0.2 < accepted / proposed < 0.98, "both branches of the verification must decide"
