"""What a run teaches: the figures that scheduling pieces would want to know before the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import pandas as pd

from specter_lab.observe.metrics import acceptance_by_position, prediction_scores
from specter_lab.observe.trace import COMPUTE_KINDS, Trace

_PLACE = ["run", "step", "position", "layer"]


@dataclass(frozen=True)
class Feedback:
    """``acceptance`` by position of a draft, ``recall`` by layer, ``confusion`` and ``rates``; see ``feedback``.

    >>> empty = pd.DataFrame()
    >>> Feedback(empty, empty, empty, empty)
    Feedback(0 positions, 0 layers, 0 confused pairs, 0 rates)
    """

    acceptance: pd.DataFrame
    recall: pd.DataFrame
    confusion: pd.DataFrame
    rates: pd.DataFrame

    def __repr__(self) -> str:
        sizes = (len(table) for table in (self.acceptance, self.recall, self.confusion, self.rates))
        return "Feedback({} positions, {} layers, {} confused pairs, {} rates)".format(*sizes)

    def _repr_html_(self) -> str:
        tables = {
            "acceptance": self.acceptance,
            "recall": self.recall,
            "confusion (first 10)": self.confusion.head(10),
            "rates": self.rates,
        }
        return "".join(f"<h4>{escape(name)}</h4>{table.to_html(float_format='{:.3g}'.format)}" for name, table in tables.items())


def feedback(traces: Trace | Sequence[Trace]) -> Feedback:
    """What one run or several (of one model) show.

    ``acceptance``: share of drafts that held, by position in the draft, of those whose predecessors held. ``recall``: needed,
    predicted, recall, precision and on-time share by layer. ``confusion``: layer, predicted, used, count: at one position
    an expert was predicted that it didn't use, beside one that it used unpredicted; a use counts 1 / (wrong ones there)
    with each of them. ``rates``: GB/s of copies, and mean us of copies and segments, by lane and kind. While they run,
    ``ByteLength`` learns the first, ``DraftLookahead`` precision by horizon, ``Prefetcher.link_rate`` the link's rate. Raises
    ``ValueError`` for no trace.

    >>> import specter_lab as sl
    >>> with sl.baselines.lookahead(sl.load_moe("tiny-moe"), machine=sl.SimulatedMachine()) as pipeline:
    ...     len(feedback(pipeline.generate("Once upon", max_new_tokens=8).trace).recall)
    8
    """
    runs = [traces] if isinstance(traces, Trace) else list(traces)
    if not runs:
        raise ValueError("Feedback is of at least one trace; got none. Give generation.trace, or a list of them.")
    accepted = acceptance_by_position(runs)
    acceptance = pd.DataFrame({"acceptance": accepted}, index=pd.RangeIndex(1, len(accepted) + 1, name="position"))
    return Feedback(acceptance, _recall(runs), _confusion(runs), _rates(runs))


def _recall(runs: Sequence[Trace]) -> pd.DataFrame:
    scores = [prediction_scores(run, "layer") for run in runs]
    summed = pd.concat(scores).groupby("layer")[["needed", "predicted"]].sum()
    right = sum((s["recall"].fillna(0) * s["needed"]).reindex(summed.index, fill_value=0) for s in scores)
    summed["recall"] = right / summed["needed"].where(summed["predicted"] > 0)
    summed["precision"] = right / summed["predicted"].where(summed["predicted"] > 0)
    return summed.assign(on_time=pd.concat(scores).groupby("layer")["on_time"].mean())


def _confusion(runs: Sequence[Trace]) -> pd.DataFrame:
    events = pd.concat([run.events.assign(run=number) for number, run in enumerate(runs)])
    events = events[(events["step"] >= 1) & (events["position"] >= 0)]
    predicted = events[(events["kind"] == "predict") & (events["outcome"] != "dropped")][[*_PLACE, "expert"]].drop_duplicates()
    used = events[events["kind"] == "route"][[*_PLACE, "expert"]].drop_duplicates()
    both = predicted.merge(used, how="outer", on=[*_PLACE, "expert"], indicator="side")
    wrong, missed = (both[both["side"] == side].drop(columns="side") for side in ("left_only", "right_only"))
    pairs = wrong.merge(missed, on=_PLACE, suffixes=("_predicted", "_used"))
    pairs["count"] = 1 / pairs.groupby([*_PLACE, "expert_used"])["expert_predicted"].transform("size")
    pairs = pairs.rename(columns={"expert_predicted": "predicted", "expert_used": "used"})
    table = pairs.groupby(["layer", "predicted", "used"], as_index=False)["count"].sum()
    return table.sort_values(["count", "layer", "predicted", "used"], ascending=[False, True, True, True], ignore_index=True)


def _rates(runs: Sequence[Trace]) -> pd.DataFrame:
    events = pd.concat([run.events for run in runs])
    events = events[events["kind"].isin((*COMPUTE_KINDS, "transfer")) & (events["end_us"] > events["start_us"])]
    spans = events.assign(us=events["end_us"] - events["start_us"])
    table = spans.groupby(["lane", "kind"]).agg(segments=("us", "size"), us=("us", "mean"), bytes=("bytes", "sum"), total=("us", "sum"))
    table["gb_s"] = (table["bytes"] / table["total"] / 1e3).where(table["bytes"] > 0)
    return table[["segments", "us", "gb_s"]]
