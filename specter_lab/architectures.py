"""Which model types of the installed transformers this package takes, found out by building a tiny one of each.

There is no list of supported types: every causal-LM type is looked at, whatever version is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specter_lab.geometry import expert_counts, no_experts
from specter_lab.models import MoE
from specter_lab.opening import load_moe
from specter_lab.recipes import tiny_model
from specter_lab.router_kinds import router_kind


@dataclass(frozen=True)
class Architecture:
    """One model type: ``supported`` with everything, drafts included; ``without_drafter`` token by token at least.

    ``reason`` says why not. The rest is measured on a tiny random model of the type: how its ``router`` works, what
    stands beside the routed experts, how those are stored, and the kinds of layers in its ``cache``.

    >>> examine("mixtral").router
    'softmax, normalised; top-k'
    """

    model_type: str
    supported: bool
    without_drafter: bool = False
    reason: str = ""
    router: str = ""
    shared_experts: str = ""
    dense_layers: bool = False
    layout: str = ""
    cache: str = ""


def architectures(model_types: Sequence[str] | None = None) -> list[Architecture]:
    """Every causal-LM type with routed experts in the installed transformers (or those named), by name.

    Takes some 20 seconds: all modelling code is imported, and a tiny model of each type is built.

    >>> [row.supported for row in architectures(["mixtral", "qwen3_next", "jetmoe"])]
    [True, False, False]
    """
    return [examine(model_type) for model_type in (discover() if model_types is None else model_types)]


def discover() -> list[str]:
    """The causal-LM types whose experts go through the registry, or whose default config speaks of several experts."""
    with _quiet():
        return sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if in_registry(name) or _counts(name))


def in_registry(model_type: str) -> bool:
    """Whether the module of the type's model class has a class decorated for the experts registry.

    >>> in_registry("mixtral"), in_registry("jetmoe")
    (True, False)
    """
    try:
        module = sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]].__module__]
    except KeyError:  # named in one of the two mappings only
        return False
    return any(
        isinstance(thing, type) and hasattr(thing, "_apply_gate") and hasattr(getattr(thing, "forward", None), "__wrapped__")
        for thing in vars(module).values()
    )


def examine(model_type: str, model: Any = None) -> Architecture:
    """One type's row; ``model``: a tiny one of the type, if there is one already."""
    with _quiet():
        if not in_registry(model_type):
            return Architecture(model_type, False, reason=no_experts(CONFIG_MAPPING[model_type](), "its default config"))
        try:
            moe = load_moe(tiny_model(model_type) if model is None else model)
        except Exception as error:  # whatever it is, the table says it
            return Architecture(model_type, False, reason=f"No tiny model: {type(error).__name__}: {error}")
        return _measured(model_type, moe)


def as_json(rows: Sequence[Architecture]) -> dict[str, Any]:
    """What the command line prints with ``--json``."""
    return {"transformers": version("transformers"), "architectures": [asdict(row) for row in rows]}


def as_markdown(rows: Sequence[Architecture]) -> str:
    """The rows as a page."""
    full, alone, refused = (
        [row for row in rows if test(row)]
        for test in (lambda r: r.supported, lambda r: r.without_drafter and not r.supported, lambda r: not r.without_drafter)
    )
    lines = [
        f"# Model types of transformers {version('transformers')}",
        "",
        "Written by `python -m specter_lab architectures --markdown`: measured on a tiny random model of each causal-LM type.",
        f"{len(full)} types work with drafts, {len(alone)} without only, {len(refused)} not at all.",
        "A softmax over the chosen experts and a normalised softmax over all are the same numbers, so they have one name.",
        "",
        "| type | router | shared experts | dense layers | experts' layout | cache |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in full:
        dense = "yes" if row.dense_layers else ""
        lines.append(f"| {row.model_type} | {row.router} | {row.shared_experts} | {dense} | {row.layout} | {row.cache} |")
    lines += ["", "## Without drafts only", "", "Their caches can't be rolled back.", "", "| type | router | why |", "| --- | --- | --- |"]
    lines += [f"| {row.model_type} | {row.router} | {row.reason} |" for row in alone]
    lines += ["", "## Refused", "", "| type | why |", "| --- | --- |"]
    lines += [f"| {row.model_type} | {row.reason} |" for row in refused]
    return "\n".join(lines) + "\n"


def _measured(model_type: str, moe: MoE) -> Architecture:
    ids = torch.randint(0, moe.geometry.vocab_size, (1, 48), generator=torch.Generator().manual_seed(0))
    calls: dict[int, Any] = {}
    with torch.no_grad(), moe.seam.probed() as experts, moe.routers.watched(calls):
        cache: Any = moe.model(input_ids=ids, use_cache=True).cache
    last = moe.layers - 1
    router, module = moe.routers.modules[last], moe.seam.modules[last]
    parent = next(m for m in moe.model.modules() if module in m.children())
    outputs = [out for out in calls[last].output if out.is_floating_point()]
    beside = [t for t in (*router.parameters(), *router.buffers(), *calls[last].args[1:]) if isinstance(t, torch.Tensor)]
    shared = [name for name, _ in parent.named_children() if "shared" in name]
    own_gate = type(module)._apply_gate.__module__ != "transformers.integrations.moe"
    layout = ["gate and up" if module.has_gate else "up only"]
    layout += [name for name, there in (
        ("transposed", module.is_transposed), ("interleaved", not module.is_concatenated), ("biases", module.has_bias),
        ("own gate", module.has_gate and own_gate), ("norm after", module.has_post_expert_norm),
    ) if there]  # fmt: skip
    return Architecture(
        model_type,
        supported=not moe.rollback,
        without_drafter=True,
        reason=moe.rollback,
        router=router_kind(outputs[0], experts[last][2], experts[last][1], beside),
        shared_experts="gated" if any("gate" in name for name in shared) else "yes" if shared else "",
        dense_layers=moe.geometry.dense_layers > 0,
        layout=", ".join(layout),
        cache=", ".join(sorted({type(layer).__name__.removesuffix("Layer") for layer in cache.layers})),
    )


def _counts(model_type: str) -> dict[str, int]:
    if model_type not in CONFIG_MAPPING:
        return {}
    try:
        return expert_counts(CONFIG_MAPPING[model_type]())
    except Exception:  # a type without a valid default config has no default experts either
        return {}


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers tells much of what is odd in a default config; none of it is news here."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
