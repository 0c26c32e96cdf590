"""Generated routing is deterministic, well-formed, and like the published figures; what isn't like them is listed."""

import dataclasses
from types import SimpleNamespace as Shape

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_lab.routing.likeness import POLICIES, cache_hits, measure
from specter_lab.routing.statistics import PRESETS, RoutingStatistics, statistics_named
from specter_lab.routing.synthetic import SyntheticRouting
from specter_lab.routing.synthetic_text import LONGEST_DRAFT

SHAPES = {  # experts, experts a token, as the models have; 7 layers stand for all of them
    "deepseek_like": (64, 6), "qwen_like": (60, 4), "mixtral_like": (8, 2),
    "phi_like": (16, 2), "qwen3_like": (128, 8), "olmoe_like": (64, 8),
}  # fmt: skip
TEXTS = {"mixtral_like": 8, "phi_like": 6}  # narrow layers are cheap, and noisy
TOLERANCE = {  # relative, of what three or more texts of 512 tokens show
    "adjacent": 0.03, "union": 0.06, "segment": 0.05, "lru": 0.12, "lfu": 0.11, "oracle": 0.11, "clairvoyant": 0.04, "first": 0.12,
    "draft": 0.02, "set": 0.10, "acceptance": 0.0, "gate": 0.0,
}  # fmt: skip
# What no setting gives together, as a share of the published figure.
# Full matches: with the published recalls, sets of 2 agree more often than in 44 %, sets of 6 and 8 less often.
# Caches: published for a model of another kind (64 experts, 8 a token, higher segment score). DeepSeek- and Qwen-like routing
# has less of what stays for a text, which is what LFU lives on; Qwen's even popularity leaves it least.
# Qwen's segment score of 0.307 asks for reuse below 0.39; Qwen3's of 0.541 for unions below 0.76.
MISSES = {
    "deepseek_like": {"lfu_1": -0.23, "lfu_2": -0.12, "oracle_16_1": -0.13, "set_match_full": -0.36},
    "qwen_like": {
        "lfu_1": -0.45, "lfu_2": -0.33, "lfu_3": -0.27, "lru_1": 0.22, "oracle_16_1": -0.13,
        "segment_score_16": 0.13, "set_match_full": -0.16,
    },
    "mixtral_like": {"set_match_full": 0.26},
    "phi_like": {"set_match_full": 0.24},
    "qwen3_like": {"union_4": -0.14, "set_match_full": -0.52},
    "olmoe_like": {"set_match_full": -0.52},
}  # fmt: skip


def routing(name, layers=7, seed=0):
    """A preset on its own shape."""
    experts, ranks = SHAPES[name]
    return SyntheticRouting(Shape(layers=layers, experts=experts, experts_per_token=ranks), name, seed=seed)


def off(row):
    """Relative distance from the published range, signed."""
    return (min(row.measured - row.low, 0) + max(row.measured - row.high, 0)) / row.low


@pytest.mark.parametrize("name", PRESETS)
def test_figures_are_as_published_but_for_the_listed_ones(name):
    router = routing(name)
    figures = measure(*(router.sample(512, seed) for seed in range(100, 100 + TEXTS.get(name, 3))), cache_layers=4)
    rows = figures.dropna(subset="low").drop("popularity_spread")  # of a few texts it is their subjects': see the next test
    surprises = {}
    for row in rows.itertuples():
        tolerance, listed = TOLERANCE[row.Index.split("_")[0]], MISSES[name].get(row.Index, 0.0)
        assert listed == 0 or abs(listed) > tolerance
        if abs(off(row) - listed) > (tolerance if listed == 0 else 0.05):
            surprises[row.Index] = round(off(row), 3)
    assert surprises == {}
    assert figures.source.notna().sum() == len(PRESETS[name].published)


@pytest.mark.parametrize("name", PRESETS)
def test_popularity_over_many_texts_differs_as_published(name):
    router, halves = routing(name, layers=4), []
    for seeds in (range(0, 160, 2), range(1, 160, 2)):
        picks = np.concatenate([router.sample(32, seed).experts for seed in seeds])
        used = np.stack([np.bincount(layer.ravel(), minlength=router.experts) for layer in picks.swapaxes(0, 1)]) / len(picks)
        halves.append(used - used.mean())
    spread = np.sqrt((halves[0] * halves[1]).mean())  # what both halves have in common is no accident of their subjects
    assert spread == pytest.approx(PRESETS[name].published["popularity_spread"].low, rel=0.2)


@pytest.mark.parametrize("name", PRESETS)
def test_reuse_and_recall_come_out_as_asked_in_every_layer(name):
    router = routing(name, layers=5)
    texts = [router.sample(150, seed) for seed in range(4 * TEXTS.get(name, 1))]
    wanted = np.interp(np.linspace(0, 1, 5), np.linspace(0, 1, len(router.statistics.adjacent_reuse)), router.statistics.adjacent_reuse)
    reuse = np.mean([shared(text.experts[:-1], text.experts[1:]).mean(0) for text in texts], 0)
    assert reuse == pytest.approx(wanted, abs=0.05)
    recall = np.mean([shared(text.experts, text.draft).mean((1, 2)) for text in texts], 0)
    assert recall == pytest.approx(router.statistics.draft_recall, abs=0.015)
    gate = np.mean([shared(text.experts, text.gate).mean(0) for text in texts], 0)
    assert gate[1:] == pytest.approx(np.linspace(0.84, 0.96, 5)[1:], abs=0.04)


@pytest.mark.parametrize("name", ["deepseek_like", "mixtral_like"])
def test_wrong_tokens_are_routed_like_any_others(name):
    text = routing(name).sample(800, seed=5)
    starts = np.flatnonzero(text.run >= 0)
    usual = shared(text.experts[:-1], text.experts[1:]).mean()
    assert text.run[starts].tolist() == list(range(len(text.strayed)))
    assert shared(text.experts[starts - 1], text.strayed[:, 0]).mean() == pytest.approx(usual, abs=0.04)  # from the right one on
    assert shared(text.strayed[:, :-1], text.strayed[:, 1:]).mean() == pytest.approx(usual, abs=0.02)
    assert shared(text.experts[starts], text.strayed[:, 0]).mean() < usual  # but it isn't the right token
    assert shared(text.strayed, text.strayed_draft).mean() == pytest.approx(0.77, abs=0.02)
    use = [np.bincount(ids[..., 3, :].ravel(), minlength=SHAPES[name][0]) / ids[..., 3, :].size for ids in (text.experts, text.strayed)]
    assert np.corrcoef(use)[0, 1] > 0.7


def shared(first, second):
    """Share of the picks in common."""
    return (first[..., :, None] == second[..., None, :]).any(-1).mean(-1)


def same(one, other):
    """Are two texts equal in everything?"""
    arrays = [name for name, value in vars(one).items() if isinstance(value, np.ndarray)]
    return len(arrays) == 8 and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)


def test_seeds_decide_everything():
    text = routing("deepseek_like", layers=2).sample(40, seed=7)
    assert same(text, routing("deepseek_like", layers=2).sample(40, seed=7))
    assert not np.array_equal(text.experts, routing("deepseek_like", layers=2).sample(40, seed=8).experts)
    assert not np.array_equal(text.experts, routing("deepseek_like", layers=2, seed=1).sample(40, seed=7).experts)


def test_popularity_belongs_to_the_router_not_to_the_text():
    def use(router, seeds):
        return np.bincount(np.concatenate([router.sample(200, s).experts[:, 0].ravel() for s in seeds]), minlength=64)

    one, other = routing("olmoe_like", layers=1), routing("olmoe_like", layers=1, seed=1)
    apart = np.corrcoef([use(one, range(8)), use(one, range(8, 16)), use(other, range(8))])
    assert apart[0, 1] > 0.6 > 0.4 > abs(apart[0, 2])


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_shape_gives_a_well_formed_text(data):
    experts = data.draw(st.integers(4, 40), "experts")
    ranks = data.draw(st.integers(1, experts // 2), "ranks")
    layers, tokens = data.draw(st.integers(1, 4), "layers"), data.draw(st.integers(1, 40), "tokens")
    chance = ranks / experts
    statistics = RoutingStatistics(
        "any", (chance + 0.3 * (1 - chance), chance + 0.5 * (1 - chance)), 0.02, 0.05, data.draw(st.sampled_from([0.0, 0.1]), "topic"),
        draft_recall=(1.0, chance + 0.8 * (1 - chance)), acceptance=(0.9, 0.8, 0.7), gate_recall=(chance + 0.7 * (1 - chance),),
    )  # fmt: skip
    shape = Shape(layers=layers, experts=(experts,) * layers, experts_per_token=ranks)
    text = SyntheticRouting(shape, statistics).sample(tokens, data.draw(st.integers(0, 99), "seed"))
    assert text.experts.shape == (tokens, layers, ranks) and text.draft.shape == (3, tokens, layers, ranks)
    assert text.accepted.shape == (3, tokens)
    assert text.strayed.shape == text.strayed_draft.shape == (len(text.strayed), LONGEST_DRAFT, layers, ranks)
    for ids in (text.experts, text.draft, text.strayed, text.strayed_draft, text.gate[:, 1:]):
        assert ids.dtype == np.int16 and (ids >= 0).all() and (ids < experts).all()
        assert (np.diff(np.sort(ids, -1), axis=-1) > 0).all()
    assert (text.gate[:, 0] == -1).all() and np.array_equal(text.draft[0], text.experts)
    assert len(text.log()) == len(set(text.tokens.tolist())) == tokens
    start, length = data.draw(st.integers(0, tokens - 1), "start"), data.draw(st.integers(0, LONGEST_DRAFT), "length")
    window = text.window(start, length)
    drafted = min(length, tokens - 1 - start)
    assert window.draft.shape == (drafted, layers, ranks) and window.needed.shape == (drafted + 1, layers, ranks)
    right = [bool(text.accepted[min(h, 2), start + h]) for h in range(drafted)]
    assert window.accepted == (right.index(False) if False in right else drafted)
    upto = window.accepted + 1
    assert np.array_equal(window.needed[:upto], text.experts[start : start + upto])
    if window.accepted < drafted:
        run = text.run[start + upto]
        assert run >= 0
        assert np.array_equal(window.needed[upto:], text.strayed[run, : drafted - window.accepted])
        assert np.array_equal(window.draft[upto:], text.strayed_draft[run, : drafted - window.accepted - 1])


def test_measured_as_the_routing_log_measures_it():
    text = routing("qwen_like", layers=3).sample(200, seed=0)
    log = text.log()
    figures = measure(log).measured
    assert figures["adjacent_reuse"] == pytest.approx(log.reuse().reuse.mean())
    growth = log.union_growth((2, 4, 8, 16)).groupby("window").mean()
    for window in (2, 4, 8, 16):
        assert figures[f"union_{window}"] == pytest.approx(growth.experts[window] / growth.chance[window])
    assert "draft_recall_1" not in figures


def test_a_segment_score_is_the_best_fixed_set():
    ids = np.zeros((32, 1, 1), np.int64)
    ids[16:] = 1  # expert 0, then expert 1
    figures = measure(Shape(experts=ids, expert_counts=(4,))).measured
    windows = np.lib.stride_tricks.sliding_window_view(ids[:, 0, 0], 16)
    counts = np.stack([(windows == expert).sum(-1) for expert in range(4)], -1).ravel()
    best = max(2 * counts[counts >= a].sum() / (16 * (counts >= a).sum() + counts.sum()) for a in range(1, 17))
    assert figures["segment_score_16"] == pytest.approx(best)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), ranks=st.integers(1, 3), slots=st.integers(1, 7))
def test_caches_forget_by_their_rule_and_none_beats_knowing_the_future(seed, ranks, slots):
    rng = np.random.default_rng(seed)
    experts = rng.random((30, 2, 8)).argsort(-1)[..., :ranks]
    hits = dict(zip(POLICIES, cache_hits(experts, 8, [slots])[:, 0], strict=True))
    expected = {"lru": 0, "lfu": 0}
    for policy in expected:
        for layer in range(2):
            held, counts = [], np.zeros(8)  # held: the longest unused first
            for expert in experts[:, layer].ravel().tolist():
                expected[policy] += expert in held
                counts[expert] += 1
                if expert in held:
                    held.remove(expert)
                elif len(held) == slots:
                    held.remove(held[0] if policy == "lru" else min(held, key=lambda e: counts[e]))
                held.append(expert)
        assert hits[policy] == pytest.approx(expected[policy] / experts.size)
    assert hits["clairvoyant"] >= max(hits.values()) - 1e-12


def test_errors_say_what_is_asked_what_came_and_what_to_do():
    shape = Shape(layers=2, experts=8, experts_per_token=2)
    with pytest.raises(ValueError, match=r"got 'deepsek_like'. Did you mean deepseek_like"):
        SyntheticRouting(shape, "deepsek_like")
    with pytest.raises(ValueError, match=r"adjacent_reuse can be .* got \[0.01.*Choose values inside"):
        SyntheticRouting(shape, dataclasses.replace(statistics_named("qwen_like"), adjacent_reuse=(0.01,)))
    with pytest.raises(ValueError, match=r"got 2 layers of .*8, 9.* Generate each group"):
        SyntheticRouting(Shape(layers=2, experts=(8, 9), experts_per_token=2), "qwen_like")
    with pytest.raises(ValueError, match=r"shares from 0 to 1.*acceptance.*Start from a preset"):
        dataclasses.replace(statistics_named("qwen_like"), acceptance=(1.2,))
    with pytest.raises(ValueError, match=r"lasting_share.*Start from a preset"):
        dataclasses.replace(statistics_named("qwen_like"), text_share=0.6, topic_share=0.5)
    text = SyntheticRouting(shape, "qwen_like").sample(10, seed=0)
    for start, length in ((10, 1), (-1, 1), (0, LONGEST_DRAFT + 1)):
        with pytest.raises(ValueError, match=f"got start={start}, length={length} for 10 tokens. Give a start below 10"):
            text.window(start, length)
    with pytest.raises(ValueError, match=r"got 0. Give tokens=160"):
        SyntheticRouting(shape, "qwen_like").sample(0, seed=0)
    with pytest.raises(ValueError, match="got 0 texts"):
        measure()
    with pytest.raises(ValueError, match="got 1 empty picks"):
        measure(Shape(experts=np.array([[[0, -1]]]), expert_counts=(4,)))


@pytest.mark.parametrize("ids", [[[[0]]], [[[0, 1]], [[1, 0]]]])
def test_the_shortest_text_and_the_narrowest_layer_are_measured(ids):
    figures = measure(Shape(experts=np.array(ids), expert_counts=(2,))).measured
    assert figures["adjacent_reuse"] == len(ids) - 1 and figures["popularity_spread"] == (0.5 if len(ids) == 1 else 0)
