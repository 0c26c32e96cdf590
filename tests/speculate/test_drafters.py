"""Prompt lookup and draft lengths: no model needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specter_lab.speculate.draft_length import FixedLength, HeuristicLength
from specter_lab.speculate.drafters import PromptLookupDrafter


@pytest.mark.parametrize(
    ("ids", "most", "expected"),
    [
        ([1, 2, 3, 1, 2], 2, [3, 1]),
        ([1, 2, 9, 1, 2, 8, 1, 2], 1, [8]),  # the latest occurrence
        ([5, 6, 7], 3, []),
        ([4], 3, []),
        ([4, 4], 3, [4]),
        ([1, 2, 3], 0, []),
    ],
)
def test_lookup(ids, most, expected):
    assert PromptLookupDrafter(ngram=2).continuation(ids, most) == expected


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(0, 6), st.integers(1, 4))
def test_a_lookup_is_a_copy_from_the_text(ids, most, ngram):
    found = PromptLookupDrafter(ngram).continuation(ids, most)
    assert len(found) <= most
    text = "".join(map(str, ids))
    assert "".join(map(str, found)) in text


def test_bad_numbers_are_refused():
    for build in (lambda: PromptLookupDrafter(0), lambda: FixedLength(-1), lambda: HeuristicLength(0)):
        with pytest.raises(ValueError, match="got"):
            build()


def test_lengths_never_pass_what_is_left():
    assert FixedLength(8).choose(1, most=3) == 3
    length = HeuristicLength(5)
    length.learn(5, 5)
    length.learn(7, 3)
    length.learn(0, 0)
    assert [length.choose(2, most=20), length.choose(3, most=0)] == [6, 0]
