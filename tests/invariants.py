"""What must hold for every trace, whatever machine made it."""

from __future__ import annotations

from collections.abc import Sequence

from specter_lab.observe.trace import COMPUTE_KINDS, Trace


def check_trace(trace: Trace, slots: Sequence[int], blob_bytes: Sequence[int], *, cold: bool = True) -> None:
    """Raise AssertionError at the first broken invariant. ``cold``: the run began with empty slots."""
    events = trace.events
    transfers, uses, needs = (events[events["kind"] == kind] for kind in ("transfer", "expert", "need"))
    # bars of one lane never overlap; the compute lanes are one timeline
    for lanes in (["link"], ["disk"], ["host"], ["target", "draft"]):
        bars = events[events["lane"].isin(lanes) & (events["end_us"] > events["start_us"])].sort_values("start_us")
        gaps = bars["start_us"].to_numpy()[1:] - bars["end_us"].to_numpy()[:-1]
        assert (gaps >= -1e-6).all(), f"bars of {lanes} overlap by {-gaps.min()} us"
        assert (events["end_us"] >= events["start_us"]).all(), "an event ends before it starts"
    # compute has no holes: busy + stalled = span
    chain = events[events["lane"].isin(["target", "draft"])]
    if len(chain):
        span = chain["end_us"].max() - chain["start_us"].min()
        filled = (chain["end_us"] - chain["start_us"])[chain["kind"].isin([*COMPUTE_KINDS, "stall"])].sum()
        assert abs(span - filled) <= 1e-6 * max(span, 1), f"compute spans {span} us but its segments fill {filled}"
    # each request is one transfer at most, with its expert's bytes
    assert transfers["request_id"].is_unique, "a request was transferred twice"
    assert all(b == blob_bytes[layer] for b, layer in zip(transfers["bytes"], transfers["layer"], strict=True)), (
        "bytes moved != expert size"
    )
    # no use before arrival, and each use says which copy it used
    arrival = transfers.set_index("request_id")["end_us"]
    target_uses = uses[(uses["lane"] == "target") & (uses["expert"] >= 0)]
    for use in target_uses.itertuples():
        assert use.request_id >= 0 or not cold, f"use of {use.layer}.{use.expert} without a transfer after a cold start"
        if use.request_id >= 0:
            assert use.start_us >= arrival[use.request_id] - 1e-6, (
                f"{use.layer}.{use.expert} used {arrival[use.request_id] - use.start_us} us early"
            )
    # every stall waits for a request that arrives as it ends
    for stall in events[(events["kind"] == "stall") & (events["reason"] != "host")].itertuples():
        assert stall.request_id in arrival.index, f"a stall waits for request {stall.request_id}, which never arrived"
    # each needed expert is used once a layer call, and moved at most once for it
    hosted = uses[uses["lane"] == "host"]
    assert len(target_uses) + len(hosted) == len(needs), f"{len(needs)} experts were needed, {len(target_uses)} + {len(hosted)} used"
    assert len(hosted) == (needs["reason"] == "host").sum(), "the host computed other experts than were left to it"
    demanded = transfers[transfers["reason"] == "demand"]
    assert not demanded.duplicated(["step", "layer", "expert"]).any(), "an expert was fetched twice for one layer call"
    # slots: taken when a copy is submitted, freed by eviction
    taken = [(t.start_us, 1, t.layer) for t in transfers.itertuples()]
    freed = [(e.start_us, -1, e.layer) for e in events[events["kind"] == "evict"].itertuples()]
    if cold:
        held = [0] * len(slots)
        for time, change, layer in sorted(taken + freed, key=lambda item: item[:2]):
            held[layer] += change
            assert 0 <= held[layer] <= slots[layer], f"layer {layer} holds {held[layer]} of {slots[layer]} slots at {time} us"
    # hits were there, misses weren't
    for need in needs[(needs["outcome"] == "miss") & (needs["reason"] != "host")].itertuples():
        assert arrival[need.request_id] >= need.start_us, f"a miss of {need.layer}.{need.expert} had arrived before"
    assert set(needs["outcome"]) <= {"hit", "late", "miss"}
