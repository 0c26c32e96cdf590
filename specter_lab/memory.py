"""Who gets which bytes of device memory. Equal memory is the rule of every comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specter_lab.offload.residency import slot_bytes
from specter_lab.pieces import Drafter, ExpertStore
from specter_lab.records import DeviceBytes
from specter_lab.scratch import scratch_bytes

if TYPE_CHECKING:
    from specter_lab.models import MoE
    from specter_lab.replay import ReplayTarget


@dataclass(frozen=True)
class MemoryPlan:
    """Slots for each layer and the device bytes of everything, KV counted for ``context_length`` tokens.

    >>> import specter_lab as sl
    >>> sl.plan_memory("tiny-moe", "on_demand", "13MB").slots
    (14, 14, 14, 13, 13, 13, 13, 13)
    """

    slots: tuple[int, ...]
    device: DeviceBytes
    context_length: int
    budget: int | None


class BudgetError(ValueError):
    """A budget of ``budget`` bytes that doesn't hold one slot a layer: ``smallest`` does.

    >>> BudgetError("too small", smallest=12, budget=10).short
    2
    """

    def __init__(self, message: str, *, smallest: int, budget: int) -> None:
        super().__init__(message)
        self.smallest, self.budget = smallest, budget

    @property
    def short(self) -> int:
        """Bytes that are missing."""
        return self.smallest - self.budget


def parse_bytes(size: int | str) -> int:
    """Bytes as a number, or as a string like "8GiB", "500MB" (as ``device_map`` budgets are written).

    >>> parse_bytes("2KiB")
    2048
    """
    from accelerate.utils import convert_file_size_to_int

    try:
        return int(convert_file_size_to_int(size))
    except (ValueError, AttributeError) as error:
        raise ValueError(f"A memory budget is a number of bytes or a size such as '8GiB' or '500MB'; got {size!r}.") from error


def divide_memory(
    target: MoE | ReplayTarget,
    *,
    drafter: Drafter | None = None,
    store: ExpertStore | None = None,
    on_arrival: bool = False,
    slots: int | Sequence[int] | None = None,
    memory: int | str | None = None,
    context_length: int | None = None,
    draft_ahead: bool = False,
) -> MemoryPlan:
    """Give the target's slots what a budget leaves after non-expert weights, the drafter's own weights and cache, buffers and KV.

    ``slots``: so many a layer (one number, or one for each layer), or ``memory``: a total of device bytes; with neither,
    a quarter of each layer's experts. ``store``: what crosses the link (the target's own experts, if not given), and with
    it what a slot holds, but for experts that are rebuilt ``on_arrival``. ``draft_ahead``: with what a draft keeps
    beside the target's cache while it goes on during verifications. Slots that a
    budget leaves over go to the first layers.
    Raises ``ValueError`` for both at once, and ``BudgetError`` for a budget below one slot a layer.

    >>> import specter_lab as sl
    >>> with sl.load_moe("tiny-moe") as moe: divide_memory(moe, memory="12MB").device.total <= 12_000_000
    True
    """
    geometry, store = target.geometry, store or target.store
    if slots is not None and memory is not None:
        raise ValueError(f"A plan follows either slots or memory; got slots={slots!r} and memory={memory!r}. Leave one of them out.")
    context = min(context_length or 512, geometry.max_positions)
    sizes = slot_bytes(store, on_arrival=on_arrival)
    # stored narrower than computed (or as a residual): one expert at a time is widened (or rebuilt, then widened) at use
    buffers = max((wide for wide, size in zip(geometry.expert_bytes, sizes, strict=True) if wide > size), default=0)
    if hasattr(store, "rebuilt_bytes"):
        buffers += max((store.blob_bytes if on_arrival else store.rebuilt_bytes)(layer) for layer in range(store.layers))
    draft = getattr(getattr(drafter, "bank", None), "nbytes", 0) + getattr(drafter, "weight_bytes", 0)
    kv = (geometry.kv_bytes_per_token + getattr(drafter, "kv_bytes_per_token", 0)) * context
    if draft_ahead:
        kv += scratch_bytes(target, context)
    fixed = DeviceBytes(geometry.non_expert_bytes, draft, 0, buffers, kv)
    budget = None
    if memory is not None:
        budget = parse_bytes(memory)
        counts = _fill(budget - fixed.total, sizes, geometry.experts)
        if not counts:
            smallest = fixed.total + sum(sizes)
            more, less = (" and a draft ahead", "leave draft_ahead out, ") if draft_ahead else ("", "")
            raise BudgetError(
                f"The smallest legal cache is one slot a layer: {smallest:,} bytes here ({fixed.non_expert:,} non-expert, "
                f"{fixed.draft:,} draft, {fixed.buffers:,} buffers, {fixed.kv:,} KV for {context} tokens{more}, {sum(sizes):,} slots); "
                f"the budget is {budget:,}, {smallest - budget:,} short. "
                f"Raise it, shorten context_length, {less}or use a smaller draft format.",
                smallest=smallest, budget=budget,
            )  # fmt: skip
    elif isinstance(slots, Sequence):
        counts = [int(n) for n in slots]
    else:
        counts = [min(slots if slots is not None else -(-n // 4), n) for n in geometry.experts]
    if len(counts) != store.layers or min(counts) < 1:
        raise ValueError(
            f"The smallest legal cache is one slot a layer; got {slots!r} for {store.layers} MoE layers. Give 1 or more for each."
        )
    counts = [min(n, most) for n, most in zip(counts, geometry.experts, strict=True)]
    used = sum(n * size for n, size in zip(counts, sizes, strict=True))
    device = DeviceBytes(fixed.non_expert, fixed.draft, used, fixed.buffers, fixed.kv)
    return MemoryPlan(tuple(counts), device, context, budget)


def _fill(room: int, sizes: Sequence[int], experts: Sequence[int]) -> list[int]:
    """One slot a layer, round after round, while they fit; empty if the first round doesn't."""
    if sum(sizes) > room:
        return []
    counts = [0] * len(sizes)
    grew = True
    while grew:
        grew = False
        for layer, size in enumerate(sizes):
            if size <= room and counts[layer] < experts[layer]:
                counts[layer] += 1
                room -= size
                grew = True
    return counts
