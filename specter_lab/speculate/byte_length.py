"""Draft length by bytes: drafting goes on while one token more raises the expected tokens a microsecond."""

from __future__ import annotations

import numpy as np

from specter_lab.pieces import DeviceView

_PRIOR, _WEIGHT = 0.9, 8.0  # acceptance before anything was judged, and for how many observations it stands
_SEEN = 4  # steps before the fit is trusted
_SURE = 1.1  # a step without drafts must be predicted to be so much faster: the fit has seen few of them


class ByteLength:
    """Chooses the length of each draft from what this cache lacks, this link's and host's speed, and what was accepted so far.

    After n drafted tokens a step gives A(n) = 1 + a_1 + a_1 a_2 + ... tokens (a_i: acceptance at position i so far, starting
    from that at all positions, which starts from 0.9, each with the weight of 8 observations) in the time spent drafting
    so far and a verification of V(n) = a + b W(n) + c n. W(n) is the time in which link and host together bring or compute
    every expert that is wanted and absent; a, b, c are fitted to this request's own steps (ridge regression from b = 1).
    Drafting stops when the next tokens would lower A / (time + V): each brings its own missing experts (moving average by
    position), while the link brings others as it is drafted. Length 0 is used once it is predicted to be faster than any
    other; every 16th of such steps drafts one token, to notice when that changes. The first steps draft ``first`` tokens.

    Source: our own; A(n) as in MoE-SpeQ's governor (arXiv 2511.14102).

    >>> length = ByteLength(longest=8, first=4); length.bind(None); length.choose(step=1, most=20)
    4
    """

    def __init__(self, longest: int = 8, first: int = 4, smoothing: float = 0.2) -> None:
        if not 0 <= first <= longest or not 0 < smoothing <= 1:
            raise ValueError(
                f"First drafts have 0 to ``longest`` tokens, smoothing is in (0, 1]; got first={first}, longest={longest} and smoothing="
                f"{smoothing}. 4, 8 and 0.2 are usual."
            )
        self.longest, self.first, self.smoothing = longest, first, smoothing
        self._view: DeviceView | None = None
        self.new_request()

    def bind(self, view: DeviceView | None) -> None:
        """Given by the pipeline: time, and what is missing."""
        self._view = view

    def new_request(self) -> None:
        """No step has been seen."""
        self._judged, self._held = np.zeros(self.longest + 1), np.zeros(self.longest + 1)
        self._adds: list[float | None] = [None] * (self.longest + 1)  # by position: missing us that a token brings along
        self._draft_us: float | None = None
        self._gram, self._moment = np.diag([1e-6, 1.0, 1e-6]), np.array([0.0, 1.0, 0.0])
        self._idle_steps = 0
        self._steps = 0

    def choose(self, step: int, most: int) -> int:
        """The longest draft worth beginning; ``go_on`` ends it earlier."""
        limit = min(self.longest if self._steps >= _SEEN else self.first, most)
        if self._view is None:
            return limit
        self._begun = self._last = self._view.now_us()
        self._missing = self._view.missing_us()
        if self._steps >= _SEEN and limit and self._best_from_here(limit) == 0:
            self._idle_steps += 1
            return 0 if self._idle_steps % 16 else 1
        return limit

    def go_on(self, drafted: int) -> bool:
        """Told after each drafted token, its predictions included: whether another is worth it."""
        assert self._view is not None, "a pipeline binds its pieces"
        now, missing = self._view.now_us(), self._view.missing_us()
        spent, self._last = now - self._last, now
        self._draft_us = self._mean(self._draft_us, spent)
        brought = max(0.0, missing - self._missing)
        self._adds[drafted] = self._mean(self._adds[drafted], brought)
        self._missing = missing
        if drafted >= self.longest or self._steps < _SEEN:
            return drafted < self.longest
        return self._rate(drafted, now - self._begun, missing) <= max(
            self._rate(drafted + more, now - self._begun + more * self._draft_us, self._ahead(drafted, more))
            for more in range(1, min(3, self.longest - drafted) + 1)
        )

    def learn(self, drafted: int, accepted: int) -> None:
        """The acceptance of each judged position, and how long the verification took."""
        self._judged[: min(accepted + 1, drafted)] += 1
        self._held[: min(accepted, drafted)] += 1
        if self._view is not None:
            row = np.array([1.0, self._missing / 1e3, float(drafted)])
            self._gram += np.outer(row, row)
            self._moment += row * (self._view.now_us() - self._last) / 1e3
            self._steps += 1

    def expected_tokens(self, length: int) -> float:
        """A(n), the bonus token included."""
        overall = (_PRIOR * _WEIGHT + self._held.sum()) / (_WEIGHT + self._judged.sum())
        odds = (overall * _WEIGHT + self._held) / (_WEIGHT + self._judged)
        return float(1.0 + np.cumprod(odds[:length]).sum())

    def verify_us(self, missing_us: float, drafted: int) -> float:
        """V: predicted time of a verification."""
        return max(1.0, float(np.linalg.solve(self._gram, self._moment) @ [1.0, missing_us / 1e3, drafted]) * 1e3)

    def _rate(self, length: int, spent_us: float, missing_us: float) -> float:
        return self.expected_tokens(length) / (spent_us + self.verify_us(missing_us, length))

    def _ahead(self, drafted: int, more: int) -> float:
        """Missing us after so many tokens more; what the link brings meanwhile is in the averages."""
        known = [add for add in self._adds if add is not None] or [0.0]
        adds = [self._adds[drafted + i] for i in range(1, more + 1)]
        return self._missing + sum(known[-1] if add is None else add for add in adds)

    def _best_from_here(self, limit: int) -> int:
        """The length with the best predicted rate before anything is drafted."""
        draft_us = self._draft_us or 0.0
        rates = [self._rate(n, n * draft_us, self._ahead(0, n)) for n in range(limit + 1)]
        return 0 if rates[0] > _SURE * max(rates[1:]) else int(np.argmax(rates[1:])) + 1

    def _mean(self, old: float | None, new: float) -> float:
        return new if old is None else old + self.smoothing * (new - old)

    def __repr__(self) -> str:
        return f"ByteLength(up to {self.longest})"
