"""MoE-SpeQ's governor: the draft length with the most expected tokens a microsecond."""

from __future__ import annotations

from collections.abc import Sequence

from specter_lab.pieces import DeviceView


class Governor:
    """argmax over lengths k of A(k) / T(k): expected tokens of a step over the time of a step.

    A(k) = 1 + sum over i <= k of a_1 ... a_i, with a_i the moving average of the acceptance at position i (the bonus token counts).
    T(k) is the moving average of the observed time of steps of that length; a length between two observed ones is
    interpolated, and each candidate is tried once, shortest first.

    Source: MoE-SpeQ (arXiv 2511.14102), adaptive governor. Differs: T is measured instead of composed from a model of draft,
    link and verification, so it needs no offline profile; and the bonus token is added to A.

    >>> governor = Governor(candidates=(1, 4)); governor.bind(None)
    >>> governor.choose(step=1, most=10)
    1
    """

    def __init__(self, candidates: Sequence[int] = (1, 2, 4, 8, 12, 16), smoothing: float = 0.25) -> None:
        if not candidates or min(candidates) < 0 or not 0 < smoothing <= 1:
            raise ValueError(f"A governor chooses among lengths of 0 or more, smoothing in (0, 1]; got {list(candidates)} and {smoothing}.")
        self.candidates, self.smoothing = tuple(sorted(candidates)), smoothing
        self.new_request()
        self._view: DeviceView | None = None
        self._begun_us = 0.0

    def new_request(self) -> None:
        """No acceptance and no time has been observed."""
        self._accepted = [0.9] * (max(self.candidates) + 1)
        self._times: dict[int, float] = {}

    def bind(self, view: DeviceView | None) -> None:
        """Given by the pipeline: the time."""
        self._view = view

    def choose(self, step: int, most: int) -> int:
        """An untried candidate, else the best ratio."""
        self._begun_us = self._view.now_us() if self._view is not None else 0.0
        possible = [k for k in self.candidates if k <= most] or [most]
        untried = [k for k in possible if k not in self._times]
        return untried[0] if untried else max(possible, key=lambda k: (self.expected_tokens(k) / self._times[k], -k))

    def expected_tokens(self, length: int) -> float:
        """A(k), bonus token included."""
        total, reach = 1.0, 1.0
        for odds in self._accepted[:length]:
            reach *= odds
            total += reach
        return total

    def learn(self, drafted: int, accepted: int) -> None:
        """Update the acceptances up to the first rejection, and the time of this length."""
        for i in range(min(accepted + 1, drafted)):
            self._accepted[i] += self.smoothing * ((i < accepted) - self._accepted[i])
        if self._view is not None:
            taken = self._view.now_us() - self._begun_us
            self._times[drafted] = (
                taken if drafted not in self._times else self._times[drafted] + self.smoothing * (taken - self._times[drafted])
            )

    def __repr__(self) -> str:
        return f"Governor({', '.join(map(str, self.candidates))})"
