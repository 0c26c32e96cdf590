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
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

from specter_lab.decoding import Decoding
from specter_lab.recipes import tiny_model
from specter_lab.records import DraftToken
from specter_lab.speculate.choice import Chooser
from specter_lab.speculate.drafters import PromptLookupDrafter, SelfDrafter
from specter_lab.speculate.verification import verify_sampled

VOCABULARY, PROMPT, NEW, RUNS = 3, [2, 1, 0, 2], 4, 700
TABLE = torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 1.5


class Parity(LogitsProcessor):
    """Dislikes what the place of the token says: it depends on the drafted prefix."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores - 2.0 * (torch.arange(VOCABULARY) == input_ids.shape[1] % VOCABULARY)


PROCESSORS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6, "top_k": 0},
    "top-k": {"top_k": 2},
    "top-p": {"top_k": 0, "top_p": 0.7},
    "min-p": {"top_k": 0, "min_p": 0.2},
    "repetition penalty": {"top_k": 0, "repetition_penalty": 1.8},
    "bad words": {"top_k": 0, "bad_words_ids": [[1, 0], [2, 2]]},
    "a processor of one's own": {"top_k": 0, "logits_processor": LogitsProcessorList([Parity()])},
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


class Toy:
    """The model, and the seam that puts a draft's experts in it: then logits come from that bank's table."""

    modules = ()

    def __init__(self, table: Tensor) -> None:
        self.table = self.now = table

    @contextmanager
    def serving(self, server: Any) -> Iterator[list[Any]]:
        bank = getattr(server, "bank", None)
        self.now = self.table if bank is None else bank.table
        yield []
        self.now = self.table

    def __call__(self, input_ids: Tensor, cache: Cache, use_cache: bool, logits_to_keep: int = 0) -> Any:
        """Logits by what the cache and the input say were the last two tokens: a rollback that failed would show."""
        rows = []
        for token in input_ids[0].tolist():
            cache.read.append(token)
            rows.append(self.now[cache.read[-2] if len(cache.read) > 1 else 0, token])
        return SimpleNamespace(logits=torch.stack(rows)[None], cache=cache)


class Drafter:
    """Proposes from the target's own distribution, or ("low") from one that dislikes what the target likes."""

    name = "toy"

    def __init__(self, low: bool) -> None:
        self.low, self.proposed, self.accepted = low, 0, 0

    def draft(self, context: Any, length: int) -> Iterator[DraftToken]:
        token, prefix = int(context.ids[0, -1]), list[int]()
        for _ in range(length):
            logits, unchosen = context.forward(token, SimpleNamespace(table=TABLE))
            token, probs = context.choose(logits, prefix)
            if self.low:
                probs = (1 - probs) ** 4
                probs = probs / probs.sum()
                token = int(torch.multinomial(probs, 1, generator=context.generator))
            prefix.append(token)
            yield dataclasses.replace(unchosen, token=token, probs=probs)

    def learn(self, drafted: Any, accepted: int) -> None:
        self.proposed, self.accepted = self.proposed + len(drafted), self.accepted + accepted


def loop(decoding: Decoding) -> None:
    server: Any = SimpleNamespace(step=1)
    committed = decoding.prefill(server)
    while not committed.finished:
        drafted = list(decoding.draft(1, min(2, decoding.left() - 1)))
        committed = decoding.verify(1, drafted, server)
        decoding.drafter.learn(drafted, committed.accepted)  # type: ignore[union-attr]


def processors_of(config: GenerationConfig, own: LogitsProcessorList | None = None) -> LogitsProcessorList:
    model = tiny_model("mixtral", vocab_size=8)
    ids = torch.tensor([PROMPT])
    model._prepare_special_tokens(config, False, device=ids.device)
    made: LogitsProcessorList = model._get_logits_processor(
        config, input_ids_seq_length=len(PROMPT), logits_processor=own or LogitsProcessorList()
    )
    return made


def exact(processors: LogitsProcessorList, table: Tensor) -> Tensor:
    """(3, 3, 3, 3): the probability of each four tokens."""
    joint = torch.zeros((VOCABULARY,) * NEW, dtype=torch.float64)
    for outcome in itertools.product(range(VOCABULARY), repeat=NEW):
        text, probability = list(PROMPT), 1.0
        for token in outcome:
            scores = processors(torch.tensor([text]), table[text[-2], text[-1]][None].clone())
            probability *= float(scores.softmax(-1)[0, token])
            text.append(token)
        joint[outcome] = probability
    return joint


def sample(options: dict[str, Any], drafter: Any, table: Tensor = TABLE) -> None:
    """Many seeds through the real decoding; their frequencies must be those of the target alone."""
    options = dict(options)
    own = options.pop("logits_processor", None)
    config = GenerationConfig(do_sample=True, **options)
    processors, target = processors_of(config, own), Toy(table)
    joint, counts = exact(processors, table), torch.zeros((VOCABULARY,) * NEW)
    config.max_length, config.eos_token_id = len(PROMPT) + NEW, None
    criteria = StoppingCriteriaList([MaxLengthCriteria(config.max_length)])
    machine: Any = SimpleNamespace(compute=lambda *args, **kwargs: None)
    for seed in range(RUNS):
        getattr(drafter, "new_request", lambda: None)()
        generator = torch.Generator().manual_seed(seed)
        decoding = Decoding(target, machine, drafter, loop, residency=None, generator=generator, streamer=None)  # type: ignore[arg-type]
        ids = decoding.decode(
            target, torch.tensor([PROMPT]), logits_processor=processors, stopping_criteria=criteria, generation_config=config, cache=Cache()
        )
        counts[tuple(ids[0, -NEW:].tolist())] += 1
    assert float(counts[joint == 0].sum()) == 0, "something impossible was sampled"
    expected, seen = joint.flatten() * (RUNS / joint.sum()), counts.flatten()
    rare = expected < 5  # too few for the test: together they may do
    bins = torch.stack([torch.cat([part[~rare], part[rare].sum()[None]]).double() for part in (seen, expected)])
    bins = bins[:, bins[1] > 0]
    assert chisquare(bins[0].numpy(), bins[1].numpy()).pvalue > 1e-3
    assert torch.count_nonzero(joint) >= 6


@pytest.mark.parametrize("acceptance", ["high", "low"])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_tokens_are_distributed_as_the_targets(processor: str, acceptance: str) -> None:
    """Cases 32 and 34: drafts that are always and hardly ever accepted, the same processors on both sides."""
    drafter = Drafter(acceptance == "low")
    sample(PROCESSORS[processor], drafter)
    rate = drafter.accepted / drafter.proposed
    assert rate > 0.99 if acceptance == "high" else rate < 0.5


class Counted:
    """A drafter of the package, and how many of its tokens were accepted."""

    def __init__(self, drafter: Any) -> None:
        self.draft, self.name, self.proposed, self.accepted = drafter.draft, drafter.name, 0, 0

    def learn(self, drafted: Any, accepted: int) -> None:
        self.proposed, self.accepted = self.proposed + len(drafted), self.accepted + accepted


REPEATING = torch.eye(VOCABULARY)[:, None].expand(-1, VOCABULARY, -1) * 3.0  # likes the last token but one: 0 2 0 2 ...
DRAFTERS: dict[str, tuple[Any, Tensor, tuple[float, float]]] = {  # the drafter, the target's table, between which rates
    "self-draft near the target": (SelfDrafter(SimpleNamespace(name="near", table=TABLE * 0.9)), TABLE, (0.9, 0.999)),
    "self-draft far from it": (SelfDrafter(SimpleNamespace(name="far", table=-TABLE)), TABLE, (0.05, 0.5)),
    "lookup in a text that repeats": (PromptLookupDrafter(2), REPEATING, (0.6, 1.0)),
    "lookup in one that doesn't": (PromptLookupDrafter(2), -REPEATING, (0.0, 0.5)),
}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_each_drafter_leaves_the_distribution_alone(kind: str) -> None:
    """Case 32, for the drafters of the package."""
    drafter, table, (least, most) = DRAFTERS[kind]
    counted = Counted(drafter)
    sample({"temperature": 1.2, "top_k": 0, "top_p": 0.97, "repetition_penalty": 1.1}, counted, table)
    assert counted.proposed > RUNS / 4 and least <= counted.accepted / counted.proposed <= most


def test_draw_and_ratio_come_from_one_float32_distribution() -> None:
    """Case 34, in half precision: a draft with the target's own logits always stands, since nothing is rounded in between."""
    config = GenerationConfig(do_sample=True, temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.2)
    generator = torch.Generator().manual_seed(0)
    chooser = Chooser(processors_of(config), do_sample=True, generator=generator)
    ids = torch.tensor([PROMPT])
    for _ in range(200):
        logits = torch.randn(8, generator=generator).to(torch.bfloat16)
        before = logits.clone()
        token, probs = chooser.choose(ids, [1], logits)
        target = chooser.probs(ids, [1], logits)
        assert probs is not None and probs.dtype == target.dtype == torch.float32 and torch.equal(probs, target)
        assert torch.equal(logits, before), "processors changed the caller's logits"
        assert verify_sampled([DraftToken(token, 0, probs=probs)], lambda i, row=target: row, generator).accepted == 1
