"""One request's input, checked, and its result."""

from __future__ import annotations

import copy
import difflib
import inspect
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList, StopStringCriteria

from specter_lab.memory import MemoryPlan
from specter_lab.observe.metrics import summarize
from specter_lab.observe.trace import Trace
from specter_lab.records import Conditions, DeviceBytes

if TYPE_CHECKING:
    from specter_lab.models import MoE
    from specter_lab.pipeline import Pipeline

_CALLABLES = ("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
_REFUSED = {
    "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "use_cache": True, "cache_implementation": None,
    "return_dict_in_generate": False, "prompt_lookup_num_tokens": None, "penalty_alpha": None,
}  # fmt: skip


@dataclass(frozen=True)
class Generation:
    """The result of one request.

    ``ids`` are prompt and output, ``new_ids`` the output alone, ``text`` the output decoded (None without a tokenizer).

    >>> import specter_lab as sl
    >>> with sl.Pipeline("tiny-moe", machine=sl.SimulatedMachine()) as p: p.generate("Once", max_new_tokens=2).metrics["tokens"]
    2
    """

    text: str | None
    ids: tuple[int, ...]
    new_ids: tuple[int, ...]
    trace: Trace
    device: DeviceBytes
    conditions: Conditions

    @classmethod
    def of(cls, target: MoE, ids: list[int], prompt_tokens: int, trace: Trace, device: DeviceBytes, conditions: Conditions) -> Generation:
        """Split and decode ``ids``."""
        new = ids[prompt_tokens:]
        text = None
        if target.tokenizer is not None:
            # a model may have more rows than its tokenizer has words: those ids are left out of the text, never of new_ids
            text = target.tokenizer.decode([i for i in new if i < len(target.tokenizer)], skip_special_tokens=True)
        return cls(text, tuple(ids), tuple(new), trace, device, conditions)

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """Every figure of the run; see ``summarize``."""
        return summarize(self.trace)

    def __repr__(self) -> str:
        return f"Generation({len(self.new_ids)} tokens, {self.trace.machine}: {self.text!r})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th><td>{'' if value is None else f'{value:.3g}'}</td></tr>"
            for name, value in self.metrics.items()
        )
        return (
            f"<p style='white-space:pre-wrap'>{escape(self.text or str(list(self.new_ids)))}</p>"
            f"<table><caption>Figures ({escape(self.trace.machine)})</caption>{rows}</table>"
        )


def encode(target: MoE, plan: MemoryPlan, prompt: str | Sequence[int] | Tensor, options: Mapping[str, Any]) -> Tensor:
    """The prompt as (1, tokens) ids on the model's device, once everything about the request is known to be possible."""
    _refuse_options(options)
    geometry = target.geometry
    if isinstance(prompt, str):
        if target.tokenizer is None:
            raise ValueError(f"Text needs a tokenizer; {target.name} came without one. Give token ids, or load_moe(..., tokenizer=...).")
        ids = target.tokenizer(prompt, return_tensors="pt").input_ids if prompt else torch.empty(1, 0)
    else:
        ids = torch.as_tensor(prompt)
        ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
        raise ValueError(
            f"A request is one prompt of at least one token; got shape {tuple(ids.shape)}. Give one non-empty text or id list."
        )
    if ids.is_floating_point() or int(ids.min()) < 0 or int(ids.max()) >= geometry.vocab_size:
        raise ValueError(
            f"Token ids are whole numbers from 0 to {geometry.vocab_size - 1} here; got {ids.dtype} from {ids.min():g} to {ids.max():g}. "
            "Use the model's own tokenizer."
        )
    most = _most_tokens(target, ids.shape[1], options)
    if most > geometry.max_positions:
        raise ValueError(
            f"Prompt and output must fit the model's {geometry.max_positions} positions; {ids.shape[1]} prompt tokens and "
            f"{most - ids.shape[1]} new ones make {most}. Shorten the prompt or lower max_new_tokens."
        )
    if plan.budget is not None and most > plan.context_length:
        raise ValueError(
            f"The memory plan counts KV for {plan.context_length} tokens; this request may take {most}. "
            f"Build the pipeline with context_length={most}, or lower max_new_tokens."
        )
    return ids.to(device=target.model.device, dtype=torch.long)


def stop_criteria(target: MoE, options: Mapping[str, Any]) -> dict[str, Any]:
    """What replaces ``stop_strings`` among the options of ``generate``: a criterion of our own.

    A custom decoding method loses the tokenizer that transformers needs to build it (5.24).
    """
    config = options.get("generation_config")
    strings = options.get("stop_strings") or getattr(config, "stop_strings", None)
    if not strings:
        return {}
    if target.tokenizer is None:
        raise ValueError(
            f"Stop strings need a tokenizer; {target.name} came without one. Use eos_token_id, or load_moe(..., tokenizer=...)."
        )
    criteria = StoppingCriteriaList([*options.get("stopping_criteria", ()), StopStringCriteria(target.tokenizer, strings)])
    replaced: dict[str, Any] = {"stopping_criteria": criteria, "stop_strings": None}
    if config is not None:
        replaced["generation_config"] = copy.deepcopy(config)
        replaced["generation_config"].stop_strings = None
    return replaced


def _most_tokens(target: MoE, prompt_tokens: int, options: Mapping[str, Any]) -> int:
    config = options.get("generation_config") or target.model.generation_config
    new = options.get("max_new_tokens", None if "max_length" in options else config.max_new_tokens)
    if new is not None:
        if new < 1:
            raise ValueError(f"A request makes at least one token; got max_new_tokens={new}. Give 1 or more.")
        return int(prompt_tokens + new)
    length = int(options.get("max_length") or config.max_length or prompt_tokens + 20)
    if length <= prompt_tokens:
        raise ValueError(
            f"max_length counts prompt and output; got {length} for {prompt_tokens} prompt tokens. Give max_new_tokens instead."
        )
    return length


def _refuse_options(options: Mapping[str, Any]) -> None:
    known = {*vars(GenerationConfig()), *_CALLABLES}
    unknown = {name: value for name, value in options.items() if name not in known}
    if unknown:
        raise TypeError(_nearest("generate", list(unknown), known))
    config = options.get("generation_config")
    for name, allowed in _REFUSED.items():
        value = options.get(name, getattr(config, name, None))
        if value not in (None, allowed):
            raise ValueError(
                f"A pipeline decodes one sequence with its own caches and returns a Generation; {name}={value!r} doesn't fit. Leave it out."
            )


def refuse_unknown(unknown: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """``TypeError`` that names the nearest known options."""
    if unknown:
        raise TypeError(
            _nearest(function.__qualname__.split(".")[0], list(unknown), set(inspect.signature(function).parameters) - {"self", "unknown"})
        )


def _nearest(what: str, names: list[str], known: set[str]) -> str:
    near = [match for name in names for match in difflib.get_close_matches(name, known, n=2)]
    hint = f"Did you mean {', '.join(near)}?" if near else f"Known: {', '.join(sorted(known))}."
    return f"{what} takes only options it knows; got {', '.join(names)}. {hint}"


def conditions_of(pipeline: Pipeline, *, prompt_tokens: int, new_tokens: int, options: Mapping[str, Any], seed: int | None) -> Conditions:
    """The card that stands beside a run's figures."""
    target, plan, machine = pipeline.target, pipeline.plan, pipeline.machine
    return Conditions(
        {
            "model": target.name,
            "model_type": target.geometry.model_type,
            "computed_in": str(target.dtype).removeprefix("torch."),
            "experts_stored_in": target.store.name,
            "machine": machine.label,
            "link_gb_s": getattr(machine, "link_gb_s", None),
            "latency_us": getattr(machine, "latency_us", None),
            "drafter": getattr(pipeline.drafter, "name", None),
            "draft_length": repr(pipeline.draft_length),
            "predictor": pipeline.predictor.name,
            "eviction": pipeline.residency.eviction.name,
            "slots": list(plan.slots),
            "device_bytes": plan.device.total,
            "context_length": plan.context_length,
            "start": "warm" if pipeline.warm else "cold",
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "sampling": bool(options.get("do_sample", False)),
            "seed": seed,
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "optimum-quanto")},
        }
    )
