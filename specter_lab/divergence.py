"""Where a greedy run leaves plain greedy decoding, and whether rounding explains it.

In half precision a row's logits depend a little on how many rows are computed with it. Verification computes several
rows, plain decoding one, so two tokens that are nearly equally likely may change places. That is no defect, if the
margin between them is as small as the rounding; anything else is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from specter_lab.generation import Generation
from specter_lab.machines.simulated import SimulatedMachine
from specter_lab.models import MoE
from specter_lab.offload.server import ResidentServer
from specter_lab.request import read_prompt
from specter_lab.speculate.choice import Chooser


@dataclass(frozen=True)
class Divergence:
    """``position``: the first new token (from 0) that plain greedy decides otherwise, None if there is none among ``tokens``.

    There: ``plain_token`` and ``run_token``; ``margin``: how far the plain logit of the first is above the second's;
    ``top2_margin``: above its own runner-up's. ``rounding``: the largest difference of any logit, over the tokens up to
    there, between plain and verify-shaped passes; ``verify_shaped_agrees``: whether the latter give the run's token.

    >>> Divergence(tokens=20).explained
    True
    """

    tokens: int
    position: int | None = None
    plain_token: int = -1
    run_token: int = -1
    margin: float = 0.0
    top2_margin: float = 0.0
    rounding: float = 0.0
    verify_shaped_agrees: bool = True

    @property
    def explained(self) -> bool:
        """No divergence, or one whose margin is within rounding: each of two logits may be off by ``rounding``."""
        return self.position is None or self.margin <= 2 * self.rounding

    def __repr__(self) -> str:
        if self.position is None:
            return f"Divergence(none in {self.tokens} tokens)"
        verdict = "explained by rounding" if self.explained else "NOT explained by rounding"
        return (
            f"Divergence(at new token {self.position}: plain {self.plain_token}, run {self.run_token}; margin {self.margin:.3g}, "
            f"logits differ by up to {self.rounding:.3g} with the number of rows: {verdict})"
        )


def divergence(moe: MoE, prompt: Any, run: Generation, *, logits_processor: LogitsProcessorList | None = None) -> Divergence:
    """Decode ``run``'s tokens again, one row at a time and in the shapes of its verification passes, up to the first difference.

    ``prompt`` as it was given to the run, and its ``logits_processor``, if it had one. In float32 there should be none.
    Raises ``ValueError`` for a sampled run, or one of another prompt.

    >>> import specter_lab as sl
    >>> moe = sl.load_moe("tiny-moe", dtype="float32")
    >>> with sl.Pipeline(moe, drafter=sl.PromptLookupDrafter(), machine=sl.SimulatedMachine()) as pipeline:
    ...     run = pipeline.generate("Once", max_new_tokens=8)
    >>> divergence(moe, "Once", run)
    Divergence(none in 8 tokens)
    """
    ids = read_prompt(moe, prompt, {}).to(moe.model.device)
    start = ids.shape[1]
    if tuple(ids[0].tolist()) != run.ids[:start] or start + len(run.new_ids) != len(run.ids):
        raise ValueError(
            f"A run is compared on its own prompt; it had {len(run.ids) - len(run.new_ids)} tokens, and these {start} differ from them. "
            "Give the prompt that the run was made with."
        )
    if run.conditions["sampling"]:
        raise ValueError(
            f"Only greedy runs can be compared with greedy decoding; this one sampled (seed {run.conditions['seed']}). Rerun it."
        )
    text = torch.tensor([run.ids], device=moe.model.device)
    chooser = Chooser(logits_processor or LogitsProcessorList(), do_sample=False)
    one_by_one = [(0, start), *((place, place + 1) for place in range(start, len(run.ids) - 1))]
    rounding = 0.0
    pairs = zip(run.new_ids, _rows(moe, text, one_by_one), _rows(moe, text, _windows(run, start)), strict=False)
    for place, (token, plain, shaped) in enumerate(pairs):
        rounding = max(rounding, float((plain - shaped).abs().max()))
        scores, shaped_scores = (chooser.scores(text[:, : start + place], [], row) for row in (plain, shaped))
        if int(scores.argmax()) != token:
            first, second = scores.topk(2).values.tolist()
            return Divergence(
                len(run.new_ids), place, int(scores.argmax()), token, margin=first - float(scores[token]), top2_margin=first - second,
                rounding=rounding, verify_shaped_agrees=int(shaped_scores.argmax()) == token,
            )  # fmt: skip
    return Divergence(len(run.new_ids), rounding=rounding)


def _windows(run: Generation, start: int) -> list[tuple[int, int]]:
    """The places that each pass of the run computed, from its trace; rejected drafts are stood in for by what came instead."""
    drafted = run.trace.of_kind("draft_length").set_index("step")["value"].astype(int)
    windows, place = [(0, start)], start
    for step, tokens in run.trace.of_kind("commit").set_index("step")["tokens"].astype(int).items():
        if step:
            windows.append((place, place + int(drafted[step]) + 1))
            place += int(tokens)
    return windows


def _rows(moe: MoE, text: Tensor, windows: list[tuple[int, int]]) -> Iterator[Tensor]:
    """(vocabulary,) float32 logits after the prompt and after each place, from passes over ``windows`` of (1, tokens) text."""
    cache: Any = None
    for (begin, end), following in zip(windows, [*(b for b, _ in windows[1:]), text.shape[1] - 1], strict=True):
        rows = text[:, begin:end]
        if rows.shape[1] < end - begin:  # drafts past the run's end
            rows = torch.cat([rows, rows[:, -1:].expand(1, end - begin - rows.shape[1])], dim=1)
        with torch.no_grad(), _experts_in_place(moe):
            out = moe.model(input_ids=rows, cache=cache, use_cache=True, logits_to_keep=rows.shape[1] if begin else 1)
        if not moe.rollback and begin:
            cache.crop(-(end - following))
        elif not moe.rollback:
            out.cache.activate_past_recording()
        cache = out.cache
        yield from out.logits[0, : following - begin].float() if begin else out.logits[0, -1:].float()


@contextmanager
def _experts_in_place(moe: MoE) -> Iterator[None]:
    """Whether the experts are out or not: all of them at hand, computed as eager ones are."""
    if moe.seam.attached:
        with moe.seam.serving(ResidentServer(moe.store, SimulatedMachine(), "target", 0)):
            yield
        return
    before = moe.model.config._experts_implementation
    moe.model.set_experts_implementation("eager")
    try:
        yield
    finally:
        moe.model.set_experts_implementation(before)
