"""What may be asked of a pipeline: one prompt in whatever form, and options that make sense for one sequence."""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, StoppingCriteriaList, StopStringCriteria
from transformers.generation import SynthIDTextWatermarkingConfig

from specter_lab.memory import MemoryPlan
from specter_lab.pieces import Drafter, Predictor

if TYPE_CHECKING:
    from specter_lab.models import MoE

_BESIDES = ("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "tokenizer")
_BEAMS = "Leave it out: a pipeline decodes one sequence."
_DRAFTER = "Build the pipeline with a drafter."
_WATCH = "Use RouterRecorder, or the model itself without a pipeline."
_OWN_CACHE = "Leave it out: each request has a cache of its own, which draft and target share and roll back."
_REFUSED: dict[str, tuple[Any, str]] = {  # option: (the value that is fine, the way out)
    "num_beams": (1, _BEAMS),
    "num_beam_groups": (1, _BEAMS),
    "num_return_sequences": (1, "Call generate() once for each, with its own seed."),
    "constraints": (None, _BEAMS),
    "force_words_ids": (None, _BEAMS),
    "penalty_alpha": (0, "Contrastive search isn't speculated: leave it out."),
    "dola_layers": (None, "It reads inner layers, which a draft has not: leave it out."),
    "guidance_scale": (1, "It runs the model a second time for each token: leave it out."),
    "negative_prompt_ids": (None, "It belongs to guidance_scale: leave it out."),
    "use_cache": (True, "Leave it out: verification needs the cache."),
    "cache": (None, _OWN_CACHE),
    "past_key_values": (None, _OWN_CACHE),
    "cache_implementation": ("dynamic", "Leave it out: only dynamic caches can be rolled back."),
    "prefill_chunk_size": (None, "Leave it out: the prompt goes in one pass."),
    "prompt_lookup_num_tokens": (None, "Build the pipeline with drafter=PromptLookupDrafter()."),
    "assistant_model": (None, _DRAFTER),
    "assistant_early_exit": (None, _DRAFTER),
    "use_mtp": (False, _DRAFTER),
    "output_attentions": (False, _WATCH),
    "output_hidden_states": (False, _WATCH),
    "token_healing": (False, "Heal the prompt yourself: transformers hands a custom decoding method no tokenizer."),
    "inputs_embeds": (None, "Give token ids: drafts are compared as ids."),
}


def encode(target: MoE, plan: MemoryPlan, prompt: Any, options: dict[str, Any]) -> Tensor:
    """The prompt as (1, tokens) ids on the model's device, once everything about the request is known to be possible.

    ``prompt``: text, chat messages, ids, or what a tokenizer returned; ``input_ids``, ``inputs`` and ``attention_mask``
    are taken out of ``options``. Raises ``ValueError`` or ``TypeError`` for what can't be.
    """
    ids = read_prompt(target, prompt, options)
    refuse_options(options)
    refuse_length(target, plan, ids.shape[1], _most_tokens(target, ids.shape[1], options))
    return ids.to(device=target.model.device, dtype=torch.long)


def read_prompt(target: MoE, prompt: Any, options: dict[str, Any]) -> Tensor:
    """(1, tokens) ids of the one prompt, wherever it was given; takes its names out of ``options``."""
    given = {"prompt": prompt, "input_ids": options.pop("input_ids", None), "inputs": options.pop("inputs", None)}
    named = {name: value for name, value in given.items() if value is not None}
    if len(named) != 1:
        raise TypeError(f"A request has one prompt; got {' and '.join(named) or 'none'}. Give text, messages or ids once.")
    (prompt,) = named.values()
    mask = options.pop("attention_mask", None)
    for name in ("token_type_ids", "mm_token_type_ids"):  # some tokenizers give them with every text
        if (kinds := options.pop(name, None)) is not None and bool(torch.as_tensor(kinds).any()):
            raise ValueError(
                f"A prompt is text alone; {name} marks {int(torch.as_tensor(kinds).count_nonzero())} other tokens. Leave them out."
            )
    if isinstance(prompt, Mapping) and "input_ids" in prompt:  # what a tokenizer returned
        prompt, mask = prompt["input_ids"], prompt.get("attention_mask", mask)
    if isinstance(prompt, str) or _is_chat(prompt):
        ids = _tokenized(target, prompt)
    else:
        try:
            ids = torch.as_tensor(prompt)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"A prompt is a text, a list of chat messages, or token ids; got {prompt!r:.80} ({error}). Give one of them."
            ) from error
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
        raise ValueError(
            f"A request is one prompt of at least one token; got shape {tuple(ids.shape)}. Give one non-empty text or id list."
        )
    if ids.is_floating_point() or int(ids.min()) < 0 or int(ids.max()) >= target.geometry.vocab_size:
        raise ValueError(
            f"Token ids are whole numbers from 0 to {target.geometry.vocab_size - 1} here; got {ids.dtype} from {ids.min():g} to "
            f"{ids.max():g}. Use the model's own tokenizer."
        )
    if mask is not None and (torch.as_tensor(mask).numel() != ids.numel() or not bool(torch.as_tensor(mask).all())):
        raise ValueError(
            f"One request needs no padding; attention_mask must be {ids.numel()} ones, got {torch.as_tensor(mask).tolist()!r:.80}. "
            "Drop the padding and the mask."
        )
    return ids


def refuse_options(options: Mapping[str, Any]) -> None:
    """``TypeError`` for an unknown option, ``ValueError`` for one that makes no sense for one speculated sequence."""
    known = {*vars(GenerationConfig()), *_BESIDES, *_REFUSED}
    unknown = [name for name in options if name not in known]
    if unknown:
        raise TypeError(_nearest("generate", unknown, known))
    refuse_config(options.get("generation_config"), options)


def refuse_config(config: GenerationConfig | None, given: Mapping[str, Any]) -> None:
    """``ValueError`` for what can't be, whether in ``given`` or, where that says nothing, in ``config``."""
    for name, (fine, way_out) in _REFUSED.items():
        value = given.get(name, getattr(config, name, None))
        if value is not None and value is not False and value != fine:
            raise ValueError(f"A pipeline decodes one sequence by speculation; {name}={value!r:.60} doesn't fit. {way_out}")
    if given.get("use_cache") is False or getattr(config, "use_cache", None) is False:
        raise ValueError(f"A pipeline decodes one sequence by speculation; use_cache=False doesn't fit. {_REFUSED['use_cache'][1]}")
    watermark = given.get("watermarking_config", getattr(config, "watermarking_config", None))
    if isinstance(watermark, SynthIDTextWatermarkingConfig):
        raise ValueError(
            "A processor may depend on ids and scores alone, since drafts are judged at places that may be given up; "
            "SynthID watermarks keep a state. Use WatermarkingConfig, or leave it out."
        )


def refuse_length(target: MoE, plan: MemoryPlan, prompt_tokens: int, most: int) -> None:
    """``ValueError`` if prompt and output, ``most`` tokens in all, don't fit the model's positions or the memory plan."""
    if most > target.geometry.max_positions:
        raise ValueError(
            f"Prompt and output must fit the model's {target.geometry.max_positions} positions; {prompt_tokens} prompt tokens and "
            f"{most - prompt_tokens} new ones make {most}. Shorten the prompt or lower max_new_tokens."
        )
    if plan.budget is not None and most > plan.context_length:
        raise ValueError(
            f"The memory plan counts KV for {plan.context_length} tokens; this request may take {most}. "
            f"Build the pipeline with context_length={most}, or lower max_new_tokens."
        )


def refuse_inputs(target: MoE, model: Any, ids: Tensor, config: GenerationConfig, inputs: Mapping[str, Any]) -> None:
    """The same for a call as ``model.generate(..., custom_generate=pipeline)``, which has everything prepared."""
    if model is not target.model:
        raise ValueError(
            f"A pipeline decodes the model it holds the experts of ({target.name}); it was given to another {type(model).__name__}. "
            "Call generate on pipeline.target.model."
        )
    refuse_config(config, {})
    if ids.shape[0] != 1:
        raise ValueError(f"A pipeline decodes one sequence; got a batch of {ids.shape[0]}. Call generate once for each.")
    cache = inputs.get("cache")
    if cache is not None and (getattr(cache, "_is_user_defined", False) or not isinstance(cache, DynamicCache)):
        raise ValueError(
            f"A request has a dynamic cache of its own; got a {type(cache).__name__} of {cache.get_seq_length()} tokens. {_OWN_CACHE}"
        )
    if inputs.get("attention_mask") is not None:
        raise ValueError(f"One request needs no padding; attention_mask has {int((inputs['attention_mask'] == 0).sum())} zeros. Drop it.")
    fine = {"cache", "attention_mask", "position_ids", "logits_to_keep", "use_cache", "input_ids"}
    besides = sorted(name for name, value in inputs.items() if name not in fine and value is not None and value not in ({}, ()))
    if besides:
        raise ValueError(
            f"A pipeline feeds the model token ids alone; got {', '.join(besides)} too. Leave them out, or use the model itself."
        )


def refuse_drafter(target: Any, drafter: Drafter) -> None:
    """``ValueError`` for a drafter of another target, and for a model whose cache can't be rolled back: a rejected draft
    would stay in it."""
    if getattr(drafter, "target", target) is not target:
        raise ValueError(
            f"This drafter was made for one target: {drafter.name} for {drafter.target!r}, not for {target!r}. "  # type: ignore[attr-defined]
            "Give the same object to drafter and pipeline."
        )
    why = getattr(target, "rollback", "")  # a replay takes nothing back
    if why:
        raise ValueError(
            f"Rejected drafts are taken back from the cache; that of {target.name} ({target.geometry.model_type}) can't be rolled back: "
            f"{why}. Leave out the drafter ({drafter.name}): token by token this model decodes exactly."
        )


def refuse_ahead(draft_ahead: bool, drafter: Drafter | None) -> None:
    """``ValueError`` for drafting ahead without a drafter."""
    if draft_ahead and drafter is None:
        raise ValueError("Drafting ahead needs a draft; got draft_ahead=True and no drafter. Give a SelfDrafter, or leave draft_ahead out.")


def refuse_replay(drafter: Drafter | None) -> None:
    """``ValueError`` for a drafter whose proposals depend on the slots."""
    if getattr(drafter, "reads_slots", False):
        raise ValueError(
            "A replayed text holds what a draft proposed whatever the slots held; proposals of this drafter depend on them: "
            f"{getattr(drafter, 'name', drafter)}. Use SelfDrafter here, or generate() with a model."
        )


def refuse_predictor(predictor: Predictor, drafter: Drafter | None) -> None:
    """``ValueError`` for a predictor that reads the draft's routing where there is none."""
    if not getattr(predictor, "reads_routing", False):
        return
    why = getattr(drafter, "no_routing", "" if getattr(drafter, "bank", None) is not None else "which has no experts")
    if why:
        name = getattr(drafter, "name", None)
        raise ValueError(
            f"{predictor.name.capitalize()} reads the draft's routing, as that of the target; the drafter is {name!r}: {why}. "
            "Use SelfDrafter, or another predictor (NextLayerGate, NoPrediction)."
        )


def stop_criteria(target: MoE, options: dict[str, Any]) -> dict[str, Any]:
    """What replaces ``stop_strings`` among the options of ``generate``: a criterion of our own.

    A custom decoding method loses the tokenizer that transformers needs to build it (5.24).
    """
    tokenizer = options.pop("tokenizer", None) or target.tokenizer
    config = options.get("generation_config")
    strings = options.get("stop_strings") or getattr(config, "stop_strings", None) or target.model.generation_config.stop_strings
    if not strings:
        return {}
    if tokenizer is None:
        raise ValueError(
            f"Stop strings need a tokenizer; {target.name} came without one. Use eos_token_id, or load_moe(..., tokenizer=...)."
        )
    criteria = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, strings)])
    replaced: dict[str, Any] = {"stopping_criteria": criteria, "stop_strings": None}
    if config is not None:
        replaced["generation_config"] = copy.deepcopy(config)
        replaced["generation_config"].stop_strings = None
    return replaced


def refuse_unknown(unknown: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """``TypeError`` that names the nearest known options."""
    if unknown:
        raise TypeError(
            _nearest(function.__qualname__.split(".")[0], list(unknown), set(inspect.signature(function).parameters) - {"self", "unknown"})
        )


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(message, Mapping) for message in prompt)


def _tokenized(target: MoE, prompt: Any) -> Tensor:
    if target.tokenizer is None:
        raise ValueError(f"Text needs a tokenizer; {target.name} came without one. Give token ids, or load_moe(..., tokenizer=...).")
    if isinstance(prompt, str):
        ids: Tensor = target.tokenizer(prompt, return_tensors="pt").input_ids if prompt else torch.empty(1, 0)
        return ids
    if target.tokenizer.chat_template is None:
        raise ValueError(
            f"Chat messages need a chat template; the tokenizer of {target.name} has none for these {len(prompt)} messages. "
            "Set tokenizer.chat_template, or give the whole prompt as text."
        )
    chat: Tensor = target.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]
    return chat


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


def _nearest(what: str, names: list[str], known: set[str]) -> str:
    near = [match for name in names for match in difflib.get_close_matches(name, known, n=2)]
    hint = f"Did you mean {', '.join(near)}?" if near else f"Known: {', '.join(sorted(known))}."
    return f"{what} takes only options it knows; got {', '.join(names)}. {hint}"
