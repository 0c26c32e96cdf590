"""A model without its routed experts: everything else is real, their parameters are on the meta device."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.initialization import no_init_weights
from transformers.modeling_utils import LoadStateDictConfig

from specter_lab.loading.checkpoint import Checkpoint
from specter_lab.seam import experts_modules


def meta_twin(config: Any, dtype: torch.dtype) -> Any:
    """The whole model on the meta device: names, shapes and modules, no memory.

    >>> from transformers import AutoConfig; from specter_lab.bundled import bundled_model
    >>> sum(p.numel() for p in meta_twin(AutoConfig.from_pretrained(bundled_model()), torch.bfloat16).parameters()) > 10**7
    True
    """
    with torch.device("meta"), no_init_weights():
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()


def build_skeleton(config: Any, twin: Any, device: torch.device) -> Any:
    """A model like ``twin`` with only its experts on meta; parameters are not initialised, buffers are.

    >>> from transformers import AutoConfig; from specter_lab.bundled import bundled_model
    >>> config = AutoConfig.from_pretrained(bundled_model())
    >>> model = build_skeleton(config, meta_twin(config, torch.bfloat16), torch.device("cpu"))
    >>> sorted({name.rpartition(".")[2] for name, p in model.named_parameters() if p.is_meta})
    ['down_proj', 'gate_up_proj']
    """
    classes = {type(module) for module in experts_modules(twin).values()}
    with _born_on_meta(classes), no_init_weights():
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=twin.dtype).eval()
    if device.type != "cpu":
        for module in model.modules():  # buffers only: parameters come from the checkpoint, right to their device
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = buffer.to(device)
    return model


def fill_skeleton(model: Any, checkpoint: Checkpoint, experts: Collection[str], expert_keys: Collection[str], device: torch.device) -> None:
    """Read everything but ``expert_keys`` into ``model``, as transformers itself does, and tie what is tied.

    ``experts``: names of the parameters that stay on meta. ValueError for missing weights, other shapes, and what
    can't be converted.

    >>> from specter_lab.loading.streamed import StreamedModel; from specter_lab.bundled import bundled_model
    >>> with StreamedModel(bundled_model()) as streamed: model = streamed.skeleton()
    >>> model.lm_head.weight is model.model.embed_tokens.weight
    True
    """
    skip = set(expert_keys)
    mapping: Any = get_model_conversion_mapping(model)
    plan = LoadStateDictConfig(
        dtype=model.dtype,
        dtype_plan=model._get_dtype_plan(model.dtype),  # the parts that stay float32 in a model of half precision
        weight_mapping=mapping,
        device_map={"": device},
    )
    tensors = {key: checkpoint.lazy(key) for key in checkpoint.keys if key not in skip}
    info, _ = convert_and_load_state_dict_in_model(model, tensors, plan)
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    made = {name for name, _ in model.named_buffers()}  # a buffer that needn't be stored has its value already
    ignored = re.compile("|".join(model._keys_to_ignore_on_load_missing or ["(?!)"]))
    missing = sorted(n for n in info.missing_keys if n not in experts and not (n in made and ignored.search(n)))
    other_shape = [f"{name} {tuple(got)} for {tuple(want)}" for name, got, want in sorted(info.mismatched_keys)]
    broken = [f"{name}: {text}" for name, text in info.conversion_errors.items()]
    if missing or other_shape or broken:
        raise incomplete(checkpoint.name, missing, [*other_shape, *broken])


def incomplete(name: str, missing: Collection[str], wrong: Collection[str]) -> ValueError:
    """What is said of a checkpoint that lacks weights, or has wrong ones.

    >>> incomplete("a folder", ["lm_head.weight"], []).args[0][:56]
    "A checkpoint must hold every weight of its model; 'a fol"
    """
    parts = [f"lacks {len(missing)} ({', '.join(list(missing)[:3])})"] if missing else []
    parts += [f"has {len(wrong)} that don't fit ({'; '.join(list(wrong)[:3])})"] if wrong else []
    return ValueError(
        f"A checkpoint must hold every weight of its model; {name!r} {' and '.join(parts)}. "
        "Copy or download it again; weights are never made up."
    )


@contextmanager
def _born_on_meta(classes: Collection[type]) -> Iterator[None]:
    """Inside, modules of these classes make their parameters on meta.

    A patch for the length of one constructor call, since there is no other way in: a device context around the whole
    model would leave buffers without values, and moving experts to meta afterwards comes too late for memory.
    """

    def wrapped(init: Any) -> Any:
        @functools.wraps(init)
        def __init__(self: Any, *args: Any, **options: Any) -> None:
            with torch.device("meta"):
                init(self, *args, **options)

        return __init__

    originals = {cls: cls.__init__ for cls in classes}  # type: ignore[misc]
    try:
        for cls, init in originals.items():
            cls.__init__ = wrapped(init)  # type: ignore[misc]
        yield
    finally:
        for cls, init in originals.items():
            cls.__init__ = init  # type: ignore[misc]
