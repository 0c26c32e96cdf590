"""Why a run took as long as it did: copies on the critical path, the price of wrong predictions, shares of the time."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import pandas as pd

from specter_lab.observe.trace import COMPUTE_KINDS, Trace

_EXPERT = ["step", "layer", "expert"]
_CRITICAL = ["step", "position", "layer", "expert", "request_id", "reason", "outcome", "bytes", "transfer_us", "exposed_us", "hidden_us"]


def critical_path(trace: Trace) -> pd.DataFrame:
    """What compute waited for: a row for each transfer of the trace in the order of their starts, prefill included.

    A moment of a stall belongs to the copy that is on the link then: the awaited one, or one that it queues behind. A
    moment with an idle link (a late wake-up, on a measured machine) belongs to the awaited one. ``exposed_us``: all that
    belongs to this copy; ``hidden_us``: the part of ``transfer_us`` during which no stall held the device up for it.
    ``step`` and ``position`` are those that the copy was made for.

    A wait for the host, or for a copy that the trace doesn't have, is a row of its own, after the others, with the
    stall's ``request_id`` and ``reason`` ("host"), without a transfer. So ``exposed_us`` sums to the time of all stalls.

    >>> import specter_lab as sl
    >>> with sl.Pipeline("tiny-moe", machine=sl.SimulatedMachine()) as p: trace = p.generate("Once", max_new_tokens=3).trace
    >>> path, stalls = critical_path(trace), trace.of_kind("stall")
    >>> bool(np.isclose(path["exposed_us"].sum(), (stalls["end_us"] - stalls["start_us"]).sum()))
    True
    """
    copies = trace.of_kind("transfer").sort_values("start_us", kind="stable")
    starts, ends = copies["start_us"].to_numpy(), copies["end_us"].to_numpy()
    row_of = {request_id: row for row, request_id in enumerate(copies["request_id"])}
    done = np.maximum.accumulate(ends)  # non-decreasing even where bars overlap: what lies before needs no look
    exposed, on_link = np.zeros(len(copies)), np.zeros(len(copies))
    stalls = trace.of_kind("stall")
    known = stalls["request_id"].isin(row_of.keys()) & (stalls["reason"] != "host")
    for stall in stalls[known].itertuples():
        awaited, since = row_of[stall.request_id], float(stall.start_us)
        until = min(float(stall.end_us), ends[awaited])
        unexplained = stall.end_us - stall.start_us
        row = int(np.searchsorted(done, since, side="right"))
        while row < len(copies) and starts[row] < until:
            held = max(0.0, min(ends[row], until) - max(starts[row], since))
            on_link[row] += held
            unexplained -= held
            since = max(since, ends[row])
            row += 1
        exposed[awaited] += unexplained
    table = copies.assign(transfer_us=ends - starts, exposed_us=exposed + on_link, hidden_us=ends - starts - on_link)
    others = stalls[~known]
    others = others.assign(transfer_us=0.0, exposed_us=others["end_us"] - others["start_us"], hidden_us=0.0)
    return pd.concat([table[_CRITICAL], others[_CRITICAL]], ignore_index=True)


def mispredictions(trace: Trace, by: str | None = None) -> pd.DataFrame:
    """What wrong prefetches cost in the decoding phase: in all, or by "step" or "layer" of the prefetch.

    A prefetch is wrong when the pass it was made for didn't need its expert in that layer.

    | column | meaning |
    | --- | --- |
    | `prefetches`, `wrong` | prefetch copies, and the wrong ones among them |
    | `wasted_bytes` | moved by wrong ones and never used, also not by a later pass |
    | `delayed`, `delayed_us` | demand copies that waited, once asked for, while wrong ones were on the link; their waits, summed |
    | `stalled_us` | compute held up by wrong ones on the link: their part of ``critical_path`` |
    | `reloads`, `reloaded_bytes` | next copies, used, of experts that wrong ones had evicted |

    A demand behind wrong prefetches of several steps or layers counts in each of them.

    >>> import specter_lab as sl
    >>> moe = sl.load_moe("tiny-moe")
    >>> with sl.Pipeline(moe, predictor=sl.NextLayerGate(moe), machine=sl.SimulatedMachine(0.1)) as p:
    ...     bool(mispredictions(p.generate("Once", max_new_tokens=4).trace)["wrong"].item() > 0)
    True
    """
    if by not in (None, "step", "layer"):
        raise ValueError(f"Mispredictions are counted by 'step', by 'layer' or in all (None); got {by!r}. Give one of them.")
    copies, needs = trace.of_kind("transfer"), trace.of_kind("need")
    stalled = critical_path(trace).iloc[: len(copies)].set_index("request_id")["exposed_us"]
    prefetches = copies[(copies["reason"] == "prefetch") & (copies["step"] >= 1)].assign(all="all")
    needed = pd.MultiIndex.from_frame(needs[_EXPERT])
    wrong = prefetches[~pd.MultiIndex.from_frame(prefetches[_EXPERT]).isin(needed)]
    unused = wrong[wrong["outcome"] == "wasted"]
    asked = needs[needs["outcome"] == "miss"].drop_duplicates("request_id").set_index("request_id")["start_us"]
    waits = _waits(wrong, copies[copies["reason"] == "demand"], asked)
    reloads = _reloads(wrong, trace.of_kind("evict"), copies)
    group = by or "all"
    table = pd.DataFrame(
        {
            "prefetches": prefetches.groupby(group).size(),
            "wrong": wrong.groupby(group).size(),
            "wasted_bytes": unused.groupby(group)["bytes"].sum(),
            "delayed": waits.groupby(group)["demand"].nunique(),
            "delayed_us": waits.groupby(group)["us"].sum(),
            "stalled_us": wrong["request_id"].map(stalled).groupby(wrong[group]).sum(),
            "reloads": reloads.groupby(group).size(),
            "reloaded_bytes": reloads.groupby(group)["reloaded_bytes"].sum(),
        },
        index=pd.Index(sorted(prefetches[group].unique()) if by else ["all"], name=by),
    )
    return table.fillna(0).astype({name: "float64" if name.endswith("_us") else "int64" for name in table})


def shares(trace: Trace) -> dict[str, float]:
    """Shares of the time from first to last commit: drafting, verifying (the target's compute), stalls; their sum is 1.

    Planning counts with the lane it is stamped on. Raises ``ValueError`` for a run that has no such time.

    >>> import specter_lab as sl
    >>> with sl.Pipeline("tiny-moe", machine=sl.SimulatedMachine()) as p: shares(p.generate("Once", max_new_tokens=3).trace)["draft"]
    0.0
    """
    commits = trace.of_kind("commit")["start_us"]
    begin, end = (float(commits.iloc[0]), float(commits.iloc[-1])) if len(commits) else (0.0, 0.0)
    events = trace.of_kind(*COMPUTE_KINDS, "stall")
    events = events[events["lane"].isin(["draft", "target"])]
    taken = events["end_us"].clip(begin, end) - events["start_us"].clip(begin, end)
    part = events["lane"].map({"draft": "draft", "target": "verify"}).where(events["kind"] != "stall", "stall")
    sums = taken.groupby(part).sum().reindex(["draft", "verify", "stall"], fill_value=0.0)
    if not sums.sum() > 0:
        raise ValueError(
            f"Shares are of the time between first and last commit; this run has {len(commits)} commits, {end - begin:g} us apart, "
            f"and {sums.sum():g} us of compute and stalls. Decode at least two tokens on a machine that charges time."
        )
    return {str(name): float(us / sums.sum()) for name, us in sums.items()}


def _waits(wrong: pd.DataFrame, demands: pd.DataFrame, asked: pd.Series) -> pd.DataFrame:
    """A row for each (wrong prefetch, demand) of which the second waited while the first was on the link."""
    wrong = wrong.sort_values("start_us", kind="stable")
    starts, ends, rows = wrong["start_us"].to_numpy(), wrong["end_us"].to_numpy(), []
    done = np.maximum.accumulate(ends)
    for demand in demands[demands["request_id"].isin(asked.index)].itertuples():
        since = float(asked[demand.request_id])
        for i in range(int(np.searchsorted(done, since, side="right")), int(np.searchsorted(starts, demand.start_us))):
            rows.append((i, demand.request_id, max(0.0, min(ends[i], demand.start_us) - max(starts[i], since))))
    waits = pd.DataFrame(rows, columns=["prefetch", "demand", "us"]).astype({"prefetch": "int64", "demand": "int64", "us": "float64"})
    waits = waits[waits["us"] > 0]
    return waits.assign(**{name: wrong[name].to_numpy()[waits["prefetch"]] for name in ("step", "layer", "all")})


def _reloads(wrong: pd.DataFrame, evictions: pd.DataFrame, copies: pd.DataFrame) -> pd.DataFrame:
    """The wrong prefetches that evicted an expert whose next copy was used, with that copy's ``reloaded_bytes``."""
    later: dict[tuple[int, int], list[tuple[float, str, int]]] = {}
    for copy in copies.sort_values("start_us", kind="stable").itertuples():
        later.setdefault((copy.layer, copy.expert), []).append((copy.start_us, copy.outcome, copy.bytes))
    found = {}
    for evicted in evictions[evictions["request_id"].isin(wrong["request_id"])].itertuples():
        own = later.get((evicted.layer, evicted.expert), [])
        following = own[bisect_left(own, (evicted.start_us,)) :]
        if following and following[0][1] == "used":
            found[evicted.request_id] = following[0][2]
    return wrong[wrong["request_id"].isin(found)].assign(reloaded_bytes=lambda rows: rows["request_id"].map(found))
