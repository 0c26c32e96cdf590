"""Choosing a token: the request's own processors, the same for draft and target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from specter_lab.speculate.verification import draw


class Chooser:
    """Turns logits (vocabulary,) into a token, greedy or sampled, after ``processors``.

    >>> chooser = Chooser(LogitsProcessorList(), do_sample=False)
    >>> chooser.choose(torch.tensor([[3]]), [], torch.tensor([0.1, 0.9]))
    (1, None)
    """

    def __init__(self, processors: LogitsProcessorList, *, do_sample: bool, generator: torch.Generator | None = None) -> None:
        self.processors, self.do_sample, self.generator = processors, do_sample, generator

    def scores(self, ids: Tensor, prefix: Sequence[int], logits: Tensor) -> Tensor:
        """(vocabulary,) processed scores in fp32 after ``ids`` (1, tokens) and the drafted ``prefix``."""
        scores = logits.to(torch.float32, copy=True)[None]
        if not self.processors:
            return scores[0]
        if prefix:
            ids = torch.cat([ids, ids.new_tensor([list(prefix)])], dim=-1)
        return self.processors(cast(torch.LongTensor, ids), cast(torch.FloatTensor, scores))[0]

    def probs(self, ids: Tensor, prefix: Sequence[int], logits: Tensor) -> Tensor:
        """(vocabulary,) the distribution that a sampled token is drawn from."""
        return self.scores(ids, prefix, logits).softmax(-1)

    def choose(self, ids: Tensor, prefix: Sequence[int], logits: Tensor) -> tuple[int, Tensor | None]:
        """A token, and its distribution when sampling."""
        if not self.do_sample:
            return int(self.scores(ids, prefix, logits).argmax()), None
        probs = self.probs(ids, prefix, logits)
        return draw(probs, self.generator), probs
