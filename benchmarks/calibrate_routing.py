"""Fit the presets of specter_lab.routing.statistics to the published figures beside them.

    python benchmarks/calibrate_routing.py olmoe_like        (minutes a preset; without a name, all of them)

What is fitted: the share of a logit that stays for a text, the share and the length of a topic where figures of several
lengths tell them apart, and reuse by depth where it isn't given. Prints the numbers to write into the preset.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from types import SimpleNamespace

import numpy as np
from scipy.optimize import minimize

from specter_lab.routing.likeness import measure
from specter_lab.routing.statistics import PRESETS, RoutingStatistics
from specter_lab.routing.synthetic import SyntheticRouting

SHAPES = {  # MoE layers (a few stand for all), experts, experts a token
    "deepseek_like": (6, 64, 6), "qwen_like": (6, 60, 4), "mixtral_like": (7, 8, 2),
    "phi_like": (6, 16, 2), "qwen3_like": (6, 128, 8), "olmoe_like": (6, 64, 8),
}  # fmt: skip
# Reuse is given for two at the low end of the band (above it, unions and segment scores leave what is published) and for two of
# which no more is known than one segment score; it is told by depth for Mixtral, and one factor is fitted to its profile for OLMoE.
REUSE_GIVEN = ("deepseek_like", "qwen_like", "phi_like", "qwen3_like")
REUSE_BY_DEPTH = ("mixtral_like",)
TOPIC_TOLD = ("olmoe_like",)  # the only one with segment scores of several lengths
TEXTS = {"mixtral_like": 8}  # figures of a single layer need more of them
WEIGHTS = {"adjacent": 1.0, "union": 0.2, "segment": 1.0, "lru": 0.05, "lfu": 0.05, "oracle": 0.05, "clairvoyant": 0.3, "first": 1.0}


def router(statistics: RoutingStatistics) -> SyntheticRouting:
    """On the preset's shape."""
    layers, experts, ranks = SHAPES[statistics.name]
    return SyntheticRouting(SimpleNamespace(layers=layers, experts=experts, experts_per_token=ranks), statistics)


def trial(start: RoutingStatistics, values: np.ndarray) -> RoutingStatistics:
    """The preset with these values: text share, then as told above topic share and log of its length, and reuse or its factor."""
    text, *rest = (float(value) for value in values)
    changes: dict[str, float | tuple[float, ...]] = {"text_share": min(max(text, 0.0), 0.5)}
    if start.name in TOPIC_TOLD:
        topic, length, *rest = rest
        changes |= {"topic_share": min(max(topic, 0.0), 0.35), "topic_tokens": math.exp(min(max(length, 0.5), 6.0))}
    if start.name in REUSE_BY_DEPTH:
        changes["adjacent_reuse"] = tuple(rest)
    elif rest:
        changes["adjacent_reuse"] = tuple(rest[0] * reuse for reuse in start.adjacent_reuse)
    return dataclasses.replace(start, **changes)


def loss(statistics: RoutingStatistics, seeds: range) -> float:
    """Squared relative misses of the published ranges, weighted by kind."""
    routing = router(statistics)
    figures = measure(*(routing.sample(512, seed) for seed in seeds), cache_layers=4).dropna(subset="low")
    total = 0.0
    for name, row in figures.iterrows():
        miss = max(row.low - row.measured, row.measured - row.high, 0) / row.low
        total += WEIGHTS.get(str(name).split("_")[0], 0.0) * miss**2
    return total


def spread(statistics: RoutingStatistics) -> float:
    """The popularity spread over very many texts: what two halves of 400 short ones have in common."""
    routing, halves = router(statistics), []
    for half in (range(0, 400, 2), range(1, 400, 2)):
        used = np.zeros((routing.layers, routing.experts))
        for seed in half:
            picks = routing.sample(32, seed).experts.astype(np.int64)
            np.add.at(used, (np.broadcast_to(np.arange(routing.layers)[:, None], picks.shape), picks), 1 / (32 * len(half)))
        halves.append(used - used.mean())
    return float(np.sqrt(max((halves[0] * halves[1]).mean(), 1e-9)))


def calibrate(start: RoutingStatistics) -> RoutingStatistics:
    """Popularity first, the rest by a simplex search on the same few texts, then popularity again."""
    best, texts = with_popularity(start), range(TEXTS.get(start.name, 2))
    first, steps = [best.text_share], [0.05]
    if best.name in TOPIC_TOLD:
        first, steps = [*first, max(best.topic_share, 0.02), math.log(best.topic_tokens)], [*steps, 0.06, 0.7]
    if best.name in REUSE_BY_DEPTH:
        first, steps = [*first, *best.adjacent_reuse], [*steps, 0.05, 0.05, 0.05]
    elif best.name not in REUSE_GIVEN:
        first, steps = [*first, 1.0], [*steps, 0.1]

    def tried(values: np.ndarray) -> float:
        try:
            return loss(trial(best, values), texts)
        except ValueError:  # a reuse that these shares can't give
            return 1e3

    found = minimize(
        tried, first, method="Nelder-Mead",
        options={"initial_simplex": np.vstack([first, first + np.diag(steps)]), "maxfev": 14 * len(steps), "xatol": 2e-3, "fatol": 1e-5},
    )  # fmt: skip
    return with_popularity(trial(best, found.x))


def with_popularity(statistics: RoutingStatistics) -> RoutingStatistics:
    """The popularity share that gives the published spread; the spread's square is nearly proportional to it."""
    wanted = statistics.published["popularity_spread"].low
    for _ in range(3):
        factor = (wanted / spread(statistics)) ** 2
        statistics = dataclasses.replace(statistics, popularity_share=statistics.popularity_share * float(np.clip(factor, 0.2, 5)))
    return statistics


if __name__ == "__main__":
    for name in sys.argv[1:] or PRESETS:
        found = calibrate(PRESETS[name])
        print(f"{found}\n  loss on new texts {loss(found, range(10, 18)):.4f}, spread {spread(found):.4f}", flush=True)
