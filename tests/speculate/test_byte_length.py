"""Draft length by bytes: what it has seen decides."""

import pytest

import specter_lab as sl
from specter_lab.speculate.byte_length import ByteLength


class Device:
    """A step: ``draft_us`` a token, ``adds_us`` of missing experts each, verification takes ``pass_us`` and what is missing."""

    def __init__(self, draft_us, adds_us, pass_us):
        self.draft_us, self.adds_us, self.pass_us, self.now, self.missing = draft_us, adds_us, pass_us, 0.0, 0.0

    def now_us(self):
        return self.now

    def missing_us(self):
        return self.missing

    def step(self, length, step, accept):
        limit, drafted = length.choose(step, 100), 0
        while drafted < limit:
            self.now, self.missing, drafted = self.now + self.draft_us, self.missing + self.adds_us, drafted + 1
            if not length.go_on(drafted):
                break
        self.now += self.pass_us + self.missing
        self.missing = 0.0
        length.learn(drafted, min(drafted, accept))
        return drafted


def lengths(device, accept, steps=40, **options):
    length = ByteLength(**options)
    length.bind(device)
    return [device.step(length, step, accept) for step in range(1, steps + 1)]


def test_cheap_good_drafts_grow_long():
    assert lengths(Device(draft_us=10, adds_us=0, pass_us=10_000), accept=100)[-1] == 8


def test_drafts_end_where_they_stop_being_accepted():
    late = lengths(Device(draft_us=1_000, adds_us=1_000, pass_us=5_000), accept=2)[-10:]
    assert 1 <= max(late) <= 3


def test_no_drafts_when_none_is_accepted_and_bytes_cost():
    late = lengths(Device(draft_us=5_000, adds_us=20_000, pass_us=5_000), accept=0)[-15:]
    assert late.count(0) >= 13  # now and then one is tried


def test_a_request_begins_as_if_it_were_the_first():
    length, device = ByteLength(), Device(10, 0, 10_000)
    length.bind(device)
    first = [device.step(length, step, 100) for step in range(1, 9)]
    length.new_request()
    device.now = 0.0
    assert [device.step(length, step, 100) for step in range(1, 9)] == first


def test_it_stops_drafting_early_in_a_pipeline():
    with sl.load_moe("tiny-moe", dtype="float32") as moe:
        options = {"machine": sl.SimulatedMachine(0.02), "slots": 4, "predictor": sl.DraftLookahead()}
        with sl.Pipeline(moe, drafter=sl.SelfDrafter(moe.quantize("qint2")), draft_length=ByteLength(), **options) as pipeline:
            run = pipeline.generate(sl.load_prompts("code")[0].text, max_new_tokens=48, do_sample=False)
    drafted = run.trace.of_kind("draft_length")["value"]
    assert len(set(drafted)) > 1 and len(run.new_ids) == 48


def test_a_longest_draft_of_0_drafts_nothing():
    assert lengths(Device(draft_us=10, adds_us=0, pass_us=10_000), accept=100, steps=8, longest=0, first=0) == [0] * 8


def test_impossible_lengths_are_refused():
    with pytest.raises(ValueError, match="first=9, longest=8"):
        ByteLength(first=9)


def test_the_first_drafts_have_unlike_lengths():
    assert lengths(Device(draft_us=1_000, adds_us=1_000, pass_us=5_000), accept=2, steps=4) == [4, 8, 2, 6]
    assert lengths(Device(draft_us=1_000, adds_us=1_000, pass_us=5_000), accept=2, steps=4, longest=3, first=3) == [3, 3, 1, 3]


def test_a_draft_that_lacks_less_than_usual_ends_before_the_costly_tokens():
    """Each token adds 900 us as a rule: eight are best. Two that add nothing are better off without a third."""
    length, device = ByteLength(), Device(draft_us=200, adds_us=900, pass_us=2_000)
    length.bind(device)
    assert [device.step(length, step, accept=100) for step in range(1, 13)][-1] == 8
    assert length.choose(13, 100) == 8
    device.now += 200
    assert length.go_on(1)
    device.now += 200
    assert not length.go_on(2)


def test_what_is_ready_takes_no_time():
    """A costly draft is worth one or two tokens; eight that are there already are all verified."""
    length, device = ByteLength(), Device(draft_us=4_000, adds_us=0, pass_us=4_000)
    length.bind(device)
    short = [device.step(length, step, accept=2) for step in range(1, 30)][-1]
    assert short <= 2
    length.handed(5)
    assert length.choose(30, 100) == 5
    length.handed(0)
    assert length.choose(31, 100) == short


def test_expected_tokens_by_hand():
    length = ByteLength()
    assert length.expected_tokens(2) == pytest.approx(1 + 0.9 + 0.9**2)
    length.learn(drafted=2, accepted=1)  # positions 1 and 2 were judged, 1 held: 0.9 x 16 of 16 becomes 15.4 of 18
    pooled = 15.4 / 18
    first, second = (pooled * 40 + 1) / 41, pooled * 40 / 41
    assert length.expected_tokens(2) == pytest.approx(1 + first + first * second)


def test_the_fit_finds_what_a_step_and_what_each_token_takes():
    class Wider(Device):
        """Each drafted token also makes the verification 500 us longer."""

        def step(self, length, step, accept):
            limit = length.choose(step, 100)
            for drafted in range(1, limit + 1):
                self.now, self.missing = self.now + self.draft_us, self.missing + self.adds_us
                length.go_on(drafted)
            self.now += self.pass_us + self.missing + 500 * limit
            self.missing = 0.0
            length.learn(limit, min(limit, accept))

    length, device = ByteLength(), Wider(draft_us=100, adds_us=300, pass_us=5_000)
    length.bind(device)
    for step in range(1, 5):
        device.step(length, step, accept=100)
    assert length.verify_us(600.0, 2) == pytest.approx(5_000 + 600 + 1_000, rel=0.01)
    assert length.verify_us(0.0, 0) == pytest.approx(5_000, rel=0.01)


def test_what_a_cold_cache_lacked_is_forgotten_at_positions_that_are_not_drafted():
    length, device = ByteLength(smoothing=0.5), Device(draft_us=100, adds_us=1_000, pass_us=5_000)
    length.bind(device)
    for step in range(1, 5):
        device.step(length, step, accept=3)
    device.adds_us = 0.0
    assert device.step(length, 5, accept=3) in range(1, 8)
    assert length._adds[7] == pytest.approx(500)  # halved with the last position that was drafted
