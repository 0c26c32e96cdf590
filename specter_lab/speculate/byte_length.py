"""Draft length by bytes: the length with the most expected tokens a microsecond, from what this request has measured."""

from __future__ import annotations

import numpy as np

from specter_lab.pieces import DeviceView

_PRIOR = 0.9  # acceptance before anything was judged
_WEIGHT, _EACH = 16.0, 40.0  # judged tokens it stands for, and those that all positions stand for at each of them
_WARM = (1.0, 2.0, 0.5, 1.5)  # the first drafts over ``first``: unlike lengths tell a step's own time from each token's
_SURE = 1.1  # a step without drafts must be predicted to be so much faster: the fit has seen few of them
_EARLY = 1.06  # a draft that ends before the length it was given must be so much faster: what one token adds is half luck


class ByteLength:
    """Chooses the length of each draft from what this cache lacks, this link's and host's speed, and what was accepted so far.

    After n drafted tokens a step gives A(n) = 1 + a_1 + a_1 a_2 + ... tokens (a_i: acceptance at position i so far, starting
    from that at all positions with the weight of 40 observations, which starts from 0.9 with that of 16) in the time
    T(n) = n d + a + b W(n) + c n. d is the time of drafting a token, W(n) the time in which link and host together bring or
    compute every expert that is wanted and absent, a sum of what each position adds (moving averages; positions beyond the
    draft change by the factor by which its last one did, so that what a cold cache lacked is forgotten); a, b, c are fitted
    to this request's own verifications (ridge regression from b = 1). The length with the greatest A(n) / T(n) is drafted;
    tokens that were drafted ahead take no time. A draft ends early where what its next tokens usually add would make it
    6 % slower, since its own have added less than usual. The first four drafts have 1, 2, 1/2 and 3/2 times ``first`` tokens, since one
    length alone can't tell a from c. Length 0 is used once it is predicted to be faster than any other; every 16th of such
    steps drafts one token, to notice when that changes.

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
        self._judged, self._held = np.zeros(self.longest), np.zeros(self.longest)
        self._adds: list[float | None] = [None] * self.longest  # by position: missing us that a token brings along
        self._draft_us: float | None = None
        self._gram, self._moment = np.diag([1e-6, 1.0, 1e-6]), np.array([0.0, 1.0, 0.0])
        self._idle_steps = self._steps = self._ready = 0

    def handed(self, ready: int) -> None:
        """So many tokens are drafted already: they take no time, and what they want counts as wanted."""
        self._ready = ready

    def choose(self, step: int, most: int) -> int:
        """How many tokens to draft, those that are ready included."""
        if self._view is None:
            return min(self.first, most)
        self._begun = self._last = self._view.now_us()
        self._missing, self._change = self._view.missing_us(), 1.0
        if self._steps < len(_WARM):
            return min(int(self.first * _WARM[self._steps]), self.longest, most)
        limit = min(self.longest, most)
        if limit == 0:
            return 0
        rates = self._rates(0, limit)
        if rates[0] <= _SURE * max(rates[1:]):
            return int(np.argmax(rates[1:])) + 1
        self._idle_steps += 1
        return 0 if self._idle_steps % 16 else 1

    def go_on(self, drafted: int) -> bool:
        """Told after each drafted token, its predictions included, to see what it took and added; False ends the draft early."""
        assert self._view is not None, "a pipeline binds its pieces"
        now, missing, before = self._view.now_us(), self._view.missing_us(), self._adds[drafted - 1]
        after = self._mean(before, max(0.0, missing - self._missing))
        self._change = after / before if before else 1.0
        self._adds[drafted - 1], self._draft_us = after, self._mean(self._draft_us, now - self._last)
        self._last, self._missing = now, missing
        if drafted >= self.longest or self._steps < len(_WARM):
            return drafted < self.longest
        rates = self._rates(drafted, self.longest)
        return rates[0] <= _EARLY * max(rates[1:])

    def learn(self, drafted: int, accepted: int) -> None:
        """The acceptance of each judged position, and how long the verification took."""
        self._judged[: min(accepted + 1, drafted)] += 1
        self._held[: min(accepted, drafted)] += 1
        if self._view is not None:
            self._adds[drafted:] = [None if add is None else add * self._change for add in self._adds[drafted:]]
            row = np.array([1.0, self._missing / 1e3, float(drafted)])
            self._gram += np.outer(row, row)
            self._moment += row * (self._view.now_us() - self._last) / 1e3
            self._steps += 1

    def expected_tokens(self, length: int) -> float:
        """A(n), the bonus token included."""
        overall = (_PRIOR * _WEIGHT + self._held.sum()) / (_WEIGHT + self._judged.sum())
        odds = (overall * _EACH + self._held) / (_EACH + self._judged)
        return float(1.0 + np.cumprod(odds[:length]).sum())

    def verify_us(self, missing_us: float, drafted: int) -> float:
        """Predicted time of a verification, a + b W + c n."""
        return max(1.0, float(np.linalg.solve(self._gram, self._moment) @ [1.0, missing_us / 1e3, drafted]) * 1e3)

    def _rates(self, drafted: int, limit: int) -> list[float]:
        """Expected tokens a microsecond of a draft that ends here, or with 1, 2, ... tokens more up to ``limit``."""
        missing, added, spent, rates = self._missing, 0.0, self._last - self._begun, []
        for length in range(drafted, limit + 1):
            rates.append(self.expected_tokens(length) / (spent + self.verify_us(missing, length)))
            if length >= self._ready and length < limit:  # what the link brings meanwhile is in the averages
                add = self._adds[length]
                added = added if add is None else add
                missing, spent = missing + added, spent + (self._draft_us or 0.0)
        return rates

    def _mean(self, old: float | None, new: float) -> float:
        return new if old is None else old + self.smoothing * (new - old)

    def __repr__(self) -> str:
        return f"ByteLength(up to {self.longest})"
