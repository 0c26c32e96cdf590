"""Miss curves against LRU itself, and the division of slots against every division."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specter_lab.offload.slot_curves import divide_slots, miss_curves


def lru_misses(picks, slots):
    """Events of one expert at a time: the plain algorithm."""
    cache, misses = [], 0
    for pick in picks:
        misses += pick not in cache
        cache = [pick, *(e for e in cache if e != pick)][:slots]
    return misses


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_one_pass_gives_what_lru_gives_for_every_number_of_slots(picks):
    text = SimpleNamespace(experts=torch.tensor(picks)[:, None, None], expert_counts=(6,))
    assert miss_curves([text])[0].tolist() == [lru_misses(picks, slots) for slots in range(7)]


def test_the_tokens_of_a_window_are_one_event():
    text = SimpleNamespace(experts=torch.tensor([[[0]], [[1]], [[0]], [[1]], [[2]], [[-1]]]), expert_counts=(3,))
    assert miss_curves([text], window=2)[0].tolist() == [5, 4, 3, 3]


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=2, max_size=3), st.integers(3, 9))
def test_convex_curves_are_divided_as_well_as_can_be(drops, total):
    curves = [np.array([30, *(30 - np.cumsum(sorted(drop, reverse=True)))]) for drop in drops]
    total = min(total, 3 * len(curves))
    found = divide_slots(curves, total)
    assert sum(found) == total and min(found) >= 1
    every = (s for s in itertools.product(range(1, 4), repeat=len(curves)) if sum(s) == total)
    assert sum(c[n] for c, n in zip(curves, found, strict=True)) == min(sum(c[n] for c, n in zip(curves, s, strict=True)) for s in every)


def test_a_cliff_is_seen_from_afar():
    assert divide_slots([np.array([9, 8, 8, 8, 0]), np.array([9, 8, 7, 7, 7])], total=5) == [4, 1]


def test_too_little_is_refused():
    with pytest.raises(ValueError, match="2 layers needs at least one slot; got 1"):
        divide_slots([np.array([1, 0])] * 2, 1)
    with pytest.raises(ValueError, match="got 0 texts and window=1"):
        miss_curves([])
