"""Bounds: worked out by hand, against brute force, and never beaten by any run."""

import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_lab import baselines
from specter_lab.bounds import clairvoyant_loads, oracle_bound, schedule_bound
from specter_lab.machines.simulated import CostTable, LaneCosts, SimulatedMachine
from specter_lab.offload.eviction import LFU, LRU, ClairvoyantEviction, LookaheadLRU
from specter_lab.offload.misses import AlwaysHost, SplitByFinish
from specter_lab.offload.server import OffloadServer
from specter_lab.records import ExpertKey, Geometry, Prediction
from specter_lab.replay import ReplayTarget
from specter_lab.speculate.governor import Governor
from tests.toy import ToyRun, ToyStore, call

COSTS = CostTable(LaneCosts(attention_us=10, expert_us=5, expert_row_us=1, head_us=3, plan_us=2), LaneCosts(attention_us=2, expert_us=1))


# --- the least number of loads -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "slots", "residents", "loads"),
    [
        ([{1, 2, 3}], 1, (), 3),  # in waves, each once
        ([{1}, {2}, {1}], 1, (), 2),  # 1 stays while 2 passes by; without bypass it would be 3
        ([{1}, {2}, {1}, {2}], 1, (), 3),  # only one of the two can stay
        ([{1}, {2}, {1}, {2}], 2, (), 2),
        ([{1, 2}, {1, 2}, {3}, {2}], 1, (), 4),  # 6 uses; 2 stays all the time and is free twice
        ([{1}, {2}, {3}, {1}, {2}, {3}], 2, (), 4),
        ([{1}, {2}], 1, (2,), 1),
        ([{1}, {2}], 1, (1, 2), 1),  # either may have been there, not both
        ([{1}, {1}], 0, (1,), 2),
        ([set(), {1}, set(), {1}], 1, (), 1),
        ([], 3, (), 0),
    ],
)
def test_loads_by_hand(events, slots, residents, loads):
    assert clairvoyant_loads(events, slots, residents) == loads


def fewest_over_all_states(events, slots, residents):
    """Dynamic programming over every possible content of the slots."""

    def contents(available):
        return {frozenset(c) for n in range(min(slots, len(available)) + 1) for c in itertools.combinations(sorted(available), n)}

    states = dict.fromkeys(contents(residents), 0)
    for event in events:
        after = {}
        for state, loads in states.items():
            for kept in contents(state | event):
                after[kept] = min(after.get(kept, loads + len(event - state)), loads + len(event - state))
        states = after
    return min(states.values())


sets_of_experts = st.frozensets(st.integers(0, 4), max_size=4)


@settings(max_examples=150, deadline=None)
@given(st.lists(sets_of_experts, max_size=6), st.integers(0, 3), sets_of_experts)
def test_no_contents_of_the_slots_need_fewer_loads(events, slots, residents):
    assert clairvoyant_loads(events, slots, residents) == fewest_over_all_states(events, slots, residents)


@given(st.lists(sets_of_experts, min_size=2, max_size=12), st.integers(0, 4), st.data())
def test_merged_calls_never_need_more(events, slots, data):
    """Why a longer window saves bytes, and why no shorter one can save more."""
    at = data.draw(st.integers(0, len(events) - 2))
    merged = [*events[:at], events[at] | events[at + 1], *events[at + 2 :]]
    assert clairvoyant_loads(merged, slots) <= clairvoyant_loads(events, slots)


def test_a_long_replay_takes_well_under_a_second():
    routing = np.random.default_rng(0).integers(0, 64, (26, 128, 6))
    begin = time.perf_counter()
    loads = sum(clairvoyant_loads([set(row) for row in layer], 16) for layer in routing.tolist())
    assert 26 * 64 < loads < 26 * 128 * 6 and time.perf_counter() - begin < 0.5


def test_a_negative_number_of_slots_is_refused():
    with pytest.raises(ValueError, match="or more; got -1"):
        clairvoyant_loads([{1}], -1)


# --- one run -------------------------------------------------------------------------------------------------------------


class Decoded(ToyRun):
    """A toy run whose passes commit one token each, the misses split between link and host as asked."""

    def decode(self, step, calls, ahead=None, split=None):
        predict = lambda c: [Prediction(step, 0, ExpertKey(*key), 1.0) for key in (ahead or {}).get(c.layer, ())]  # noqa: E731
        server = OffloadServer(self.prefetcher, self.machine, step, 0, predict, split)
        for layer_call in calls:
            server.serve(layer_call, lambda expert, weights: None)
        self.machine.compute("target", "head", step=step, tokens=1)
        self.prefetcher.cancel(step, "decided")
        self.machine.mark("commit", step=step, tokens=1, outcome="step" if step else "first")


def two_token_run():
    """Attention 10 us, an expert 5, the head 3, a copy 20; two slots in the only layer."""
    run = Decoded(ToyStore(1, 4), [2])
    run.decode(0, [call(0, [0, 1])])
    run.decode(1, [call(0, [2, 3], [1, 1])])
    return run.finish()


def test_schedule_bound_by_hand():
    """Step 1: 10 us of attention; 1 is resident (5 us), 2 arrives 20 us after it was asked for, 3 another 20 later; head."""
    bound = schedule_bound(two_token_run(), slots=2, blob_bytes=64, link_gb_s=64 / 20_000)
    assert bound.tpot_ms == pytest.approx(0.058)  # 10 + 2 x 20 + 5 + 3
    assert bound.compute_ms == pytest.approx(0.028)  # 10 + 3 x 5 + 3
    assert bound.loads == 1 and bound.link_ms == pytest.approx(0.020)  # of three experts two may have been there
    assert bound.ms_per_token == bound.compute_ms and bound.share == pytest.approx(28 / 58)


def test_schedule_bound_with_latency_and_host_by_hand():
    options = {"slots": 1, "blob_bytes": 64, "link_gb_s": 64 / 20_000, "latency_us": 10.0}
    bound = schedule_bound(two_token_run(), **options)
    assert bound.loads == 2 and bound.link_ms == pytest.approx(0.060)  # each 20 us and 10 of latency
    with_host = schedule_bound(two_token_run(), **options, host_gb_s=64 / 15_000)
    assert with_host.loads == 2 and with_host.link_ms == pytest.approx(0.020)  # 2/3 on the link at 30, 4/3 on the host at 15


def test_a_shared_pool_is_never_a_tighter_bound():
    run = Decoded(ToyStore(2, 3), [1, 2])
    for step in range(3):
        run.decode(step, [call(0, [0, 1]), call(1, [2, 2])])
    options = {"slots": (1, 2), "blob_bytes": 64, "link_gb_s": 64 / 20_000}
    trace = run.finish()
    assert schedule_bound(trace, **options).loads == 2  # layer 0 lacks a slot
    assert schedule_bound(trace, **options, shared=True).loads == 0  # layer 1 has one too many


def test_bounds_that_cannot_be_are_refused():
    trace, options = two_token_run(), {"slots": 2, "blob_bytes": 64, "link_gb_s": 1.0}
    one_token = Decoded(ToyStore(1, 4), [2])
    one_token.decode(0, [call(0, [0, 1])])
    with pytest.raises(ValueError, match="at least two tokens; this one committed 1"):
        schedule_bound(one_token.finish(), **options)
    with pytest.raises(ValueError, match=r"each of 1 MoE layers.*got slots=\(2, 2\)"):
        schedule_bound(trace, **{**options, "slots": (2, 2)})
    with pytest.raises(ValueError, match="got 0 and None GB/s"):
        schedule_bound(trace, **{**options, "link_gb_s": 0})
    hosted = Decoded(ToyStore(1, 4), [2])
    for step in range(2):
        hosted.decode(step, [call(0, [0, 1])], split=AlwaysHost())
    with pytest.raises(ValueError, match=r"host computed \d misses"):
        schedule_bound(hosted.finish(), **options)
    with pytest.raises(ValueError, match="same bytes for all"):
        oracle_bound(np.zeros((1, 2, 1), dtype=int), slots=1, blob_bytes=(64, 128), link_gb_s=1.0, shared=True)
    with pytest.raises(ValueError, match=r"got \(0, 1, 2\) and 0"):
        oracle_bound(np.zeros((0, 1, 2), dtype=int), slots=1, blob_bytes=64, link_gb_s=1.0)


POLICIES = [lambda uses: LRU(), lambda uses: LFU(), lambda uses: LookaheadLRU(), ClairvoyantEviction]


@st.composite
def random_runs(draw):
    layers, experts = draw(st.integers(1, 2)), draw(st.integers(2, 5))
    expert = st.integers(0, experts - 1)
    key = st.tuples(st.integers(0, layers - 1), expert)
    rows = st.lists(st.lists(expert, min_size=2, max_size=2), min_size=1, max_size=3)
    one_pass = st.tuples(
        st.lists(key, max_size=5),
        st.lists(rows, min_size=layers, max_size=layers),
        st.dictionaries(st.integers(0, layers - 1), st.lists(key, max_size=3), max_size=2),
    )
    slots = draw(st.lists(st.integers(1, experts), min_size=layers, max_size=layers))
    return slots, experts, draw(st.lists(one_pass, min_size=2, max_size=5)), draw(st.sampled_from([0.001, 0.004, 0.02]))


@settings(max_examples=60, deadline=None)
@given(random_runs(), st.sampled_from(POLICIES), st.sampled_from([None, SplitByFinish(), AlwaysHost()]))
def test_no_run_beats_its_schedule_bound(case, policy, split):
    slots, experts, passes, link_gb_s = case
    layers = len(slots)
    eviction = policy([[{e for row in rows[layer] for e in row} for _, rows, _ in passes] for layer in range(layers)])
    machine = SimulatedMachine(link_gb_s, latency_us=1, costs=COSTS)
    run = Decoded(ToyStore(layers, experts), slots, machine, eviction)
    if hasattr(eviction, "bind"):
        eviction.bind(run.prefetcher)
    for step, (predicted, rows, ahead) in enumerate(passes):
        run.want(step, *predicted)
        machine.compute("draft", "attention", step=step, tokens=1)
        run.decode(step, [call(layer, *positions) for layer, positions in enumerate(rows)], ahead, split)
    trace = run.finish()
    host_gb_s = None if split is None else machine.host_gb_s
    for shared in (False, True):
        bound = schedule_bound(trace, slots=slots, blob_bytes=64, link_gb_s=link_gb_s, latency_us=1, host_gb_s=host_gb_s, shared=shared)
        assert bound.share <= 1 + 1e-9


# --- a text, whatever runs it --------------------------------------------------------------------------------------------


def test_oracle_bound_by_hand():
    """Three tokens that need 0, 1, 0 from one slot: 0 may be there from the start, so 1 is loaded in 3 us, however it is cut.

    Passes of 1: 3 x (10 + 5 + 1 + 3 + 2) us. Of 3: attention 10, experts 2 x 5 and 3 rows, head and plan 5, two drafts of 3.
    """
    routing, options = np.array([[[0]], [[1]], [[0]]]), {"slots": 1, "blob_bytes": 48_000, "link_gb_s": 16.0, "costs": COSTS}
    alone = oracle_bound(routing, **options)
    assert (alone.compute_ms, alone.link_ms, alone.drafting) == (pytest.approx(0.021), pytest.approx(0.001), False)
    drafted = oracle_bound(routing, **options, draft_limit=2)
    assert (drafted.compute_ms, drafted.link_ms, drafted.drafting) == (pytest.approx(0.034 / 3), pytest.approx(0.001), True)
    of_two = 10 + 10 + 2 + 5 + 3 + 21  # a pass of two, which drafts once, and one of one
    assert drafted.lengths["compute_ms"].tolist() == pytest.approx([0.021, of_two / 3e3, 0.034 / 3])
    assert drafted.lengths.index.name == "draft_length"


def test_a_draft_that_takes_too_many_slots_is_not_used():
    routing = np.array([[[0]], [[1]], [[2]], [[0]], [[1]], [[2]]])
    options = {"blob_bytes": 1_600_000, "link_gb_s": 16.0, "costs": COSTS, "draft_limit": 1}  # a copy takes 100 us
    assert oracle_bound(routing, slots=3, **options).drafting
    poor = oracle_bound(routing, slots=3, draft_slots=1, **options)
    assert not poor.drafting and poor.link_ms == 0
    assert poor.lengths.loc[1, "link_ms"] > poor.lengths.loc[1, "compute_ms"]


routings = (
    st.integers(1, 6)
    .flatmap(lambda tokens: st.lists(st.lists(st.integers(-1, 4), min_size=4, max_size=4), min_size=tokens, max_size=tokens))
    .map(lambda rows: np.array(rows).reshape(len(rows), 2, 2))
)


@settings(max_examples=100, deadline=None)
@given(routings, st.integers(0, 3), st.lists(st.integers(1, 3), min_size=2, max_size=2), st.sampled_from([None, 8.0]), st.booleans())
def test_no_cut_of_a_text_beats_the_oracle(routing, limit, slots, host_gb_s, shared):
    """Brute force over all cuts into passes; without drafts, where there is one cut only, the bound is exact."""
    tokens = len(routing)
    options = {"slots": slots, "blob_bytes": 16_000, "link_gb_s": 4.0, "costs": COSTS, "host_gb_s": host_gb_s, "shared": shared}
    bound = oracle_bound(routing, draft_limit=limit, **options)
    used, ends = (routing >= 0).sum(axis=2), []
    for cuts in itertools.product([False, True], repeat=tokens - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), tokens]
        if max(np.diff(edges)) > limit + 1:
            continue
        needed = [[set(routing[a:b, layer].ravel()) - {-1} for a, b in itertools.pairwise(edges)] for layer in range(2)]
        if shared:
            pooled = [{(layer, e) for e in event} for events in zip(*needed, strict=True) for layer, event in enumerate(events)]
            loads = clairvoyant_loads(pooled, sum(slots), set().union(*pooled))
        else:
            loads = sum(clairvoyant_loads(events, n, set().union(*events)) for events, n in zip(needed, slots, strict=True))
        uses = sum(len(event) for events in needed for event in events)
        others = sum(2 * 10 + 3 + 2 + (b - a - 1) * (2 * 2 + used.min(axis=0).sum()) for a, b in itertools.pairwise(edges))
        compute, link = others + 5 * uses + used.sum(), 4 * loads
        if host_gb_s is not None:  # a copy takes 4 us, a use on the device 6 at least, on the host 2: any number may run there
            compute = min(max(others + 6 * (uses - n), 2 * n) for n in range(uses + 1))
            link = min(max(4 * (loads - n), 2 * n) for n in range(loads + 1))
        ends.append((compute, link))
    least = [min(max(parts) for parts in ends), min(compute for compute, _ in ends), min(link for _, link in ends)]
    got = [us * tokens * 1e3 for us in (bound.ms_per_token, bound.compute_ms, bound.link_ms)]
    assert got[0] <= least[0] + 1e-6
    if limit == 0 and host_gb_s is None and not shared:
        assert got == pytest.approx(least)


class TinyText:
    """A random text of two layers: a draft that is often right, in its tokens and in its routing."""

    def __init__(self, seed, tokens, experts, width):
        rng = np.random.default_rng(seed)
        rows = (tokens, 2, width)
        self.experts, self.gate, self._drafted, self._wrong = rng.permuted(np.tile(np.arange(experts), (4, *rows[:2], 1)), axis=-1)[
            ..., :width
        ]
        self._alike, self._holds = rng.random((2, tokens, tokens)) < 0.7

    def window(self, start, length):
        length = min(length, len(self.experts) - 1 - start)
        places = np.arange(start, start + length)
        draft = np.where(self._alike[start, places, None, None], self.experts[places], self._drafted[places])
        accepted = int(np.append(self._holds[start, places], False).argmin())
        strayed = (np.arange(length + 1) > accepted)[:, None, None]
        needed = np.where(strayed, self._wrong[start : start + length + 1], self.experts[start : start + length + 1])
        return SimpleNamespace(draft=draft, needed=needed, accepted=accepted)


@pytest.mark.parametrize("name", baselines.SYSTEMS)
@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(2, 9), st.integers(1, 3), st.integers(0, 3),
    st.lists(st.integers(1, 4), min_size=2, max_size=2), st.sampled_from([0.5, 4.0, 32.0]),
)  # fmt: skip
def test_no_system_beats_the_oracle(name, seed, new_tokens, width, limit, slots, link_gb_s):
    text = TinyText(seed, 4 + new_tokens, 5, width)
    geometry = Geometry("tiny", (0, 1), 0, (5, 5), width, 8, 100, 64, (16_000, 32_000), 0, 0, 0)
    machine = SimulatedMachine(link_gb_s, latency_us=1, costs=COSTS)
    options = {"library": [SimpleNamespace(experts=torch.from_numpy(text.experts))]} if name == "activation_aware" else {}
    if name not in baselines.DRAFTLESS:
        options["draft_length"] = Governor(range(limit + 1)) if name == "moe_speq" else limit
    with baselines.named(name)(ReplayTarget(geometry), machine=machine, slots=slots, **options) as pipeline:
        moved = [pipeline.prefetcher.blob_bytes(layer) for layer in range(2)]
        run = pipeline.replay(text, prompt_tokens=3, max_new_tokens=new_tokens)
    hardware = {"slots": slots, "blob_bytes": moved, "link_gb_s": link_gb_s, "latency_us": 1}
    if name in ("fiddler", "specter_plus"):
        hardware |= {"host_gb_s": machine.host_gb_s, "host_bytes": geometry.expert_bytes}
    bound = oracle_bound(text.experts[3 : 2 + new_tokens], costs=COSTS, draft_limit=limit, **hardware)
    of_this_run = schedule_bound(run.trace, **hardware)
    assert bound.ms_per_token <= run.metrics["tpot_ms"] * (1 + 1e-9) and of_this_run.share <= 1 + 1e-9
    assert bound.link_ms <= of_this_run.link_ms + 1e-9, "true tokens need no more than the run's windows with their rejected rows"
