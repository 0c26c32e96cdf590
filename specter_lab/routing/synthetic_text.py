"""A text whose routing was made up, and what speculative decoding meets in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specter_lab.routing.log import RoutingLog
from specter_lab.routing.statistics import RoutingStatistics

LONGEST_DRAFT = 32
"""Most tokens a window drafts: so long a run of wrong tokens is made for each proposal that fails."""

Ids = NDArray[np.int16]


@dataclass(frozen=True, eq=False)
class Window:
    """One step of speculative decoding on a generated text.

    ``draft`` (rows, layer, rank): the draft's own picks, one row for each token it read, the first at ``position``. ``needed``
    (rows + 1, layer, rank): what the verification pass computes with. ``accepted``: how many proposals hold; in both arrays
    the rows after number ``accepted`` stand for wrong tokens.

    >>> from types import SimpleNamespace as Shape; from specter_lab.routing.synthetic import SyntheticRouting
    >>> text = SyntheticRouting(Shape(layers=2, experts=8, experts_per_token=2), "qwen_like").sample(tokens=20, seed=0)
    >>> text.window(start=4, length=3).needed.shape
    (4, 2, 2)
    """

    position: int
    draft: Ids
    needed: Ids
    accepted: int


@dataclass(frozen=True, eq=False)
class SyntheticText:
    """A generated text: ids are int16, rank 0 is the router's first choice; horizons count from 1, the token at hand.

    ``experts`` (token, layer, rank): the target's picks. ``draft`` (horizon, token, layer, rank): the draft's, when that token
    is the horizon-th of its window and all before it were right; past the last horizon the last one holds. ``gate``
    (token, layer, rank): the next-layer gate's guess, made one layer earlier; -1 in layer 0, which has none before it.
    ``accepted`` (horizon, token): is what the draft proposes *after* reading that token right? ``run`` (token,): the run of
    wrong tokens that a wrong proposal starts in that token's place, -1 where none is ever wrong. ``strayed`` (run, row, layer,
    rank): what the target picks for such a run, token by token, and ``strayed_draft`` the draft, with its last horizon's recall.
    ``tokens`` (token,) int64 stand-ins for ids, all different.

    >>> from types import SimpleNamespace as Shape; from specter_lab.routing.synthetic import SyntheticRouting
    >>> text = SyntheticRouting(Shape(layers=2, experts=8, experts_per_token=2), "qwen_like").sample(tokens=20, seed=0)
    >>> text.log()
    RoutingLog(synthetic qwen_like: 20 tokens, 1 forward, 2 MoE layers, 8 experts, up to 2 a token)
    """

    experts: Ids
    draft: Ids
    gate: Ids
    accepted: NDArray[np.bool_]
    run: NDArray[np.int64]
    strayed: Ids
    strayed_draft: Ids
    tokens: NDArray[np.int64]
    expert_counts: tuple[int, ...]
    statistics: RoutingStatistics

    def __len__(self) -> int:
        return len(self.experts)

    @property
    def longest_draft(self) -> int:
        """Most tokens of a window."""
        return LONGEST_DRAFT

    def window(self, start: int, length: int) -> Window:
        """Draft ``length`` tokens from the one at ``start`` on and verify them; fewer where the text ends.

        Raises ``ValueError`` for a start outside the text and a length outside 0 to ``LONGEST_DRAFT``.
        """
        if not 0 <= start < len(self) or not 0 <= length <= LONGEST_DRAFT:
            raise ValueError(
                f"A window starts inside the text and drafts 0 to {LONGEST_DRAFT} tokens; got start={start}, length={length} "
                f"for {len(self)} tokens. Give a start below {len(self)} and split longer drafts."
            )
        length = min(length, len(self) - 1 - start)
        rows = np.arange(start, start + length)
        horizon = np.minimum(np.arange(length), len(self.draft) - 1)
        right = self.accepted[horizon, rows]
        draft, needed = self.draft[horizon, rows], self.experts[start : start + length + 1]
        if right.all():
            return Window(start, draft, needed, length)
        accepted = int(right.argmin())
        run, wrong = self.run[start + accepted + 1], length - accepted
        needed = np.concatenate([needed[: accepted + 1], self.strayed[run, :wrong]])
        draft = np.concatenate([draft[: accepted + 1], self.strayed_draft[run, : wrong - 1]])
        return Window(start, draft, needed, accepted)

    def log(self) -> RoutingLog:
        """The target's picks as a routing log; every weight is 1/rank count, as none are modelled."""
        layers, ranks = self.experts.shape[1:]
        return RoutingLog(
            torch.from_numpy(self.experts.astype(np.int64)),
            torch.full(self.experts.shape, 1 / ranks),
            torch.from_numpy(self.tokens),
            torch.arange(len(self)),
            torch.zeros(len(self), dtype=torch.int64),
            self.expert_counts,
            tuple(range(layers)),
            f"synthetic {self.statistics.name}",
        )
