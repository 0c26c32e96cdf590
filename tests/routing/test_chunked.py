"""Specter's chunk schedule, written out for K = 8 on a toy model of two layers, six experts, two slots."""

import pytest
import torch

from specter_lab.records import DraftToken, ExpertKey, Routing
from specter_lab.routing.chunked import ChunkedLookahead


class View:
    """Two slots a layer, everything absent but what is listed, 100-byte experts, a link of 1 byte/us, a draft step of 50 us."""

    def __init__(self, resident=()):
        self.resident, self.time = {ExpertKey(*k) for k in resident}, 0.0

    def slots(self, layer):
        return 2

    def absent(self, key):
        return key not in self.resident

    def blob_bytes(self, layer):
        return 100

    def now_us(self):
        return self.time

    def link_rate(self):
        return 1.0


# what the draft routes to at each of its 8 steps: layer 0, layer 1
STEPS = [
    ((0, 1), (3, 4)),
    ((0, 2), (3, 5)),
    ((0, 1), (4, 3)),
    ((1, 0), (3, 4)),
    ((5, 0), (2, 3)),
    ((0, 1), (3, 2)),
    ((4, 5), (3, 1)),
    ((0, 1), (3, 4)),
]


def plans(schedule, view, length=8):
    """{draft step: [(layer, expert), ...] in the order of the plan}"""
    predictor = ChunkedLookahead(schedule, first_draft_us=50.0)
    predictor.bind(view)
    assert list(predictor.step_begins(1, 10, length)) == []
    out = {}
    for horizon, layers in enumerate(STEPS[:length]):
        view.time += 50.0
        routing = Routing(10 + horizon, tuple(torch.tensor([picked]) for picked in layers), ())
        plan = list(predictor.drafted(1, DraftToken(0, 10 + horizon, routing=routing), horizon))
        if plan:
            out[horizon + 1] = [tuple(p.key) for p in plan]
    return out


def test_adaptive():
    """b0 = max(1, floor(1.6)) = 1: counts 0:{0,1}, 1:{3,4}, all four fill M = 2, so planning is over."""
    assert plans("adaptive", View()) == {1: [(0, 0), (0, 1), (1, 3), (1, 4)]}


def test_adaptive_waits_for_the_chunk_and_plans_again():
    """One expert a layer and step: the plan isn't full at b0, two new experts are 200 bytes = 200 us = 4 draft steps."""
    single = [((e, e), (3, 3)) for e in (0, 1, 0, 2, 1, 1, 0, 0)]
    global STEPS
    before, STEPS = STEPS, single
    try:
        got = plans("adaptive", View())
    finally:
        STEPS = before
    # at 1: {0}, {3}; next boundary 1 + ceil(200/50) = 5; at 5: layer 0 has 0 x4, 1 x4, 2 x2 -> 0, 1; layer 1 only 3: not full;
    # one new expert = 100 bytes = 2 steps: boundary 7; at 7: 1 x6, 0 x6 -> tie to the lower id; then 8 is the end
    assert got == {1: [(0, 0), (1, 3)], 5: [(0, 0), (0, 1), (1, 3)], 7: [(0, 0), (0, 1), (1, 3)]}


def test_residents_cost_no_bytes_and_are_planned_all_the_same():
    view = View(resident=[(0, 0), (0, 1), (1, 3), (1, 4)])
    assert plans("adaptive", view) == {1: [(0, 0), (0, 1), (1, 3), (1, 4)]}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("none", {}),
        ("early", {1: [(0, 0), (0, 1), (1, 3), (1, 4)]}),
        ("late", {8: [(0, 0), (0, 1), (1, 3), (1, 4)]}),
        ((0.2, 0.6), {2: [(0, 0), (0, 1), (1, 3), (1, 4)], 5: [(0, 0), (0, 1), (1, 3), (1, 4)]}),
    ],
)
def test_the_other_schedules(schedule, expected):
    assert plans(schedule, View()) == expected


def test_a_wrong_schedule_is_refused():
    with pytest.raises(ValueError, match="adaptive, none, early, late"):
        ChunkedLookahead("eager")
