"""Where each tensor of a model comes from in its checkpoint, by the conversion tables of the installed transformers.

Checkpoints keep the names of their time (an expert a key, or all in one tensor; w1/w3/w2, or gate, up and down), models
have theirs. transformers holds what lies between: renamings, and converters with operations on tensors. Nothing here
knows a model type: the same converters run here, on one expert instead of on all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from specter_lab.loading.checkpoint import Checkpoint
from specter_lab.quantize import Mxfp4Tensor


@dataclass(frozen=True)
class Origin:
    """One of the model's tensors: its checkpoint keys by source pattern, in order, and what turns them into it.

    >>> Origin("model.norm.weight", {None: ["model.norm.weight"]}, None).splits
    True
    """

    target: str
    keys: Mapping[str | None, list[str]]
    converter: WeightConverter | None

    @property
    def splits(self) -> bool:
        """Whether one expert can be converted without the others: no operation may mix the first dimension."""
        if self.converter is None:
            return True
        return len(self.converter.target_patterns) == 1 and all(_keeps_experts_apart(op) for op in self.converter.operations)

    def fault(self, checkpoint: Checkpoint, experts: int) -> str | None:
        """Why so many experts can't be read, if they can't."""
        for pattern, keys in self.keys.items():
            found = len(keys) if self._expert_a_key else checkpoint.shape(keys[0])[0]
            if found != experts:
                return f"{self.target}: {found} of {experts} experts have {pattern or keys[0]}"
            dtype = checkpoint.dtype(keys[0])
            if dtype is None or dtype.is_floating_point == isinstance(self, PackedOrigin):
                return f"{self.target}: {keys[0]} holds neither plain floats nor MXFP4"
        return None

    def read_expert(self, checkpoint: Checkpoint, expert: int) -> Tensor:
        """That expert's own slice of the model's stacked tensor, in the checkpoint's dtype."""
        if self.converter is not None and self._expert_a_key and all(_joins_rows(op) for op in self.converter.operations):
            # what nearly every checkpoint has, in one read and without a copy (of which the C library keeps some in reserve)
            return checkpoint.read_joined(
                [self.keys[pattern][expert] for pattern in self.converter.source_patterns if pattern in self.keys]
            )
        if self._expert_a_key:  # a stack of one, which spares the operation that stacks a copy
            tensors: Any = {pattern: checkpoint.read(keys[expert])[None] for pattern, keys in self.keys.items()}
        else:
            tensors = {pattern: checkpoint.read(keys[0], expert) for pattern, keys in self.keys.items()}
        if self.converter is not None:
            patterns = {"source_patterns": self.converter.source_patterns, "target_patterns": self.converter.target_patterns}
            for op in self.converter.operations:
                tensors = op.convert(tensors, **patterns, full_layer_name=self.target, model=None, config=None)
        result: Tensor
        (result,) = tensors.values()
        return result[0]

    @property
    def _expert_a_key(self) -> bool:
        return self.converter is not None and any(isinstance(op, MergeModulelist) for op in self.converter.operations)


@dataclass(frozen=True)
class PackedOrigin(Origin):
    """A stacked tensor that the checkpoint holds in MXFP4: ``keys`` has "blocks" and "scales".

    >>> PackedOrigin("down_proj", {"blocks": ["down_proj_blocks"], "scales": ["down_proj_scales"]}, None).splits
    True
    """

    def read_expert(self, checkpoint: Checkpoint, expert: int) -> Tensor:
        """An ``Mxfp4Tensor``."""
        return Mxfp4Tensor(*(checkpoint.read(self.keys[part][0], expert)[0] for part in ("blocks", "scales")))


def find_origins(twin: Any, checkpoint: Checkpoint) -> dict[str, Origin]:
    """The origin of each tensor of ``twin`` (a model, on the meta device say) that ``checkpoint`` has.

    >>> from transformers import AutoConfig; from specter_lab.bundled import bundled_model
    >>> from specter_lab.loading.skeleton import meta_twin
    >>> twin = meta_twin(AutoConfig.from_pretrained(bundled_model()), "bfloat16")
    >>> with Checkpoint(bundled_model()) as checkpoint: origins = find_origins(twin, checkpoint)
    >>> len(origins["model.layers.0.mlp.experts.down_proj"].keys["mlp.experts.*.down_proj.weight"])
    24
    """
    mapping = get_model_conversion_mapping(twin)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    wanted = twin.state_dict()
    found: dict[str, dict[str | None, list[str]]] = {}
    others = {}
    for key in checkpoint.keys:
        target, pattern = rename_source_key(key, renamings, converters, twin.base_model_prefix, wanted)
        if target not in wanted and key in wanted:  # as transformers does: a key that was the model's own already
            target, pattern = key, None
        if target in wanted:
            found.setdefault(target, {}).setdefault(pattern, []).append(key)
        else:
            others[target] = key
    origins = {}
    for target, keys in found.items():
        first = next(iter(keys))
        origins[target] = Origin(target, keys, None if first is None else converter_of[first])
    for name, blocks in others.items():
        target = name.removesuffix("_blocks")
        if target in wanted and f"{target}_scales" in others:
            origins[target] = PackedOrigin(target, {"blocks": [blocks], "scales": [others[f"{target}_scales"]]}, None)
    return origins


def _joins_rows(op: Any) -> bool:
    return isinstance(op, MergeModulelist) or (isinstance(op, Concatenate) and op.dim == 1)


def _keeps_experts_apart(op: Any) -> bool:
    if isinstance(op, MergeModulelist):
        return op.dim == 0
    if isinstance(op, (Concatenate, Chunk, Interleave)):
        return op.dim > 0
    return isinstance(op, Transpose) and min(op.dim0, op.dim1) > 0 and not op.check_dims
