"""How like published routing a generated (or recorded) one is: every figure, measured in one way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from specter_lab.routing.synthetic_text import SyntheticText

Used = NDArray[np.int16]
POLICIES = ("lru", "lfu", "oracle_16", "clairvoyant")


class Picks(Protocol):
    """Routed text: ``SyntheticText`` or ``RoutingLog``. ``experts`` (token, layer, rank) without gaps, layers of one size."""

    @property
    def experts(self) -> Any:
        """Ids."""

    @property
    def expert_counts(self) -> tuple[int, ...]:
        """Experts of each layer."""


def measure(*texts: Picks, draft_length: int = 8, cache_layers: int = 6) -> pd.DataFrame:
    """Figures of one or several texts of one router: statistic (index), measured, low, high, source.

    ``low``, ``high`` and ``source`` are the published figure, where the text's statistics name one. ``adjacent_reuse``: share
    of a token's experts that the next one uses; ``first_choice_repeat_*``: same for the first choice alone, in the first,
    middle and last layer; ``union_n``: distinct experts of n tokens over what independent even routing gives;
    ``segment_score_n``: F1 of the best fixed set for each n tokens; ``popularity_spread``: standard deviation over experts of
    their use, which only many texts tell apart from their subjects; ``lru_n``, ``lfu_n``, ``oracle_16_n``: hits over those of
    clairvoyant eviction, with n slots for each active expert, and ``clairvoyant_where_lru_is_073``: hits (see ``cache_hits``),
    all of these for the first text and ``cache_layers`` of its layers.
    Generated texts also: ``draft_recall_h`` while drafting right; ``set_match_full`` and ``_partly``: of a draft's sets, also
    after a wrong token, against what the text turns out to need, over windows of ``draft_length``; ``acceptance``;
    ``gate_recall``.

    Raises ``ValueError`` for no text, for texts or layers of different sizes, and for empty picks.

    >>> from types import SimpleNamespace as Shape; from specter_lab.routing.synthetic import SyntheticRouting
    >>> routing = SyntheticRouting(Shape(layers=2, experts=8, experts_per_token=2), "qwen_like")
    >>> float(measure(routing.sample(64, seed=0)).measured["draft_recall_1"])
    1.0
    """
    sizes = {(text.experts.shape[1:], text.expert_counts) for text in texts}
    if len(sizes) != 1 or len(set(texts[0].expert_counts)) > 1:
        raise ValueError(
            f"Figures are of texts of one router whose layers are of one size; got {len(texts)} texts with layer, rank and expert counts "
            f"{sorted(map(str, sizes))}. Measure each router, and each group of equal layers, by itself."
        )
    ids = [np.asarray(text.experts).astype(np.int64) for text in texts]
    count = texts[0].expert_counts[0]
    if gaps := sum(int((one < 0).sum()) for one in ids):
        raise ValueError(
            f"Figures are of layers that pick equally many experts for every token; got {gaps} empty picks. Leave those layers out."
        )
    used = [_used(one, count) for one in ids]
    rows = {**_locality(ids, used), **_caches(ids[0], count, cache_layers)}
    generated = [text for text in texts if isinstance(text, SyntheticText)]
    if generated:
        rows |= _drafting(generated, draft_length)
    frame = pd.DataFrame({"measured": rows})
    published = generated[0].statistics.published if generated else {}
    for column in ("low", "high", "source"):
        frame[column] = [getattr(published.get(name), column, None) for name in frame.index]
    frame[["low", "high"]] = frame[["low", "high"]].astype(float)
    return frame.rename_axis("statistic")


def cache_hits(experts: NDArray[np.integer[Any]], count: int, slots: Sequence[int]) -> NDArray[np.float64]:
    """(policy, slots) hit rates of ``POLICIES`` for ``experts`` (token, layer, rank) ids below ``count``, slots a layer.

    Experts are asked for one after the other, first choice first, each always taking a slot; all start empty. "oracle_16"
    forgets the expert that the next 16 tokens use least, "clairvoyant" the one that is used last.

    Source: Liang et al. (arXiv 2505.16056), section 2.3; Belady (IBM Systems Journal 5, 1966).

    >>> cache_hits(np.array([[[0, 1]], [[0, 1]]]), 4, [2]).tolist()
    [[0.5], [0.5], [0.5], [0.5]]
    """
    tokens, layers, ranks = experts.shape
    asked = experts.transpose(0, 2, 1).reshape(-1, layers)
    every = np.arange(layers)
    following = np.empty_like(asked)
    seen = np.full((layers, count), len(asked) + tokens * ranks)
    for i in range(len(asked) - 1, -1, -1):
        following[i] = seen[every, asked[i]]
        seen[every, asked[i]] = i
    totals = np.concatenate([np.zeros((1, layers, count)), _used(experts, count).cumsum(0)])
    keep = np.zeros((len(POLICIES), layers, count))
    recent = np.zeros((layers, count))
    cached = np.zeros((len(POLICIES), len(slots), layers, count), bool)
    room = np.asarray(slots)[None, :, None]
    hits = np.zeros((len(POLICIES), len(slots)))
    for i, now in enumerate(asked):
        token = i // ranks
        hits += cached[:, :, every, now].sum(-1)
        recent[every, now] = keep[0, every, now] = i + 1
        keep[1, every, now] = np.floor(keep[1, every, now]) + 1 + i / (len(asked) + 1)
        if i % ranks == 0:
            ahead = totals[min(token + 17, tokens)] - totals[token]
        ahead[every, now] -= 1
        keep[2] = ahead + recent / (len(asked) + 1)
        keep[3, every, now] = -following[i]
        cached[:, :, every, now] = True
        full = cached.sum(-1) > room
        value = np.where(cached, keep[:, None], np.inf)
        value[:, :, every, now] = np.inf
        policy, size, layer = np.nonzero(full)
        cached[policy, size, layer, value.argmin(-1)[policy, size, layer]] = False
    return hits / asked.size


def _used(ids: NDArray[np.integer[Any]], count: int) -> Used:
    """(token, layer, expert) 1 where used."""
    used = np.zeros((*ids.shape[:2], count), np.int16)
    np.put_along_axis(used, ids, 1, -1)
    return used


def _locality(ids: Sequence[NDArray[np.int64]], used: Sequence[Used]) -> dict[str, float]:
    layers, ranks, count = ids[0].shape[1], ids[0].shape[2], used[0].shape[2]
    pairs = sum(len(one) - 1 for one in ids)
    rows = {"adjacent_reuse": sum(float((one[1:] & one[:-1]).sum()) for one in used) / max(1, pairs * layers * ranks)}
    for name, layer in (("first", 0), ("middle", (layers - 1) // 2), ("last", layers - 1)):
        rows[f"first_choice_repeat_{name}"] = sum(int((one[1:, layer, 0] == one[:-1, layer, 0]).sum()) for one in ids) / max(1, pairs)
    totals = [np.concatenate([np.zeros_like(one[:1]), one.cumsum(0, dtype=np.int16)]) for one in used]
    for window in (2, 4, 8, 16, 64, 256):
        inside = [total[window:] - total[:-window] for total in totals if len(total) > window]
        if not inside:
            continue
        uses = np.bincount(np.concatenate([one.ravel() for one in inside]), minlength=window + 1)
        if window <= 16:
            rows[f"union_{window}"] = float(1 - uses[0] / uses.sum()) / (1 - (1 - ranks / count) ** window)
        if window >= 4 and window != 8:  # always, for an expert used that often or more: the F1 of the best such rule
            segments = uses[::-1].cumsum()[::-1][1:]
            right = (uses * np.arange(window + 1))[::-1].cumsum()[::-1]
            rows[f"segment_score_{window}"] = float((2 * right[1:] / (window * segments + right[0])).max())
    share = sum(one.sum(0) for one in used) / sum(map(len, used))
    rows["popularity_spread"] = float(np.std(share))
    return rows


def _caches(ids: NDArray[np.int64], count: int, layers: int) -> dict[str, float]:
    some = np.unique(np.linspace(0, ids.shape[1] - 1, layers).round().astype(int))
    ratios = [ratio for ratio in (1, 2, 3, 4) if ratio * ids.shape[2] < count]
    hits = cache_hits(ids[:, some], count, [ratio * ids.shape[2] for ratio in ratios])
    rows = {
        f"{policy}_{ratio}": float(hits[p, r] / max(hits[3, r], 1e-9))
        for p, policy in enumerate(POLICIES[:3])
        for r, ratio in enumerate(ratios)
        if ratio < 4
    }
    if ratios and hits[0, 0] <= 0.73 <= hits[0, -1]:
        rows["clairvoyant_where_lru_is_073"] = float(np.interp(0.73, hits[0], hits[3]))
    return rows


def _drafting(texts: Sequence[SyntheticText], draft_length: int) -> dict[str, float]:
    def shared(first: Any, second: Any) -> NDArray[np.float64]:
        return (first[..., :, None] == second[..., None, :]).any(-1).mean(-1)

    rows = {}
    for h in range(len(texts[0].draft)):
        rows[f"draft_recall_{h + 1}"] = float(np.mean([shared(text.experts, text.draft[h]).mean() for text in texts]))
    matches = []
    for text in texts:
        for start in range(0, len(text) - 1, draft_length):
            draft = text.window(start, draft_length).draft
            matches.append(shared(draft, text.experts[start : start + len(draft)]).ravel())
    match = np.concatenate(matches) if matches else np.zeros(0)
    if match.size:
        rows |= {"set_match_full": float((match == 1).mean()), "set_match_partly": float((match > 0).mean())}
    rows["acceptance"] = float(np.mean([text.accepted.mean() for text in texts]))
    if texts[0].gate.shape[1] > 1:
        rows["gate_recall"] = float(np.mean([shared(text.experts[:, 1:], text.gate[:, 1:]).mean() for text in texts]))
    return rows
