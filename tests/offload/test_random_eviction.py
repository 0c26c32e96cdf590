"""Whatever order experts are forgotten in, none is while a layer call may still use it."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.invariants import check_trace
from tests.toy import ToyRun, ToyStore, call


class AnyOrder:
    """Forgets whatever its dice say."""

    name = "any order"

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def loaded(self, key):
        pass

    used = forgotten = loaded

    def victim(self, candidates):
        return self.dice.choice(sorted(candidates))


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4), min_size=1, max_size=6),
    st.lists(st.tuples(st.just(0), st.integers(0, 5)), max_size=6),
)
def test_a_slot_is_never_reused_within_a_call_that_was_promised_it(seed, slots, passes, predicted):
    """Case 21: the toy checks an expert's bytes when they are used, and a forgotten slot is overwritten at once."""
    run = ToyRun(ToyStore(1, 6), [slots], eviction=AnyOrder(seed), poison=True)
    for step, rows in enumerate(passes):
        run.want(step, *predicted)
        run.run_pass(step, [call(0, *rows)])
    assert len(run.served) == sum(len({e for row in rows for e in row}) for rows in passes)
    check_trace(run.finish(), [slots], [64])
