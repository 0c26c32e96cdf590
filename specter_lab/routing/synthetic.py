"""Routing without weights: a router that makes up texts which behave as published statistics say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specter_lab.routing.statistics import RoutingStatistics, statistics_named
from specter_lab.routing.synthetic_text import LONGEST_DRAFT, Ids, SyntheticText

Logits = NDArray[np.float32]

_BONUS = np.linspace(-1.0, 4.0, 21)  # what a just-used expert's logit may gain; 4 repeats nearly every expert
_NOISE = np.concatenate([[0.0], np.geomspace(0.05, 6.0, 18)])  # of a guess about logits whose own spread is 1


class Shape(Protocol):
    """What the generator needs of a model: ``ModelShape`` and ``Geometry`` both have it."""

    @property
    def layers(self) -> int:
        """Number of MoE layers."""

    @property
    def experts(self) -> int | Sequence[int]:
        """Experts of each layer: one number, or one for each layer, all the same."""

    @property
    def experts_per_token(self) -> int:
        """Experts a router picks for a token."""


class SyntheticRouting:
    """Makes texts whose routing has the given statistics (or a preset's, by name) on a model of that shape.

    A router's logit is a fixed popularity, plus what this text likes, plus a topic that drifts, plus noise of the token, plus
    a bonus for the experts of the token before; the k highest are picked. Draft and gate see the same logits through noise.
    Bonus and noise are found here, once, so that reuse and recall come out as asked on this shape. ``seed`` fixes the router;
    all texts of one router share its popularity.

    Raises ``ValueError`` when the shape has unequal layers or the statistics can't be had on it.

    >>> from types import SimpleNamespace as Shape
    >>> routing = SyntheticRouting(Shape(layers=2, experts=8, experts_per_token=2), "qwen_like")
    >>> bool((routing.sample(9, seed=1).experts == routing.sample(9, seed=1).experts).all())
    True
    """

    def __init__(self, shape: Shape, statistics: RoutingStatistics | str, *, seed: int = 0) -> None:
        self.statistics = statistics_named(statistics) if isinstance(statistics, str) else statistics
        counts = {int(n) for n in np.atleast_1d(np.asarray(shape.experts))}
        self.layers, self.experts, self.ranks = int(shape.layers), max(counts), int(shape.experts_per_token)
        if len(counts) > 1 or not 0 < self.ranks < self.experts or self.layers < 1:
            raise ValueError(
                f"Generated routing needs layers of one size and fewer picks than experts; got {self.layers} layers of {sorted(counts)} "
                f"experts and {self.ranks} a token. Generate each group of equal layers by itself, or change the shape."
            )
        self.seed = seed
        rng = np.random.default_rng([seed, 0])
        self._popularity = math.sqrt(self.statistics.popularity_share) * _normal(rng, self.layers, self.experts)
        depth, spot = np.linspace(0.0, 1.0, self.layers), (self.experts, self.ranks, self.statistics.lasting_share)
        self._bonus = _solve("adjacent_reuse", _by_depth(self.statistics.adjacent_reuse, depth), _reuse_curve(*spot), _BONUS)
        recall = _recall_curve(*spot, round(float(self._bonus.mean()), 2))
        self._draft_noise = _solve("draft_recall", self.statistics.draft_recall, recall, _NOISE)
        self._gate_noise = _solve("gate_recall", _by_depth(self.statistics.gate_recall, depth), recall, _NOISE)

    def sample(self, tokens: int, seed: int) -> SyntheticText:
        """A text of so many tokens; the same seed gives the same text, a longer one is not a continuation."""
        if tokens < 1:
            raise ValueError(f"A text has at least one token; got {tokens}. Give tokens=160, for instance.")
        rng = np.random.default_rng([self.seed, 1, seed])
        given, size, bonus = self.statistics, (tokens, self.layers, self.experts), self._bonus[:, None]
        own = math.sqrt(1 - given.lasting_share)
        lasting = self._popularity + math.sqrt(given.text_share) * _normal(rng, *size[1:])
        if given.topic_share:
            lasting = lasting + math.sqrt(given.topic_share) * _drift(rng, size, given.topic_tokens)
        lasting = np.broadcast_to(lasting, size)
        logits = lasting + own * _normal(rng, *size)
        experts = _follow(logits, bonus, self.ranks)
        blur = _normal(rng, *size)
        levels, chances = _by_horizon(self._draft_noise, given.acceptance)
        gate = _top(logits + self._gate_noise[:, None] * _normal(rng, *size), self.ranks)
        gate[:, 0] = -1
        # one draw a token: what is hard to guess is so at every horizon, for every system that is compared
        accepted: NDArray[np.bool_] = rng.random(tokens)[None] < np.asarray(chances)[:, None]
        starts = np.flatnonzero(~np.all(accepted, axis=0)[:-1]) + 1
        run = np.full(tokens, -1)
        run[starts] = np.arange(len(starts))
        # a run of wrong tokens continues the right ones before it: same topic, noise of its own, then each follows the last
        places = np.minimum(starts + np.arange(LONGEST_DRAFT)[:, None], tokens - 1)
        stray = lasting[places] + own * _normal(rng, *places.shape, *size[1:])
        if len(starts):
            _reward(stray[0], experts[starts - 1], bonus)
        strayed = _follow(stray, bonus, self.ranks)
        return SyntheticText(
            experts=experts,
            draft=np.stack([_top(logits + level * blur, self.ranks) for level in levels]),
            gate=gate,
            accepted=accepted,
            run=run,
            strayed=strayed.swapaxes(0, 1),
            strayed_draft=_top(stray + levels[-1] * _normal(rng, *stray.shape), self.ranks).swapaxes(0, 1),
            tokens=rng.permutation(tokens).astype(np.int64),
            expert_counts=(self.experts,) * self.layers,
            statistics=given,
        )


def _normal(rng: np.random.Generator, *size: int) -> Logits:
    return rng.standard_normal(size, dtype=np.float32)


def _drift(rng: np.random.Generator, size: tuple[int, int, int], tokens: float) -> Logits:
    """Unit-variance logits that forget a share of 1/tokens from one token to the next."""
    walk = _normal(rng, *size)
    keep = np.float32(np.exp(-1 / tokens))
    fresh = np.float32(math.sqrt(1 - keep * keep))
    for t in range(1, size[0]):
        walk[t] = keep * walk[t - 1] + fresh * walk[t]
    return walk


def _top(logits: Logits, ranks: int) -> Ids:
    """The ``ranks`` highest along the last axis, highest first."""
    ids = np.argpartition(logits, -ranks, axis=-1)[..., -ranks:]
    order = np.take_along_axis(logits, ids, -1).argsort(-1)[..., ::-1]
    return np.take_along_axis(ids, order, -1).astype(np.int16)


def _reward(logits: Logits, picked: Ids, bonus: Any) -> None:
    """Add ``bonus`` to the picked experts' logits, in place."""
    chosen = picked.astype(np.int64)
    np.put_along_axis(logits, chosen, np.take_along_axis(logits, chosen, -1) + bonus, -1)


def _follow(logits: Logits, bonus: Any, ranks: int) -> Ids:
    """Pick token by token; each token's picks raise the next one's logits, in place."""
    picks = np.empty((*logits.shape[:-1], ranks), np.int16)
    for token, row in enumerate(logits):
        if token:
            _reward(row, picks[token - 1], bonus)
        picks[token] = _top(row, ranks)
    return picks


def _by_depth(knots: Sequence[float], depth: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.interp(depth, np.linspace(0.0, 1.0, len(knots)), knots)


def _by_horizon(*series: Any) -> list[list[Any]]:
    """Each series as long as the longest, by repeating its last value."""
    horizons = range(max(map(len, series)))
    return [[values[min(h, len(values) - 1)] for h in horizons] for values in series]


def _shared(first: Ids, second: Ids) -> NDArray[np.float64]:
    """Share of the picks that two equally long sets have in common."""
    return (first[..., :, None] == second[..., None, :]).any(-1).mean(-1)


def _tried(experts: int, ranks: int, lasting: float, bonuses: tuple[float, ...]) -> tuple[Logits, Ids]:
    """(token, row, bonus, expert) logits of a small trial text in which each bonus meets the same luck, and what is picked."""
    rng = np.random.default_rng(0)
    rows, tokens = 24, 96
    logits = math.sqrt(lasting) * _normal(rng, rows, experts) + math.sqrt(1 - lasting) * _normal(rng, tokens, rows, experts)
    tried = np.repeat(logits[:, :, None], len(bonuses), axis=2)
    return tried, _follow(tried, np.asarray(bonuses, np.float32)[:, None], ranks)


@lru_cache(maxsize=64)
def _reuse_curve(experts: int, ranks: int, lasting: float) -> NDArray[np.float64]:
    """The reuse that each of ``_BONUS`` gives."""
    _, picks = _tried(experts, ranks, lasting, tuple(_BONUS))
    return np.maximum.accumulate(_shared(picks[:-1], picks[1:]).mean((0, 1)))


@lru_cache(maxsize=64)
def _recall_curve(experts: int, ranks: int, lasting: float, bonus: float) -> NDArray[np.float64]:
    """The recall that each of ``_NOISE`` leaves, at this bonus."""
    logits, right = _tried(experts, ranks, lasting, (bonus,))
    blur = _normal(np.random.default_rng(1), *logits.shape)
    return np.minimum.accumulate([_shared(right, _top(logits + np.float32(level) * blur, ranks)).mean() for level in _NOISE])


def _solve(name: str, wanted: Any, curve: NDArray[np.float64], tried: NDArray[np.float64]) -> Logits:
    """For each wanted value the setting that gives it; ``ValueError`` outside what the curve reaches."""
    wanted = np.asarray(wanted, dtype=np.float64)
    low, high = sorted((curve[0], curve[-1]))
    if (wanted < low - 1e-9).any() or (wanted > high + 1e-9).any():
        raise ValueError(
            f"On this shape {name} can be {low:.3f} to {high:.3f}, given its popularity, text and topic shares; "
            f"got {np.round(wanted, 3).tolist()}. Choose values inside, or change the shares or the shape."
        )
    rising = curve[-1] >= curve[0]
    found = np.interp(wanted, curve if rising else curve[::-1], tried if rising else tried[::-1])
    return np.where(wanted == curve[0], tried[0], found).astype(np.float32)  # full recall takes no noise at all
