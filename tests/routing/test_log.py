"""The routing log refuses what doesn't fit, and counts right."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from specter_lab.routing.log import FORMAT, RoutingLog

NOT_A_LOG = r"bad\.safetensors is not"


def log_of(picks: list[list[list[int]]], experts: int, positions: list[int] | None = None) -> RoutingLog:
    """``picks[token][layer]`` = ids."""
    ids = torch.tensor(picks, dtype=torch.int64)
    n, layers, _ = ids.shape
    place = torch.arange(n) if positions is None else torch.tensor(positions)
    zeros = torch.zeros(n, dtype=torch.int64)
    return RoutingLog(ids, torch.ones(ids.shape), zeros + 7, place, zeros, (experts,) * layers, tuple(range(layers)), "toy")


def sequences(picks: int, least: int = 1) -> st.SearchStrategy[list[list[int]]]:
    """Up to 24 tokens, each with that many of 9 experts."""
    return st.lists(st.lists(st.integers(0, 8), min_size=picks, max_size=picks, unique=True), min_size=least, max_size=24)


def test_the_long_form_has_a_row_for_each_pick() -> None:
    frame = log_of([[[2, 0]], [[1, -1]]], 3, positions=[4, 5]).frame()
    assert frame[["token", "position", "rank", "expert"]].to_numpy().tolist() == [[0, 4, 0, 2], [0, 4, 1, 0], [1, 5, 0, 1]]
    assert frame["token_id"].tolist() == [7, 7, 7] and frame["weight"].tolist() == [1.0, 1.0, 1.0]


def test_reuse_counts_only_neighbours() -> None:
    # pairs (0,1) and (1,2); the last two tokens begin a new sequence, where one of two picks comes again
    reuse = log_of([[[0, 1]], [[1, 2]], [[0, 3]], [[0, 3]], [[3, 1]]], 4, positions=[0, 1, 2, 0, 1]).reuse()
    assert reuse.to_numpy().tolist() == [[0, 3, (1 + 0 + 1) / 6, 0.5]]
    alone = log_of([[[0, 1]]], 4).reuse()
    assert alone["pairs"].tolist() == [0] and math.isnan(alone["reuse"][0])


def test_union_growth_by_hand() -> None:
    growth = log_of([[[0, 1]], [[1, 2]], [[1, 2]], [[3, 0]]], 4, positions=[0, 1, 2, 0]).union_growth((1, 2, 3, 9))
    assert growth["samples"].tolist() == [4, 2, 1, 0]
    assert growth["experts"].tolist()[:3] == [2.0, 2.5, 3.0] and math.isnan(growth["experts"][3])
    assert growth["chance"].tolist()[:2] == [2.0, 3.0]
    with pytest.raises(ValueError, match=r"windows is \(0, 1\)"):
        log_of([[[0]]], 1).union_growth((0, 1))


def test_an_empty_log_can_be_asked() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    log = RoutingLog(torch.empty(0, 1, 2, dtype=torch.int64), torch.empty(0, 1, 2), empty, empty, empty, (4,), (0,), "toy")
    assert len(log.frame()) == 0 and log.reuse()["pairs"].tolist() == [0] and log.union_growth((1, 3))["samples"].tolist() == [0, 0]


@given(
    st.integers(1, 6).flatmap(lambda k: st.lists(st.lists(st.integers(0, 8), min_size=k, max_size=k, unique=True), min_size=1, max_size=24))
)
def test_in_one_sequence_a_longer_window_never_needs_fewer_experts(picks: list[list[int]]) -> None:
    log = log_of([[ids] for ids in picks], 9)
    growth = log.union_growth(range(1, len(picks) + 1))["experts"].tolist()
    assert all(a <= b + 1e-12 for a, b in pairwise(growth))
    assert growth[0] == len(picks[0]) and growth[-1] == len({i for ids in picks for i in ids})


@given(sequences(3, least=2))
def test_reuse_is_a_share_and_agrees_with_sets(picks: list[list[int]]) -> None:
    pairs = list(pairwise(picks))
    want = sum(len(set(a) & set(b)) for a, b in pairs) / sum(len(a) for a, _ in pairs)
    assert log_of([[ids] for ids in picks], 9).reuse()["reuse"][0] == pytest.approx(want)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"weights": torch.ones(2, 1, 3)}, r"weights is torch.float32 \(2, 1, 3\)"),
        ({"tokens": torch.zeros(3, dtype=torch.int64)}, r"tokens is torch.int64 \(3,\)"),
        ({"experts": torch.zeros(2, 1, 2, dtype=torch.int32)}, "experts is torch.int32"),
        ({"experts": torch.zeros(2, 2, dtype=torch.int64)}, r"not torch.int64 \('token', 'layer', 'rank'\)"),
        ({"experts": torch.full((2, 1, 2), 4)}, "4 expert ids lie outside"),
        ({"experts": torch.full((2, 1, 2), -2)}, "4 expert ids lie outside"),
        ({"expert_counts": (4, 4)}, "expert_counts has 2 entries for 1 layers"),
    ],
)
def test_a_log_that_does_not_fit_is_refused(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        dataclasses.replace(log_of([[[0, 1]], [[1, 2]]], 4), **change)


def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path) -> None:
    good = log_of([[[0, 1]], [[1, 2]]], 4).save(tmp_path / "good.safetensors")
    whole = good.read_bytes()
    bad = tmp_path / "bad.safetensors"
    for size in (0, 7, 40, len(whole) - 1):
        bad.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=NOT_A_LOG):
            RoutingLog.load(bad)
    for tensors, metadata in (
        ({"experts": torch.zeros(1)}, None),
        ({"experts": torch.zeros(1)}, {"format": "another"}),
        ({"experts": torch.zeros(1)}, {"format": FORMAT}),
    ):
        save_file(tensors, bad, metadata=metadata)
        with pytest.raises(ValueError, match=NOT_A_LOG):
            RoutingLog.load(bad)
    full = {"weights": torch.ones(1, 1, 1), **{n: torch.zeros(1, dtype=torch.int64) for n in ("tokens", "positions", "forwards")}}
    fine = '{"model_type": "toy", "expert_counts": [4], "decoder_layers": [0]}'
    for experts, about in (
        (torch.zeros(1, 1, 1, dtype=torch.int32), "{"),
        (torch.zeros(1, 1, 1, dtype=torch.int32), "[]"),
        (torch.zeros(1, 1, 1, dtype=torch.int32), '{"model_type": "toy", "expert_counts": 4, "decoder_layers": [0]}'),
        (torch.zeros(1, 1, 1), fine),
        (torch.full((1, 1, 1), 9, dtype=torch.int32), fine),
    ):
        save_file({"experts": experts, **full}, bad, metadata={"format": FORMAT, "about": about})
        with pytest.raises(ValueError, match=NOT_A_LOG):
            RoutingLog.load(bad)
    save_file({"experts": torch.zeros(1, 1, 1, dtype=torch.int32), **full}, bad, metadata={"format": "a later one", "about": fine})
    with pytest.raises(ValueError, match="its format is 'a later one'"):
        RoutingLog.load(bad)
    with pytest.raises(FileNotFoundError):
        RoutingLog.load(tmp_path / "none.safetensors")


def test_html_is_escaped() -> None:
    html = dataclasses.replace(log_of([[[0]]], 1), model_type="<b>")._repr_html_()
    assert "&lt;b&gt;" in html and "<b>" not in html
