"""Sampling under each processor is distributed exactly as the target's own, whatever is drafted and however much of it falls.

Cases 32 and 34. A toy model (a table of logits by the last two tokens) goes through the real decoding, so that thousands
of runs are cheap; the exact probability of every outcome of four tokens, three of them speculated, comes from
transformers' own processors, by enumeration.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

from specter_lab.decoding import Decoding
from specter_lab.recipes import tiny_model
from specter_lab.records import DraftToken

VOCABULARY, PROMPT, NEW, RUNS = 3, [2, 1, 0, 2], 4, 1000
TABLE = torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 1.5

PROCESSORS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6, "top_k": 0},
    "top-k": {"top_k": 2},
    "top-p": {"top_k": 0, "top_p": 0.7},
    "min-p": {"top_k": 0, "min_p": 0.2},
    "repetition penalty": {"top_k": 0, "repetition_penalty": 1.8},
    "all of them": {"temperature": 1.4, "top_k": 2, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.3},
}


class Cache:
    """Which tokens the toy has read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def crop(self, tokens: int) -> None:
        assert tokens <= 0
        del self.read[len(self.read) + tokens :]

    def activate_past_recording(self) -> None:
        pass


def toy(input_ids: Tensor, cache: Cache, use_cache: bool, logits_to_keep: int = 0) -> Any:
    """Logits by what the cache and the input say were the last two tokens: a rollback that failed would show."""
    rows = []
    for token in input_ids[0].tolist():
        cache.read.append(token)
        rows.append(TABLE[cache.read[-2] if len(cache.read) > 1 else 0, token])
    return SimpleNamespace(logits=torch.stack(rows)[None], cache=cache)


class Drafter:
    """The toy itself as a draft: proposes from its own distribution, or ("low") from one that dislikes what the target likes."""

    name = "toy"

    def __init__(self, low: bool) -> None:
        self.low, self.proposed, self.accepted = low, 0, 0

    def draft(self, context: Any, length: int) -> Iterator[DraftToken]:
        token, prefix = int(context.ids[0, -1]), list[int]()
        for _ in range(length):
            logits, unchosen = context.forward(token, None)
            token, probs = context.choose(logits, prefix)
            if self.low:
                probs = (1 - probs) ** 4
                probs = probs / probs.sum()
                token = int(torch.multinomial(probs, 1, generator=context.generator))
            prefix.append(token)
            yield dataclasses.replace(unchosen, token=token, probs=probs)

    def learn(self, drafted: Any, accepted: int) -> None:
        self.proposed, self.accepted = self.proposed + len(drafted), self.accepted + accepted


class Seam:
    modules = ()

    @contextmanager
    def serving(self, server: Any) -> Iterator[list[Any]]:
        yield []


def loop(decoding: Decoding) -> None:
    server: Any = SimpleNamespace(step=1)
    committed = decoding.prefill(server)
    while not committed.finished:
        drafted = list(decoding.draft(1, min(2, decoding.left() - 1)))
        committed = decoding.verify(1, drafted, server)
        decoding.drafter.learn(drafted, committed.accepted)  # type: ignore[union-attr]


def processors_of(config: GenerationConfig) -> LogitsProcessorList:
    model = tiny_model("mixtral", vocab_size=8)
    ids = torch.tensor([PROMPT])
    model._prepare_special_tokens(config, False, device=ids.device)
    made: LogitsProcessorList = model._get_logits_processor(
        config, input_ids_seq_length=len(PROMPT), logits_processor=LogitsProcessorList()
    )
    return made


def exact(processors: LogitsProcessorList) -> Tensor:
    """(3, 3, 3, 3): the probability of each four tokens."""
    joint = torch.zeros((VOCABULARY,) * NEW, dtype=torch.float64)
    for outcome in itertools.product(range(VOCABULARY), repeat=NEW):
        text, probability = list(PROMPT), 1.0
        for token in outcome:
            scores = processors(torch.tensor([text]), TABLE[text[-2], text[-1]][None].clone())
            probability *= float(scores.softmax(-1)[0, token])
            text.append(token)
        joint[outcome] = probability
    return joint


@pytest.mark.parametrize("acceptance", ["high", "low"])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_tokens_are_distributed_as_the_targets(processor: str, acceptance: str) -> None:
    config = GenerationConfig(do_sample=True, **PROCESSORS[processor])
    processors = processors_of(config)
    joint, counts, drafter = exact(processors), torch.zeros((VOCABULARY,) * NEW), Drafter(acceptance == "low")
    config.max_length, config.eos_token_id = len(PROMPT) + NEW, None
    criteria = StoppingCriteriaList([MaxLengthCriteria(config.max_length)])
    machine: Any = SimpleNamespace(compute=lambda *args, **kwargs: None)
    for seed in range(RUNS):
        generator = torch.Generator().manual_seed(seed)
        decoding = Decoding(Seam(), machine, drafter, loop, generator=generator, streamer=None)  # type: ignore[arg-type]
        ids = decoding.decode(
            toy, torch.tensor([PROMPT]), logits_processor=processors, stopping_criteria=criteria, generation_config=config, cache=Cache()
        )
        counts[tuple(ids[0, -NEW:].tolist())] += 1
    assert float(counts[joint == 0].sum()) == 0, "something impossible was sampled"
    expected, seen = joint.flatten() * (RUNS / joint.sum()), counts.flatten()
    rare = expected < 5  # too few for the test: together they may do
    bins = torch.stack([torch.cat([part[~rare], part[rare].sum()[None]]).double() for part in (seen, expected)])
    bins = bins[:, bins[1] > 0]
    assert chisquare(bins[0].numpy(), bins[1].numpy()).pvalue > 1e-3
    rate = drafter.accepted / drafter.proposed
    assert rate > 0.99 if acceptance == "high" else rate < 0.5
    assert torch.count_nonzero(joint) >= 6
