"""What is published about MoE routing, as numbers that generated routing can be held against.

Not everything published can be had at once; ``measure`` shows what a text misses. Known conflicts: reuse of 0.39 and more
leaves unions at the lower end of their range and Qwen1.5-MoE's segment score 13 % too high; Qwen3's segment score asks for
unions 14 % below the range; with the published draft recalls, sets of 2 agree fully in 55 % of cases, of 4 in 37 %, of 6 in
28 %, not 44 % for all; and cache figures that were measured on 64 experts, 8 a token, fit OLMoE-like routing within 12 %
but leave DeepSeek-like LFU 23 % and Qwen-like LFU 45 % too low at the smallest size.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Published(NamedTuple):
    """A published figure: the range it lies in (both ends alike if one number is given) and where it stands.

    >>> Published.exactly(0.379, "arXiv 2505.16056, table 1").high
    0.379
    """

    low: float
    high: float
    source: str

    @classmethod
    def exactly(cls, value: float, source: str) -> Published:
        """One number instead of a range."""
        return cls(value, value, source)


@dataclass(frozen=True)
class RoutingStatistics:
    """What generated routing is to look like. Values "by depth" are given at equal distances from the first layer to the last.

    Met by construction: ``adjacent_reuse`` by depth, the share of a token's experts that the next one uses too; ``draft_recall``
    by horizon, how much of the target's picks a draft knows that many tokens ahead, as long as it drafts the right tokens (a
    careful reading: the bundled model's INT4 draft knows 0.97 of them at any horizon); ``acceptance`` by horizon, of one drafted
    token; ``gate_recall`` by depth, of the next-layer gate. Past the last horizon given, the last value holds.

    Calibrated, so that ``published`` comes out: of a router's logit, variance 1, ``popularity_share`` is the expert's own in
    all texts, ``text_share`` stays for a whole text, ``topic_share`` for about ``topic_tokens``, and the rest is new at each
    token. ``published`` maps names of ``measure``'s rows to figures.

    Raises ``ValueError`` for values outside 0 to 1 and for shares that leave nothing to the token.

    >>> statistics_named("deepseek_like").acceptance
    (0.92,)
    """

    name: str
    adjacent_reuse: tuple[float, ...]
    popularity_share: float
    text_share: float
    topic_share: float = 0.0
    topic_tokens: float = 50.0
    draft_recall: tuple[float, ...] = (1.00, 0.90, 0.85, 0.82, 0.79, 0.77)
    acceptance: tuple[float, ...] = (0.92,)
    gate_recall: tuple[float, ...] = (0.84, 0.96)
    published: Mapping[str, Published] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        several = {name: getattr(self, name) for name in ("adjacent_reuse", "draft_recall", "acceptance", "gate_recall")}
        single = {name: (getattr(self, name),) for name in ("popularity_share", "text_share", "topic_share")}
        wrong = {name: values for name, values in {**several, **single}.items() if not values or not all(0 <= v <= 1 for v in values)}
        if wrong or not self.lasting_share < 1 or not self.topic_tokens > 0:
            raise ValueError(
                "Routing statistics are shares from 0 to 1, the lasting ones below 1 together, and a topic lasts more than 0 tokens; got "
                f"{wrong or dict(lasting_share=self.lasting_share, topic_tokens=self.topic_tokens)}. "
                "Start from a preset with dataclasses.replace(statistics_named('deepseek_like'), ...)."
            )

    @property
    def lasting_share(self) -> float:
        """What two tokens in a row have in common of a logit, but for the topic's small drift."""
        return self.popularity_share + self.text_share + self.topic_share


def statistics_named(name: str) -> RoutingStatistics:
    """A preset: "deepseek_like", "qwen_like", ... ``ValueError`` for any other name, with the nearest ones.

    >>> statistics_named("qwen_like").name
    'qwen_like'
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=2, cutoff=0.4)
        raise ValueError(
            f"Routing statistics have a preset's name; got {name!r}. "
            f"{'Did you mean ' + ' or '.join(near) + '?' if near else ''} There are {', '.join(PRESETS)}."
        )
    return PRESETS[name]


_CONSISTENCY = "Liang et al., arXiv 2505.16056, "
_SECOND_HAND = ", second-hand: not checked in the paper"


def _segments(model: str, by_length: Mapping[int, float], table: str = "table 1") -> dict[str, Published]:
    return {f"segment_score_{length}": Published.exactly(value, f"{_CONSISTENCY}{table}, {model}") for length, value in by_length.items()}


_UNION = "EcoSpec, 4 tokens: Qwen3-235B 0.81, gpt-oss-120b 0.76, DeepSeek-V3.1 0.99" + _SECOND_HAND
_BAND = {
    "adjacent_reuse": Published(0.39, 0.56, "working range for DeepSeek- and Qwen-like routing; no measurement on these models known"),
    **{f"union_{tokens}": Published(0.76, 0.99, "taken over from 4 tokens: " + _UNION) for tokens in (2, 8, 16)},
}
_EVERYWHERE = {
    "union_4": Published(0.76, 0.99, _UNION),
    **{
        f"draft_recall_{horizon}": Published.exactly(value, "Qwen1.5-MoE, drafts without training" + _SECOND_HAND)
        for horizon, value in enumerate((1.00, 0.90, 0.85, 0.82, 0.79, 0.77), start=1)
    },
    "set_match_full": Published.exactly(0.44, "INT4 self-draft of a MoE" + _SECOND_HAND),
    "set_match_partly": Published.exactly(0.91, "INT4 self-draft of a MoE" + _SECOND_HAND),
    "acceptance": Published(0.90, 1.00, "INT4 self-draft of a MoE" + _SECOND_HAND),
    "gate_recall": Published(0.84, 0.96, "next-layer gate (arXiv 2312.17238, 2408.10284)" + _SECOND_HAND),
}
_CACHES = {
    f"{policy}_{ratio}": Published.exactly(value, _CONSISTENCY + "table 4, the authors' own 8-layer OLMoE")
    for policy, values in {"lru": (0.565, 0.670, 0.753), "lfu": (0.619, 0.709, 0.784), "oracle_16": (0.810, 0.906, 0.962)}.items()
    for ratio, value in enumerate(values, start=1)
}


def _spread(model: str, value: float) -> dict[str, Published]:
    return {"popularity_spread": Published.exactly(value, f"{_CONSISTENCY}table 2, {model}")}


_FIRST_CHOICES = {
    "first_choice_repeat_first": Published.exactly(0.14, "Mixtral of Experts, arXiv 2401.04088, table 5, layer 0"),
    "first_choice_repeat_middle": Published.exactly(0.28, "Mixtral of Experts, arXiv 2401.04088, table 5, layer 15"),
    "first_choice_repeat_last": Published(0.20, 0.23, "Mixtral of Experts, arXiv 2401.04088, table 5, layer 31"),
}

# Shares, topic lengths and reuse were fitted by benchmarks/calibrate_routing.py to the published figures beside them.
PRESETS: dict[str, RoutingStatistics] = {
    preset.name: preset
    for preset in (
        RoutingStatistics(
            "deepseek_like", (0.39, 0.42, 0.40), 0.013, 0.09,
            published={
                **_EVERYWHERE, **_CACHES, **_BAND, **_spread("DeepSeek-V2-Lite", 0.0234), **_segments("DeepSeek-V2-Lite", {16: 0.379}),
            },
        ),
        RoutingStatistics(
            "qwen_like", (0.39, 0.42, 0.40), 0.0015, 0.042,
            published={**_EVERYWHERE, **_CACHES, **_BAND, **_spread("Qwen1.5-MoE", 0.0058), **_segments("Qwen1.5-MoE", {16: 0.307})},
        ),
        RoutingStatistics(
            "mixtral_like", (0.27, 0.455, 0.42), 0.0069, 0.024,
            published={**_EVERYWHERE, **_FIRST_CHOICES, **_spread("Mixtral-8x7B", 0.0270), **_segments("Mixtral-8x7B", {16: 0.494})},
        ),
        RoutingStatistics(
            "phi_like", (0.30, 0.48, 0.42), 0.056, 0.330,
            published={**_EVERYWHERE, **_spread("Phi-3.5-MoE", 0.0490), **_segments("Phi-3.5-MoE", {16: 0.520})},
        ),
        RoutingStatistics(
            "qwen3_like", (0.336, 0.54, 0.469), 0.053, 0.458,
            published={**_EVERYWHERE, **_spread("Qwen3-30B-A3B", 0.0319), **_segments("Qwen3-30B-A3B", {16: 0.541})},
        ),
        RoutingStatistics(
            "olmoe_like", (0.328, 0.524, 0.461), 0.0863, 0.155, 0.104, 53.0,
            published={
                **_EVERYWHERE, **_CACHES, **_spread("OLMoE-1B-7B", 0.0679),
                **_segments("OLMoE-1B-7B", {4: 0.647, 16: 0.509, 64: 0.455, 256: 0.426}, "table 6"),
                "clairvoyant_where_lru_is_073": Published.exactly(0.86, "OLMoE-1B-7B" + _SECOND_HAND),
            },
        ),
    )
}  # fmt: skip
