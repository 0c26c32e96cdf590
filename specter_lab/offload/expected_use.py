"""Eviction by expected next use: what the window wants stays, then what was used often, lately more than long ago."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from specter_lab.pieces import DeviceView
from specter_lab.records import ExpertKey


class ExpectedUse:
    """Forgets the expert with the fewest expected uses in the predicted window, then with the lowest recent frequency.

    Expected uses: the sum, over the window's positions, of the probability that the position uses the expert. Frequency:
    uses (also on the host, or while absent) that count half after ``half_life`` uses for each expert of the layer. An
    expert that is used once and not expected again is the next to go, so that it passes by the frequent ones.

    Source: our own; the window's part follows MoE-SpeQ (arXiv 2511.14102), the decay is LRFU's (Lee et al., 2001).

    >>> policy = ExpectedUse(); policy.bind(None)
    >>> policy.used(ExpertKey(0, 1)); policy.used(ExpertKey(0, 1)); policy.used(ExpertKey(0, 2))
    >>> policy.victim([ExpertKey(0, 1), ExpertKey(0, 2)])
    ExpertKey(layer=0, expert=2)
    """

    name = "expected use"

    def __init__(self, half_life: float = 4.0) -> None:
        if not half_life > 0:
            raise ValueError(f"A half-life is above 0 uses for each expert of a layer; got {half_life}; 4.0 is usual.")
        self.half_life = half_life
        self._view: DeviceView | None = None
        self.new_request()

    def bind(self, view: DeviceView | None) -> None:
        """Given by the pipeline: what is expected."""
        self._view = view

    def new_request(self) -> None:
        """Nothing has been used yet."""
        self._clock: dict[int, int] = defaultdict(int)
        self._frequency: dict[ExpertKey, tuple[float, int]] = {}

    def loaded(self, key: ExpertKey) -> None:
        """An arrival is no use."""

    def used(self, key: ExpertKey) -> None:
        """One use more; the others of its layer have aged by one."""
        self._clock[key.layer] += 1
        self._frequency[key] = (self.frequency(key) + 1.0, self._clock[key.layer])

    def forgotten(self, key: ExpertKey) -> None:
        """The frequency stays: an expert that comes back is known."""

    def frequency(self, key: ExpertKey) -> float:
        """Uses so far, the old ones counting less."""
        uses, then = self._frequency.get(key, (0.0, 0))
        experts = self._view.experts(key.layer) if self._view is not None else 1
        return float(uses * 0.5 ** ((self._clock[key.layer] - then) / (self.half_life * experts)))

    def victim(self, candidates: Sequence[ExpertKey]) -> ExpertKey:
        """The least expected, then the least frequent, then the lowest id."""

        def worth(key: ExpertKey) -> tuple[float, float, ExpertKey]:
            return (self._view.expected_uses(key) if self._view is not None else 0.0, self.frequency(key), key)

        return min(candidates, key=worth)
