"""Which resident expert to forget. Forgetting is free: the host keeps everything, nothing is copied back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from specter_lab.records import ExpertKey


class LRU:
    """Forgets the expert whose last use (or arrival) is longest ago.

    Source: Eliseev and Mazur, "Fast Inference of Mixture-of-Experts Language Models with Offloading"
    (arXiv 2312.17238), section 3.1.

    >>> lru = LRU(); lru.loaded(ExpertKey(0, 1)); lru.loaded(ExpertKey(0, 2)); lru.used(ExpertKey(0, 1))
    >>> lru.victim([ExpertKey(0, 1), ExpertKey(0, 2)])
    ExpertKey(layer=0, expert=2)
    """

    name = "LRU"

    def __init__(self) -> None:
        self._clock = 0
        self._touched: dict[ExpertKey, int] = {}

    def loaded(self, key: ExpertKey) -> None:
        """An arrival counts as a use, or a prefetched expert would be the first to go."""
        self.used(key)

    def used(self, key: ExpertKey) -> None:
        """``key`` is the most recent now."""
        self._clock += 1
        self._touched[key] = self._clock

    def forgotten(self, key: ExpertKey) -> None:
        """``key`` has no slot any more."""
        self._touched.pop(key, None)

    def victim(self, candidates: Sequence[ExpertKey]) -> ExpertKey:
        """The least recently touched; ties (never touched) go to the lowest id."""
        return min(candidates, key=lambda key: (self._touched.get(key, 0), key))


class LFU:
    """Forgets the expert with the fewest uses so far in this request, counted also while it was absent.

    Ties go to the one used longer ago, then to the lowest id.

    >>> lfu = LFU(); lfu.used(ExpertKey(0, 1)); lfu.used(ExpertKey(0, 1)); lfu.used(ExpertKey(0, 2))
    >>> lfu.victim([ExpertKey(0, 1), ExpertKey(0, 2)])
    ExpertKey(layer=0, expert=2)
    """

    name = "LFU"

    def __init__(self) -> None:
        self._uses: Counter[ExpertKey] = Counter()
        self._recent = LRU()

    def loaded(self, key: ExpertKey) -> None:
        """An arrival is no use, but breaks ties as the most recent."""
        self._recent.loaded(key)

    def used(self, key: ExpertKey) -> None:
        """One use more."""
        self._uses[key] += 1
        self._recent.used(key)

    def forgotten(self, key: ExpertKey) -> None:
        """The count stays: an expert that comes back is known."""
        self._recent.forgotten(key)

    def victim(self, candidates: Sequence[ExpertKey]) -> ExpertKey:
        """The least used."""
        fewest = min(self._uses[key] for key in candidates)
        return self._recent.victim([key for key in candidates if self._uses[key] == fewest])
