"""What a small forward tells of a model: how experts and routers are called, and whether its cache can roll back.

Three forwards of two tokens. The experts themselves don't run (they return zeros), so their weights needn't be there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from specter_lab.routers import RouterCall, Routers
from specter_lab.seam import ExpertsSeam


@dataclass(frozen=True)
class Probe:
    """``calls``: for each MoE layer its experts' first arguments (hidden states, ids, weights); ``routers`` likewise.

    ``cache_bytes_per_token`` is what each token adds to the cache. ``rollback``: empty if the cache comes back exactly
    after tokens are taken off, else what doesn't. ``copied``: whether a branch of the cache copies layers as a whole, being
    of other kinds than plain and sliding ones, and the bytes in it that don't grow.

    >>> import specter_lab as sl
    >>> sl.load_moe("tiny-moe").rollback
    ''
    """

    calls: dict[int, tuple[Tensor, Tensor, Tensor]]
    routers: dict[int, RouterCall]
    cache_bytes_per_token: int
    rollback: str
    copied: tuple[bool, int] = (False, 0)


def probe(model: Any, seam: ExpertsSeam, routers: Routers) -> Probe:
    """Run ``model`` on its first two token ids, three times, with experts that return zeros.

    Raises ``ValueError`` if a MoE layer or its router takes no part in it.
    """
    ids = torch.tensor([[0, 1]], device=model.device)
    watched: dict[int, RouterCall] = {}
    with torch.no_grad(), seam.probed() as calls, routers.watched(watched):
        cache: Any = model(input_ids=ids, use_cache=True).cache
        begun = _bytes(cache)
        if not all(layer in calls and layer in watched for layer in range(len(seam.modules))):
            absent = [layer for layer in range(len(seam.modules)) if layer not in calls]
            raise ValueError(
                f"Every MoE layer and its router must take part in a forward; of {len(seam.modules)} in {type(model).__name__}, "
                f"{absent or 'routers of some'} didn't. If it has towers besides its text model, pass the text model alone."
            )
        grown, rollback = roll_back(model, cache, ids)
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    fixed = 0 if plain else max(0, begun - grown * ids.shape[1])
    return Probe(dict(calls), watched, grown, rollback, (not plain, fixed))


def roll_back(model: Any, cache: Any, ids: Tensor) -> tuple[int, str]:
    """Bytes that a token adds to ``cache``, and what two more ``ids`` leave behind when they are taken off again: empty if nothing."""
    before = _bytes(cache)
    model(input_ids=ids, cache=cache, use_cache=True)
    grown = (_bytes(cache) - before) // ids.shape[1]
    if not cache.is_croppable:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in cache.layers if not layer.is_croppable}))
        return grown, f"its {type(cache).__name__}{kinds and f' ({kinds})'} says that it can't"
    cache.activate_past_recording()
    kept = dict(cache_state(cache, "cache"))
    model(input_ids=ids, cache=cache, use_cache=True)
    cache.crop(-ids.shape[1])
    left = dict(cache_state(cache, "cache"))
    changed = [name for name in {**kept, **left} if not _same(kept.get(name), left.get(name))]
    if not changed:
        return grown, ""
    kinds = ", ".join(sorted({type(layer).__name__ for layer in cache.layers}))
    return grown, f"its cache ({kinds}) keeps traces of them ({len(changed)}, for instance {min(changed)})"


def _bytes(cache: Any) -> int:
    return sum(
        {
            value.data_ptr(): value.numel() * value.element_size() for _, value in cache_state(cache, "") if isinstance(value, Tensor)
        }.values()
    )


def cache_state(value: Any, path: str, seen: frozenset[int] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Everything that ``value`` holds, by where it is: tensors (cloned if there is a ``path``) and plain values.

    >>> from transformers import DynamicCache
    >>> dict(cache_state(DynamicCache(), "cache"))["cache.offloading"]
    False
    """
    if isinstance(value, Tensor):
        yield path, value.clone() if path else value
    elif isinstance(value, int | float | bool | str):
        yield path, value
    elif id(value) not in seen:
        inside: Any = ()
        if isinstance(value, dict):
            inside = value.items()
        elif isinstance(value, list | tuple):
            inside = enumerate(value)
        elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module | PreTrainedConfig):
            inside = vars(value).items()
        for name, part in inside:
            yield from cache_state(part, f"{path}.{name}" if path else "", seen | {id(value)})


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
