"""Means over prompts, their ratios, and how sure both are: a paired bootstrap over the prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

LEAST_PROMPTS = 3
RESAMPLES = 2000


class Interval(NamedTuple):
    """A value and the bounds of its interval (None where there are too few prompts for one).

    >>> Interval(1.5, 1.2, 1.9).bounds
    [1.2, 1.9]
    """

    value: float
    low: float | None
    high: float | None

    @property
    def bounds(self) -> list[float] | None:
        """[low, high], for JSON."""
        return None if self.low is None or self.high is None else [self.low, self.high]


class Resampled:
    """The mean of each system over the same prompts, resampled together, so that a hard prompt is hard for all.

    ``figures``: for each system one number a prompt. ``confidence``: None for no intervals. ``ValueError`` for an interval
    over fewer prompts than ``LEAST_PROMPTS``.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), percentile intervals; paired by prompt.

    >>> Resampled({"a": [4.0, 6.0, 8.0], "b": [2.0, 3.0, 4.0]}).ratio("a", "b")
    Interval(value=2.0, low=2.0, high=2.0)
    """

    def __init__(self, figures: Mapping[str, Sequence[float]], confidence: float | None = 0.95, *, seed: int = 0) -> None:
        prompts = len(next(iter(figures.values()), ()))
        if confidence is not None and prompts < LEAST_PROMPTS:
            raise ValueError(
                f"An interval over prompts needs at least {LEAST_PROMPTS}; got {prompts}. Give more prompts, or confidence=None."
            )
        self.confidence = confidence
        self._values = {name: np.asarray(values, dtype=float) for name, values in figures.items()}
        rows = np.random.default_rng(seed).integers(0, max(prompts, 1), (RESAMPLES, prompts))
        self._means = {name: values[rows].mean(axis=1) for name, values in self._values.items()} if confidence is not None else {}

    def mean(self, name: str) -> Interval:
        """Mean over prompts."""
        return self._interval(float(self._values[name].mean()), self._means.get(name))

    def ratio(self, above: str, below: str) -> Interval:
        """Mean of one system over the mean of another: with times, how much faster ``below`` is."""
        value = float(self._values[above].mean() / self._values[below].mean())
        return self._interval(value, self._means[above] / self._means[below] if self._means else None)

    def _interval(self, value: float, drawn: np.ndarray | None) -> Interval:
        if drawn is None or self.confidence is None:
            return Interval(value, None, None)
        tail = 50 * (1 - self.confidence)
        low, high = np.percentile(drawn, [tail, 100 - tail])
        return Interval(value, float(low), float(high))
