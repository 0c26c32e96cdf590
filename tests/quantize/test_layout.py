from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_lab.quantize import BlobLayout, TensorSource, format_named
from specter_lab.quantize.layout import ALIGNMENT, _leaves
from specter_lab.records import ExpertKey


def packed_expert(name: str, source: TensorSource, layer: int = 0, expert: int = 0) -> dict[str, torch.Tensor]:
    tensors = source.tensors(ExpertKey(layer, expert))
    return {key: format_named(name).pack(t) if t.ndim == 2 else t for key, t in tensors.items()}


def outputs(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    rows = {name: torch.linspace(-1, 1, 2 * w.shape[1]).reshape(2, -1).to(w.dtype) for name, w in tensors.items() if w.ndim == 2}
    return [F.linear(rows[name], tensors[name]) for name in rows] + [w for w in tensors.values() if w.ndim == 1]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("layer", [0, 1])
def test_views_compute_the_same_and_alias_the_blob(format_name: str, layer: int, make_source: Callable[..., TensorSource]) -> None:
    source = make_source()
    first, second = packed_expert(format_name, source, layer, 0), packed_expert(format_name, source, layer, 1)
    layout = BlobLayout.of(first)
    blob = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.write(first, blob)
    views = layout.views(blob)
    assert [(n, type(t), t.shape, t.dtype) for n, t in views.items()] == [(n, type(t), t.shape, t.dtype) for n, t in first.items()]
    assert same(outputs(views), outputs(first)) and not same(outputs(first), outputs(second))

    other = torch.zeros_like(blob)
    layout.write(second, other)
    blob.copy_(other)  # one flat copy, as a transfer does it
    assert same(outputs(views), outputs(second))
    blob.zero_()
    assert not any(bool(out.any()) for out in outputs(views))


def test_everything_is_aligned_and_counted(format_name: str, make_source: Callable[..., TensorSource]) -> None:
    layout = BlobLayout.of(packed_expert(format_name, make_source(), 1))
    leaves = sorted((leaf for node in layout.fields.values() for leaf in _leaves(node)), key=lambda leaf: leaf.offset)
    assert all(leaf.offset % ALIGNMENT == 0 for leaf in leaves) and layout.nbytes % ALIGNMENT == 0
    ends = [leaf.offset + leaf.bytes for leaf in leaves]
    assert all(0 <= start.offset - end < ALIGNMENT for end, start in zip(ends, leaves[1:], strict=False))
    assert 0 <= layout.nbytes - ends[-1] < ALIGNMENT
    assert layout.device_type == ("cpu" if format_name == "qint4" else None)


@pytest.mark.parametrize("make_mode", [torch.inference_mode, torch.no_grad, nullcontext])
@pytest.mark.parametrize("use_mode", [torch.inference_mode, torch.no_grad, nullcontext])
def test_made_in_any_mode_used_in_any_mode(format_name: str, make_mode, use_mode, make_source: Callable[..., TensorSource]) -> None:
    """Case 3: each format, in both of torch's modes."""
    with make_mode():
        tensors = packed_expert(format_name, make_source())
        layout = BlobLayout.of(tensors)
    blob = torch.zeros(layout.nbytes, dtype=torch.uint8)
    with make_mode():
        layout.write(tensors, blob)
        views = layout.views(blob)
    with use_mode():
        blob.copy_(blob.clone())
        assert same(outputs(views), outputs(tensors))


def test_json_round_trip(format_name: str, make_source: Callable[..., TensorSource]) -> None:
    layout = BlobLayout.of(packed_expert(format_name, make_source()))
    assert BlobLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 70), st.sampled_from(["float32", "bfloat16", "uint8", "int64", "float8_e4m3fn"])), min_size=1, max_size=6
    )
)
def test_any_plain_tensors_round_trip(kinds: list[tuple[int, str]]) -> None:
    tensors = {f"t{i}": torch.arange(size).to(getattr(torch, dtype)) for i, (size, dtype) in enumerate(kinds)}
    layout = BlobLayout.of(tensors)
    blob = torch.full((layout.nbytes,), 255, dtype=torch.uint8)
    layout.write(tensors, blob)
    views = layout.views(blob)
    assert all(torch.equal(views[name].view(torch.uint8), tensors[name].view(torch.uint8)) for name in tensors)


def test_what_does_not_fit_is_refused(make_source: Callable[..., TensorSource]) -> None:
    tensors = packed_expert("qint8", make_source())
    layout = BlobLayout.of(tensors)
    arena = torch.zeros(2 * layout.nbytes + 1, dtype=torch.uint8)
    blob = arena[: layout.nbytes]
    for wrong in (blob[:-1], blob.view(torch.int8), arena[::2][: layout.nbytes], blob[None]):
        with pytest.raises(ValueError, match=rf"uint8 of shape \({layout.nbytes},\)"):
            layout.views(wrong)
    with pytest.raises(ValueError, match="multiple of 64 bytes; got 1"):
        layout.views(arena[1 : 1 + layout.nbytes])
    with pytest.raises(ValueError, match="not so: 'down_proj': experts"):
        layout.write({**tensors, "down_proj": tensors["gate_up_proj"]}, blob)
    with pytest.raises(ValueError, match="'extra'"):
        layout.write({**tensors, "extra": torch.ones(2)}, blob)
    with pytest.raises(ValueError, match="cpu only; the blob is on meta"):
        four = BlobLayout.of(packed_expert("qint4", make_source()))
        four.views(torch.zeros(four.nbytes, dtype=torch.uint8, device="meta"))


def test_foreign_classes_are_refused() -> None:
    with pytest.raises(TypeError, match="'w' is a Foreign"):
        BlobLayout.of({"w": torch.ones(2).as_subclass(type("Foreign", (torch.Tensor,), {}))})


def test_bad_json_is_refused() -> None:
    good = BlobLayout.of({"w": torch.ones(2, 16)}).to_json()
    leaf = good["fields"]["w"]
    for wrong in (
        {},
        {**good, "fields": 3},
        {**good, "fields": {"w": {**leaf, "dtype": "float33"}}},
        {**good, "fields": {"w": {**leaf, "offset": 3}}},
        {**good, "fields": {"w": {**leaf, "shape": [1000]}}},
        {**good, "fields": {"w": {"kind": "Module", "meta": {}, "inner": {}}}},
        {**good, "nbytes": 100},
    ):
        with pytest.raises(ValueError, match="A layout"):
            BlobLayout.from_json(wrong)
