"""The shape of a MoE read from its modules, and what is said of a model that can't be taken apart."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from specter_lab.probe import Probe
from specter_lab.records import ExpertKey, Geometry
from specter_lab.seam import ExpertsSeam, experts_modules

_EXPERT_COUNT = re.compile(r"(.*_)?n(um)?(_local|_routed)?_experts")


def geometry_of(model: Any, seam: ExpertsSeam, probe: Probe) -> Geometry:
    """Layers, experts and bytes of ``model``, in its loaded dtype; widths and cache bytes as the probe saw them.

    >>> import specter_lab as sl
    >>> sl.load_moe("tiny-moe").geometry.hidden_size
    128
    """
    paths = list(experts_modules(model))
    config = model.config.get_text_config()
    parents = [model.get_submodule(path.rpartition(".")[0]) for path in paths]
    every = [*model.parameters(), *model.buffers()]
    return Geometry(
        model_type=config.model_type,
        decoder_layers=tuple(int(next((part for part in path.split(".") if part.isdigit()), place)) for place, path in enumerate(paths)),
        dense_layers=config.num_hidden_layers - len(paths),
        experts=tuple(seam.experts(layer) for layer in range(len(paths))),
        experts_per_token=max(ids.shape[-1] for _, ids, _ in probe.calls.values()),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_positions=getattr(config, "max_position_embeddings", None) or sys.maxsize,  # some have no such bound
        expert_bytes=tuple(_bytes(seam.tensors(ExpertKey(layer, 0)).values()) for layer in range(len(paths))),
        shared_expert_bytes=_bytes(p for parent in parents for name, p in parent.named_parameters() if "shared" in name),
        non_expert_bytes=_bytes(every) - _bytes(p for module in seam.modules for p in module._parameters.values()),
        kv_bytes_per_token=probe.cache_bytes_per_token,
    )


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The router of each MoE layer, in layer order; ``ValueError`` for a layer without one beside its experts.

    >>> import specter_lab as sl
    >>> len(routers_of(sl.load_moe("tiny-moe").model))
    8
    """
    return [_router(model, path) for path in experts_modules(model)]


def expert_counts(config: Any) -> dict[str, int]:
    """The fields of a config, or of the configs in it, that say it has more than one expert.

    >>> from transformers import AutoConfig
    >>> expert_counts(AutoConfig.for_model("mixtral")), expert_counts(AutoConfig.for_model("llama"))
    ({'num_local_experts': 8}, {})
    """

    def inside(fields: dict[str, Any]) -> Iterator[tuple[str, int]]:
        for name, value in fields.items():
            if isinstance(value, dict):
                yield from inside(value)
            elif type(value) is int and value > 1 and _EXPERT_COUNT.fullmatch(str(name)) and "shared" not in name:
                yield str(name), value

    return dict(inside(config.to_dict()))


def refuse_unsupported(model: Any, name: str) -> None:
    """``ValueError`` for a model without experts in the registry, dense or not, and for one in training mode."""
    if not experts_modules(model):
        raise ValueError(no_experts(model.config, name))
    if model.training:
        raise ValueError(f"Inference needs a model in evaluation mode; {name} is in training mode. Call model.eval() first.")


def refuse_absent(model: Any, name: str, *, experts: bool) -> None:
    """``ValueError`` for weights that aren't in memory: those of the experts, or all others.

    >>> import specter_lab as sl
    >>> refuse_absent(sl.load_moe("tiny-moe").model, "mine", experts=True)
    """
    of_experts = {f"{path}.{leaf}" for path, module in experts_modules(model).items() for leaf in module._parameters}
    absent = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta and (n in of_experts) == experts]
    if absent:
        raise ValueError(
            f"A model's weights must be in memory when it is taken apart; {len(absent)} of {name} are on the meta device, for instance "
            f"{absent[0]}: a device_map left them on disk or behind hooks. Load it on one device, or from its folder: "
            "load_moe(folder, stream=True), or prepare_moe once and load_moe(folder, mapped=True) for experts that stay on disk."
        )


def no_experts(config: Any, name: str) -> str:
    """What is said of a model in which no experts were found, by its config.

    >>> from transformers import AutoConfig
    >>> no_experts(AutoConfig.for_model("llama"), "mine")[:53]
    'specter_lab offloads routed experts; llama (mine) has'
    """
    model_type = config.get_text_config().model_type
    counts = ", ".join(f"{field}={value}" for field, value in expert_counts(config).items())
    if counts:
        return (
            f"Experts must be dispatched through transformers' experts registry; those of {model_type} ({name}: {counts}) aren't, "
            f"so nothing can be put between router and experts. Use a model type whose experts class is decorated for it: "
            "python -m specter_lab architectures lists them."
        )
    return (
        f"specter_lab offloads routed experts; {model_type} ({name}) has none (a dense model). "
        "Use a mixture-of-experts model, for instance 'tiny-moe'."
    )


def _router(model: nn.Module, experts_path: str) -> nn.Module:
    parent = model.get_submodule(experts_path.rpartition(".")[0])
    found = [child for name, child in parent.named_children() if name in ("gate", "router")]
    if not found:
        raise ValueError(
            f"A router is a child named gate or router beside the experts; {type(parent).__name__} ({experts_path}) has "
            f"{[name for name, _ in parent.named_children()]}. This architecture isn't supported."
        )
    return found[0]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())
