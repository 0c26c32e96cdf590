"""Metrics: every figure of a run, from its trace alone.

Figures "per token" are of the decoding phase (after the first token, step 1 on); the prefill shows in ``ttft_ms``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from specter_lab.observe.trace import COMPUTE_KINDS, Trace


def merged(events: pd.DataFrame) -> np.ndarray:
    """(n, 2) disjoint intervals in us that cover the same time as the events.

    >>> merged(pd.DataFrame({"start_us": [0.0, 2.0, 9.0], "end_us": [3.0, 5.0, 10.0]})).tolist()
    [[0.0, 5.0], [9.0, 10.0]]
    """
    out: list[list[float]] = []
    for start, end in sorted(zip(events["start_us"], events["end_us"], strict=True)):
        if out and start <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([start, end])
    return np.array(out, dtype=float).reshape(-1, 2)


def overlap_us(first: np.ndarray, second: np.ndarray) -> float:
    """Time covered by both of two sets of disjoint intervals.

    >>> overlap_us(np.array([[0.0, 5.0]]), np.array([[3.0, 9.0]]))
    2.0
    """
    marks = [(t, sign * weight) for weight, spans in ((1, first), (2, second)) for s, e in spans for t, sign in ((s, 1), (e, -1))]
    total, state, since = 0.0, 0, 0.0
    for time, change in sorted(marks):
        if state == 3:
            total += time - since
        state, since = state + change, time
    return float(total)


def _ratio(part: float, whole: float) -> float | None:
    return float(part) / float(whole) if whole else None


def summarize(trace: Trace) -> dict[str, Any]:
    """The figures of one request; what doesn't apply (or can't be told from one token) is None.

    Recall and precision are of experts of passes: (step, layer, expert); ``recall_accepted`` of those that a row needed which
    was committed, leaving out what only rejected drafts needed. ``on_time`` is, of the rightly predicted
    experts that weren't resident when first predicted, the share that was resident when its layer asked.

    >>> import specter_lab as sl
    >>> with sl.Pipeline("tiny-moe", machine=sl.SimulatedMachine()) as p: p.generate("Once", max_new_tokens=3).metrics["tokens"]
    3
    """
    commits = trace.of_kind("commit")
    tokens = int(commits["tokens"].sum())
    decoding = trace.events[trace.events["step"] >= 1]
    kind = decoding["kind"]
    steps = int(commits["step"].max()) if len(commits) else 0
    begin, end = (float(commits["start_us"].iloc[0]), float(commits["start_us"].iloc[-1])) if len(commits) else (0.0, 0.0)
    later = tokens - 1
    transfers, needs, stalls = decoding[kind == "transfer"], decoding[kind == "need"], decoding[kind == "stall"]
    compute = decoding[kind.isin(COMPUTE_KINDS) & decoding["lane"].isin(["target", "draft"])]
    busy = merged(transfers)
    drafted, accepted = decoding.loc[kind == "draft_length", "value"].sum(), commits.loc[commits["step"] >= 1, "value"].sum()
    transfer_us = float((busy[:, 1] - busy[:, 0]).sum())

    def per_token(amount: float) -> float | None:
        return _ratio(amount, later)

    def outcome(name: str) -> float | None:
        return _ratio((needs["outcome"] == name).sum(), len(needs))

    compute_us = (compute["end_us"] - compute["start_us"]).groupby(compute["lane"]).sum()
    return {
        "tokens": tokens,
        "steps": steps,
        "ttft_ms": begin / 1e3 if len(commits) else None,
        "tpot_ms": per_token((end - begin) / 1e3),
        "tokens_per_step": _ratio(later, steps),
        "acceptance_rate": _ratio(accepted, drafted),
        "drafted_ahead": _ratio(decoding.loc[(kind == "ahead") & (decoding["outcome"] == "kept"), "value"].sum(), drafted),
        "hit_rate": outcome("hit"),
        "late_rate": outcome("late"),
        "miss_rate": outcome("miss"),
        "host_rate": _ratio((needs["reason"] == "host").sum(), len(needs)),
        **_prediction_totals(decoding),
        "moved_mb_per_token": per_token(transfers["bytes"].sum() / 1e6),
        "wasted_mb_per_token": per_token(transfers.loc[transfers["outcome"] == "wasted", "bytes"].sum() / 1e6),
        "exposed_ms_per_token": per_token((stalls["end_us"] - stalls["start_us"]).sum() / 1e3),
        "transfer_ms_per_token": per_token(transfer_us / 1e3),
        "overlap": _ratio(overlap_us(busy, merged(compute)), transfer_us),
        "link_utilisation": _ratio(overlap_us(busy, np.array([[begin, end]])), end - begin),
        "draft_ms_per_token": per_token(float(compute_us.get("draft", 0.0)) / 1e3),
        "target_ms_per_token": per_token(float(compute_us.get("target", 0.0)) / 1e3),
    }


def acceptance_by_position(traces: Sequence[Trace]) -> list[float]:
    """How often the draft at each position of a step held, among the steps that came to judge it (all before it held).

    >>> acceptance_by_position([])
    []
    """
    judged: Counter[int] = Counter()
    held: Counter[int] = Counter()
    for trace in traces:
        drafted = trace.of_kind("draft_length").set_index("step")["value"].astype(int)
        commits = trace.of_kind("commit").set_index("step")
        accepted, committed = commits["value"].astype(int), commits["tokens"]
        for step, length in drafted.items():
            # a text that ends with an accepted draft says nothing of the next one
            judged.update(range(min(length, committed[step])))
            held.update(range(accepted[step]))
    return [held[i] / judged[i] for i in range(len(judged))]


_EXPERT = ["step", "layer", "expert"]


def _prediction_totals(decoding: pd.DataFrame) -> dict[str, float | None]:
    predicted = decoding[(decoding["kind"] == "predict") & (decoding["outcome"] != "dropped")]
    if predicted.empty:
        return dict.fromkeys(("recall", "recall_accepted", "precision", "on_time"))
    needed = decoding[decoding["kind"] == "need"]
    first = predicted.drop_duplicates(_EXPERT)
    both = first.merge(needed, on=_EXPERT, suffixes=("", "_need"))
    moved = both[both["reason"] != "resident"]
    kept = decoding[(decoding["kind"] == "route") & (decoding["outcome"] == "accepted")].drop_duplicates(_EXPERT)
    return {
        "recall": _ratio(len(both), len(needed)),
        "recall_accepted": _ratio(len(kept.merge(first, on=_EXPERT)), len(kept)),
        "precision": _ratio(len(both), len(first)),
        "on_time": _ratio((moved["outcome_need"] == "hit").sum(), len(moved)),
    }


def prediction_scores(trace: Trace, by: str = "layer") -> pd.DataFrame:
    """Recall, precision and on-time share by "layer" or by "horizon" (tokens ahead of the last committed one).

    By layer they are of experts of passes; by horizon of experts of single positions: a prediction for a position is
    right when that very position was routed to the expert. One for a whole pass (position -1) has no horizon and is left
    out there; where nothing else was predicted, scores by horizon are NaN.

    >>> import specter_lab as sl
    >>> moe = sl.load_moe("tiny-moe")
    >>> with sl.Pipeline(moe, predictor=sl.NextLayerGate(moe), machine=sl.SimulatedMachine()) as p:
    ...     sl.prediction_scores(p.generate("Once", max_new_tokens=4).trace).columns.tolist()
    ['needed', 'predicted', 'recall', 'precision', 'on_time']
    """
    if by not in ("layer", "horizon"):
        raise ValueError(f"Scores are kept by 'layer' or by 'horizon'; got {by!r}. Give one of them.")
    decoding = trace.events[trace.events["step"] >= 1]
    needed = decoding[decoding["kind"] == "need"]
    predicted = decoding[(decoding["kind"] == "predict") & (decoding["outcome"] != "dropped")]
    keys = _EXPERT
    if by == "horizon":
        keys = ["step", "position", "layer", "expert"]
        predicted = predicted[predicted["position"] >= 0]
        routed = decoding[decoding["kind"] == "route"]
        begins = routed.groupby("step")["position"].transform("min")
        passes = needed[[*_EXPERT, "outcome"]]
        needed = routed.assign(tokens=routed["position"] - begins).drop(columns="outcome").merge(passes, on=_EXPERT)
    group = "layer" if by == "layer" else "tokens"
    first = predicted.drop_duplicates(keys)
    both = needed.merge(first[[*keys, "reason"]], on=keys, suffixes=("", "_then"))
    moved = both[both["reason_then"] != "resident"]
    table = pd.DataFrame({"needed": needed.groupby(group).size(), "predicted": first.groupby(group).size()}).fillna(0).astype(int)
    right = both.groupby(group).size().reindex(table.index, fill_value=0)
    table["recall"] = right / table["needed"].where((table["needed"] > 0) & bool(len(first)))
    table["precision"] = right / table["predicted"].where(table["predicted"] > 0)
    table["on_time"] = (moved["outcome"] == "hit").groupby(moved[group]).mean().reindex(table.index)
    return table.rename_axis(by)
