"""What packing did to the bytes, by component."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
import torch

from specter_lab.quantize.layer import PackedLayer
from specter_lab.quantize.layout import Leaf, Wrapped


def bytes_report(layers: Iterable[PackedLayer]) -> pd.DataFrame:
    """One row for each tensor name and format; the column ``bytes_after`` sums to the bank's bytes.

    ``kept_because`` says why a component isn't quantised. The row "(padding)" is what 64-byte alignment costs.

    >>> from specter_lab.quantize import ExpertBank, TensorSource
    >>> bank = ExpertBank.pack(TensorSource([[{"up_proj": torch.ones(16, 128)}]]), "qint8")
    >>> bank.report().loc["up_proj", "bytes_after"].item()
    2080
    """
    rows: list[tuple[object, ...]] = []
    padding, layers = 0, list(layers)
    dense = not any(isinstance(node, Wrapped) for layer in layers for node in layer.layout.fields.values())
    for layer in layers:
        experts = len(layer.blobs)
        padding += layer.blobs.numel() - experts * sum(node.bytes for node in layer.layout.fields.values())
        for name, node in layer.layout.fields.items():
            weights, before = layer.before[name]
            why = "the format is dense" if dense else _why(node)
            counts = (experts * weights, experts * before, experts * node.bytes)
            rows.append((name, format_of(node), isinstance(node, Wrapped), why, *counts))
    if padding:
        rows.append(("(padding)", "", False, "64-byte alignment", 0, 0, padding))
    keys = ["component", "format", "quantised", "kept_because"]
    table = pd.DataFrame(rows, columns=[*keys, "weights", "bytes_before", "bytes_after"])
    table = table.groupby(keys, sort=False, as_index=False).sum()
    table["bits_per_weight"] = 8 * table["bytes_after"] / table["weights"].where(table["weights"] > 0)
    return table.set_index("component")


def format_of(node: Leaf | Wrapped) -> str:
    """A packed tensor's format in words.

    >>> format_of(Leaf("bfloat16", (4, 16), 0))
    'bfloat16'
    """
    if isinstance(node, Leaf):
        return node.dtype
    name, group = node.meta["qtype"].removesuffix("_e4m3fn"), node.meta.get("group_size")
    return f"{name} group {group}" if group else name


def _why(node: Leaf | Wrapped) -> str:
    if isinstance(node, Wrapped):
        return ""
    return "fewer than two dimensions" if getattr(torch, node.dtype).is_floating_point else "not floating point"
