"""Slots for each layer from what its misses would be: the same everywhere is rarely the best division of a budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class Routed(Protocol):
    """Recorded or generated routing: a ``RoutingLog``, a ``SyntheticText``."""

    @property
    def experts(self) -> Any:
        """(token, layer, rank) ids, -1 where a rank is unused."""

    @property
    def expert_counts(self) -> tuple[int, ...]:
        """Experts of each layer."""


def miss_curves(texts: Sequence[Routed], window: int = 1) -> list[np.ndarray]:
    """For each layer, misses[s] = experts missed with s slots under LRU, all in one pass; s = 0 .. experts of the layer.

    ``window`` tokens are one event, as in a verification: their union is asked for at once. LRU has the inclusion property:
    an expert whose last event lies d distinct experts back is a hit with d slots or more.

    Source: Mattson et al., "Evaluation techniques for storage hierarchies" (1970), stack distances.

    >>> import torch; from types import SimpleNamespace
    >>> text = SimpleNamespace(experts=torch.tensor([[[0]], [[1]], [[0]]]), expert_counts=(2,))
    >>> miss_curves([text])[0].tolist()
    [3, 3, 2]
    """
    if not texts or window < 1:
        raise ValueError(f"Curves need a text and windows of at least one token; got {len(texts)} texts and window={window}. Record one.")
    counts = texts[0].expert_counts
    curves = [np.zeros(count + 1, dtype=int) for count in counts]
    for text in texts:
        experts = np.asarray(text.experts)
        for layer, curve in enumerate(curves):
            stack: list[int] = []  # most recent first
            for start in range(0, len(experts), window):
                event = np.unique(experts[start : start + window, layer])
                needed = [int(expert) for expert in event if expert >= 0]
                for expert in needed:
                    depth = stack.index(expert) + 1 if expert in stack else len(curve)
                    curve[: min(depth, len(curve))] += 1
                stack = needed + [expert for expert in stack if expert not in needed]
    return curves


def divide_slots(curves: Sequence[np.ndarray], total: int) -> list[int]:
    """``total`` slots over the layers, at least one each, one by one where the next saves the most misses a slot.

    A curve needn't be convex, so each step looks as far ahead as pays best. ``ValueError`` for fewer slots than layers.

    >>> divide_slots([np.array([9, 8, 2, 2]), np.array([9, 5, 4, 3])], total=4)
    [2, 2]
    """
    if total < len(curves):
        raise ValueError(f"Each of {len(curves)} layers needs at least one slot; got {total}. Raise the memory.")
    slots, left = [1] * len(curves), min(total, sum(len(curve) - 1 for curve in curves)) - len(curves)
    while left:
        steps = (
            ((curve[have] - curve[have + more]) / more, -layer, -more)
            for layer, (curve, have) in enumerate(zip(curves, slots, strict=True))
            for more in range(1, min(len(curve) - 1 - have, left) + 1)
        )
        _, layer, more = max(steps)
        slots[-layer] -= more
        left += more
    return slots
