"""Which resident expert to forget. Forgetting is free: the host keeps everything, nothing is copied back."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from specter_lab.pieces import DeviceView
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
        self._order: dict[int, dict[ExpertKey, None]] = defaultdict(dict)  # by layer, the longest untouched first

    def loaded(self, key: ExpertKey) -> None:
        """An arrival counts as a use, or a prefetched expert would be the first to go."""
        self.used(key)

    def used(self, key: ExpertKey) -> None:
        """``key`` is the most recent now."""
        order = self._order[key.layer]
        order.pop(key, None)
        order[key] = None

    def forgotten(self, key: ExpertKey) -> None:
        """``key`` has no slot any more."""
        self._order[key.layer].pop(key, None)

    def victim(self, candidates: Sequence[ExpertKey]) -> ExpertKey:
        """The least recently touched; one that never was goes first, the lowest id of several."""
        order = self._order[candidates[0].layer]
        untouched = [key for key in candidates if key not in order]
        return min(untouched) if untouched else next(key for key in order if key in candidates)


class ClairvoyantEviction:
    """Forgets the expert whose next use is farthest, from a plan of the future: a bound, not a method.

    ``uses[layer]``: for each coming call of that layer, in order, the experts it needs. ``advance`` is told by ``used``:
    the calls of a layer are over one by one as their experts are used.

    Source: Belady, "A study of replacement algorithms for a virtual-storage computer" (1966).

    >>> policy = ClairvoyantEviction([[{1}, {2}, {1}]])
    >>> policy.victim([ExpertKey(0, 1), ExpertKey(0, 2)])
    ExpertKey(layer=0, expert=2)
    """

    name = "clairvoyant"

    def __init__(self, uses: Sequence[Sequence[Collection[int]]]) -> None:
        self.uses = uses
        self._call = [0] * len(uses)
        self._left = [set(calls[0]) if calls else set() for calls in uses]

    def loaded(self, key: ExpertKey) -> None:
        """An arrival changes nothing."""

    def used(self, key: ExpertKey) -> None:
        """A call is over when all of its experts have been used."""
        left = self._left[key.layer]
        left.discard(key.expert)
        if not left:
            self._call[key.layer] += 1
            calls = self.uses[key.layer]
            self._left[key.layer] = set(calls[self._call[key.layer]]) if self._call[key.layer] < len(calls) else set()

    def forgotten(self, key: ExpertKey) -> None:
        """Neither does an eviction."""

    def victim(self, candidates: Sequence[ExpertKey]) -> ExpertKey:
        """The one used last or never again; ties go to the highest id."""

        def next_use(key: ExpertKey) -> int:
            begin, calls = self._call[key.layer], self.uses[key.layer]
            if key.expert in self._left[key.layer]:
                return begin
            return next((i for i in range(begin + 1, len(calls)) if key.expert in calls[i]), len(calls))

        return max(candidates, key=lambda key: (next_use(key), key))


class LookaheadLRU(LRU):
    """LRU among the experts that no current prediction wants, then among the wanted.

    Source: MoE-SpeQ (arXiv 2511.14102), eviction aware of the lookahead buffer.

    >>> policy = LookaheadLRU(); policy.bind(None)
    >>> policy.victim([ExpertKey(0, 1), ExpertKey(0, 2)])
    ExpertKey(layer=0, expert=1)
    """

    name = "lookahead-aware LRU"

    def bind(self, view: DeviceView | None) -> None:
        """Given by the pipeline: what is wanted."""
        self._view = view

    def victim(self, candidates: Sequence[ExpertKey]) -> ExpertKey:
        """The least recent of the unwanted."""
        unwanted = [key for key in candidates if self._view is None or not self._view.wanted(key)]
        return super().victim(unwanted or candidates)


class LFU:
    """Forgets the expert with the fewest uses so far in this request, counted also while it was absent.

    Ties go to the one used longer ago, then to the lowest id.

    >>> lfu = LFU(); lfu.used(ExpertKey(0, 1)); lfu.used(ExpertKey(0, 1)); lfu.used(ExpertKey(0, 2))
    >>> lfu.victim([ExpertKey(0, 1), ExpertKey(0, 2)])
    ExpertKey(layer=0, expert=2)
    """

    name = "LFU"

    def __init__(self) -> None:
        self.new_request()

    def new_request(self) -> None:
        """Nothing has been used yet."""
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
