"""Device slots: which expert sits where, and what state it is in.

A slot is absent -> loading -> resident. It is taken when the copy is submitted, in use while it computes, and never
evicted while it loads or is in use. Each layer has slots of its own. Callers hold the machine's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from specter_lab.pieces import EvictionPolicy, ExpertStore
from specter_lab.records import ExpertKey

_POISON = 0xFF  # every float format reads all-ones as NaN, so a stale read can't hide


class Residency:
    """``slots[layer]`` device slots a layer, filled from ``store``'s blobs.

    Where blobs are residual or compressed, an expert is rebuilt at each use, or once ``on_arrival``: then its slot is large
    enough for the rebuilt one. ``poison`` overwrites a slot with NaN bytes when its expert is forgotten (tests use it).

    >>> import specter_lab as sl
    >>> with sl.load_moe("tiny-moe") as moe: Residency(moe.store, [4] * 8, sl.LRU()).state(ExpertKey(0, 0))
    'absent'
    """

    def __init__(
        self,
        store: ExpertStore,
        slots: Sequence[int],
        eviction: EvictionPolicy,
        *,
        on_arrival: bool = False,
        poison: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        if len(slots) != store.layers or min(slots) < 1:
            raise ValueError(
                f"Each MoE layer needs at least one slot; got {list(slots)} for {store.layers} layers. "
                f"Give one number of at least 1 a layer."
            )
        self.store, self.eviction, self.poison = store, eviction, poison
        self.slots = tuple(min(n, store.experts(layer)) for layer, n in enumerate(slots))
        self._rebuild: Callable[..., Mapping[str, Tensor]] | None = getattr(store, "rebuild", None)
        self.on_arrival = on_arrival and self.rebuilds
        sizes = slot_bytes(store, on_arrival=on_arrival)
        self._pool = [torch.zeros(n, size, dtype=torch.uint8, device=device) for n, size in zip(self.slots, sizes, strict=True)]
        self._rows = [list(pool.unbind()) for pool in self._pool]
        self._weights: list[list[Mapping[str, Tensor]]] = [
            [{} if self.rebuilds else store.weights(layer, blob) for blob in rows] for layer, rows in enumerate(self._rows)
        ]
        self._free = [list(range(n)) for n in self.slots]
        self._slot: list[dict[ExpertKey, int]] = [{} for _ in self.slots]
        self._loading: set[ExpertKey] = set()
        self._in_use: set[ExpertKey] = set()
        self._brought: dict[ExpertKey, int] = {}
        self._rebuilt: set[ExpertKey] = set()

    @property
    def rebuilds(self) -> bool:
        """Whether what arrives is no expert yet, but must be rebuilt."""
        return self._rebuild is not None

    def to_rebuild(self, key: ExpertKey) -> bool:
        """Whether the acquired ``key`` must be rebuilt before it is used."""
        return self.rebuilds and key not in self._rebuilt

    @property
    def bytes(self) -> int:
        """Device bytes of all slots."""
        return sum(pool.numel() for pool in self._pool)

    def state(self, key: ExpertKey) -> str:
        """ "absent", "loading" or "resident"."""
        if key not in self._slot[key.layer]:
            return "absent"
        return "loading" if key in self._loading else "resident"

    def free(self, layer: int) -> int:
        """Empty slots of that layer."""
        return len(self._free[layer])

    def residents(self, layer: int) -> list[int]:
        """Experts of that layer that can be computed with, in id order."""
        return sorted(k.expert for k in self._slot[layer] if k not in self._loading)

    def request_of(self, key: ExpertKey) -> int:
        """The request that brought (or is bringing) ``key``; -1 if it came before this request's time."""
        return self._brought.get(key, -1)

    def place(
        self, key: ExpertKey, request_id: int, protected: Collection[ExpertKey], *, spare: int = 0
    ) -> tuple[int, ExpertKey | None] | None:
        """Take a slot for ``key``: a free one, or that of the policy's victim among the unprotected.

        ``spare`` slots must stay neither loading nor in use. Returns (slot, victim or None), or None if there is none now.
        """
        layer, taken = key.layer, self._slot[key.layer]
        if spare:
            bound = sum(k.layer == layer for k in self._loading | self._in_use)  # a handful at most: the link's queue is short
            if self.slots[layer] - bound <= spare:
                return None
        victim = None
        if self._free[layer]:
            slot = self._free[layer].pop(0)
        else:
            candidates = list(taken.keys() - protected - self._loading - self._in_use)
            if not candidates:
                return None
            victim = self.eviction.victim(candidates)
            slot = self._forget(victim)
        taken[key] = slot
        self._loading.add(key)
        self._brought[key] = request_id
        return slot, victim

    def destination(self, layer: int, slot: int) -> Tensor:
        """(blob_bytes,) uint8: where a copy for that slot goes."""
        row = self._rows[layer][slot]
        return row[: self.store.blob_bytes(layer)] if self.on_arrival else row

    def arrived(self, key: ExpertKey) -> None:
        """The copy is done: loading -> resident."""
        self._loading.remove(key)
        self.eviction.loaded(key)

    def acquire(self, key: ExpertKey) -> Mapping[str, Tensor]:
        """Tensors of a resident expert, safe from eviction until ``release``; of a residual, ``rebuild`` gives them."""
        assert self.state(key) == "resident", f"{key} is {self.state(key)}: only residents can be used"
        self._in_use.add(key)
        return self._weights[key.layer][self._slot[key.layer][key]]

    def rebuild(self, key: ExpertKey) -> Mapping[str, Tensor]:
        """The exact tensors of an acquired expert that isn't rebuilt yet; ``on_arrival`` they stay in its slot."""
        assert self._rebuild is not None
        slot = self._slot[key.layer][key]
        if not self.on_arrival:
            return self._rebuild(key, self._rows[key.layer][slot])
        tensors = self._rebuild(key, self.destination(key.layer, slot).clone(), self._rows[key.layer][slot])
        self._weights[key.layer][slot] = tensors
        self._rebuilt.add(key)
        return tensors

    def release(self, key: ExpertKey, *, used: bool = True) -> None:
        """The computation with ``key`` is over; ``used``: eviction is told so."""
        self._in_use.discard(key)
        if used:
            self.eviction.used(key)

    def new_request(self) -> None:
        """Residents stay, but belong to no request of the coming trace."""
        self._brought.clear()

    def forget_all(self) -> None:
        """Every slot is free again, whatever state it was in; no copy may be on its way."""
        self._loading.clear()
        self._in_use.clear()
        self._brought.clear()
        for layer, taken in enumerate(self._slot):
            for key in sorted(taken):
                self._forget(key)
            self._free[layer] = list(range(self.slots[layer]))

    def _forget(self, key: ExpertKey) -> int:
        slot = self._slot[key.layer].pop(key)
        self._brought.pop(key, None)
        self._rebuilt.discard(key)
        self.eviction.forgotten(key)
        if self.poison:
            self._rows[key.layer][slot].fill_(_POISON)
        return slot


def slot_bytes(store: ExpertStore, *, on_arrival: bool) -> list[int]:
    """What a slot of each layer takes: a blob of ``store``, or the expert that is rebuilt from it ``on_arrival``.

    >>> import specter_lab as sl
    >>> with sl.load_moe("tiny-moe") as moe: slot_bytes(moe.store, on_arrival=True)[0]
    98304
    """
    size = getattr(store, "rebuilt_bytes", store.blob_bytes) if on_arrival else store.blob_bytes
    return [size(layer) for layer in range(store.layers)]
