"""Who would get which bytes, from shapes alone: nothing is loaded, packed or copied."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from specter_lab.baselines import named
from specter_lab.bundled import bundled_model
from specter_lab.geometry import geometry_of
from specter_lab.hardware import Case, hardware
from specter_lab.loading.folder import is_prepared
from specter_lab.loading.streamed import StreamedModel
from specter_lab.machines.simulated import SimulatedMachine
from specter_lab.memory import BudgetError, MemoryPlan, divide_memory
from specter_lab.models import MoE
from specter_lab.opening import BUNDLED, load_moe
from specter_lab.pipeline import Pipeline
from specter_lab.probe import Probe, cache_state
from specter_lab.recorded import fingerprint_of
from specter_lab.replay import ReplayTarget, ShapeStore
from specter_lab.seam import ExpertsSeam
from specter_lab.shapes import ModelShape

System = str | Callable[..., Pipeline] | Pipeline


def plan_memory(
    target: Any,
    system: System = "on_demand",
    budget: int | str | None = None,
    *,
    slots: int | Sequence[int] | None = None,
    context_length: int | None = None,
    dtype: str = "auto",
    **options: Any,
) -> MemoryPlan:
    """Divide ``budget`` (bytes, or "13MB", "24GiB") as ``system`` would, before anything is loaded.

    ``target``: a ``MoE``, "tiny-moe", a model's folder or hub id (its headers are read, in ``dtype``), or a model or case of
    ``hardware()`` by name or itself; a case brings its own budget. ``system``: a name of ``baselines``, a function like
    those, or a pipeline. ``slots`` a layer instead of a budget, as in ``Pipeline``. KV is counted for ``context_length``
    tokens (512, if not given). ``options`` are the system's.

    Residuals are counted at 8.6 bits a weight unless the system gets its ``residual=`` bank: how well they pack is known
    when they are built. Raises ``BudgetError`` (a ``ValueError``) with the missing bytes where the system doesn't fit.

    >>> import specter_lab as sl
    >>> {name: min(sl.plan_memory("tiny-moe", name, "13MB").slots) for name in ("on_demand", "specter", "residual_lookahead")}
    {'on_demand': 13, 'specter': 7, 'residual_lookahead': 12}
    """
    name = system if isinstance(system, str) else getattr(system, "__name__", type(system).__name__)
    if isinstance(target, str) and target in hardware().cases:
        target = hardware().cases[target]
    if isinstance(target, Case):
        context_length = context_length or 512
        if budget is None and slots is None:
            budget = target.device_bytes + context_length * target.model.kv_bytes_per_token
    sizes: dict[str, Any] = {"slots": slots, "memory": budget, "context_length": context_length}
    try:
        if isinstance(system, Pipeline):
            pieces: dict[str, Any] = {"drafter": system.drafter, "store": system.residency.store, "on_arrival": system.residency.on_arrival}
            pieces["draft_ahead"] = system.assembly.draft_ahead
            return divide_memory(system.target, **pieces, **sizes)
        shapes = stand_in(target, dtype)
        if name == "activation_aware" and "library" not in options:  # what it has recorded takes no device memory
            options["library"] = [SimpleNamespace(experts=torch.zeros(1, shapes.layers, 1, dtype=torch.int64))]
        build = named(system) if isinstance(system, str) else system
        with build(shapes, machine=SimulatedMachine(), **sizes, **options) as pipeline:
            return pipeline.plan
    except BudgetError as error:
        raise BudgetError(f"{name} doesn't fit: {error}", smallest=error.smallest, budget=error.budget) from error


def stand_in(target: Any, dtype: str = "auto") -> ReplayTarget:
    """What stands for a target when only sizes matter; ``target`` and ``dtype`` as in ``plan_memory``.

    >>> stand_in("deepseek_v2_lite").layers
    26
    """
    if isinstance(target, ReplayTarget):
        return target
    if isinstance(target, Case | ModelShape):
        shape = target.model if isinstance(target, Case) else target
        return ReplayTarget(shape.geometry, shape.name, bits={"qint4": 8 * shape.int4_expert_bytes / shape.expert_weights})
    presets = {**hardware().cases, **hardware().models}
    if isinstance(target, str) and target in presets:
        return stand_in(presets[target])
    near = difflib.get_close_matches(str(target), presets, n=3, cutoff=0.7)
    if isinstance(target, str) and near and not Path(target).exists():
        raise ValueError(f"A target is a model, its folder or hub id, or a preset; got {target!r}. Did you mean {' or '.join(near)}?")
    if isinstance(target, nn.Module) or (isinstance(target, str | Path) and is_prepared(target)):
        target = load_moe(target) if isinstance(target, nn.Module) else load_moe(target, dtype=dtype, mapped=True)
    if isinstance(target, MoE):
        target.lease()
        try:
            sizes = [target.store.blob_bytes(layer) for layer in range(target.layers)]
        finally:
            target.release()
        return ReplayTarget(
            target.geometry,
            target.name,
            dtype=target.dtype,
            store=ShapeStore(target.geometry.experts, sizes),
            fingerprint=fingerprint_of(target),
        )
    return _from_headers(str(target), dtype)


def _from_headers(name: str, dtype: str) -> ReplayTarget:
    """A checkpoint's shape: its modules and a small forward on the meta device, the sizes of its experts as stored."""
    with StreamedModel(bundled_model() if name == BUNDLED else name, dtype=dtype) as streamed:
        twin, stored = streamed.twin, streamed.experts.nbytes()
    twin.tie_weights()
    seam, ids = ExpertsSeam(twin), torch.zeros(1, 2, dtype=torch.int64, device="meta")
    with torch.no_grad(), seam.probed() as calls:
        cache = twin(input_ids=ids, use_cache=True).cache
        before = _nbytes(cache)
        twin(input_ids=ids, cache=cache, use_cache=True)
    geometry = geometry_of(twin, seam, Probe(dict(calls), {}, (_nbytes(cache) - before) // ids.shape[1], ""))
    full = sum(n * size for n, size in zip(geometry.experts, geometry.expert_bytes, strict=True))
    sizes = [round(size * stored / full) for size in geometry.expert_bytes]
    return ReplayTarget(geometry, name, dtype=twin.dtype, store=ShapeStore(geometry.experts, sizes))


def _nbytes(cache: Any) -> int:
    tensors = {id(value): value for _, value in cache_state(cache, "") if isinstance(value, Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
