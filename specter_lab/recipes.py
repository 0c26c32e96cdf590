"""Tiny random models of any type that transformers knows: the one place where their shapes are written down.

One generic shape fits nearly all: each field is set where a type's config has it. Kinds of layers are taken from the
type's own default config, one of each. ``CHANGES`` holds what a type needs on top.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LAYERS = 3
"""A dense layer and two sparse ones, or a sliding and two full ones; more only where a type has more kinds."""

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": LAYERS, "max_position_embeddings": 512,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    # experts: 8, two a token, in two groups of which one is chosen from
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8, "moe_intermediate_size": 16,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "top_k_experts": 2,
    "n_group": 2, "topk_group": 1, "norm_topk_prob": True, "router_hidden_size": 16,
    # dense layers and shared experts beside them
    "first_k_dense_replace": 1, "num_dense_layers": 1, "dense_intermediate_size": 32, "prefix_dense_intermediate_size": 32,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1, "shared_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "shared_experts_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
    # attention: windows shorter than any test's text, low-rank keys and values, an indexer that leaves keys out (of many
    # heads: with two, its scores are often exactly 0 after their ReLU, and which of equal keys is left out depends on the rows)
    "sliding_window": 6, "sliding_window_size": 6, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "rotary_dim": 16,
    "index_topk": 8, "index_head_dim": 16, "index_n_heads": 16, "index_block_size": 4, "index_topk_blocks": 2,
    "o_groups": 2, "o_lora_rank": 16, "gated_norm_rank": 8, "rel_extent": 16, "unpadded_vocab_size": 64,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
    # recurrent and convolutional state
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_head_dim": 16, "linear_num_heads": 2, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 16, "mamba_num_heads": 4,
    "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8, "mamba_chunk_size": 8, "block_size": 8,
}  # fmt: skip

_SMALL_SIDE: dict[str, Any] = {  # towers for pictures and sound beside the text model: there, but tiny
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16, "position_embedding_size": 16,
    "adapter_in_dim": 32, "adapter_input_size": 32, "adapter_out_dim": 32, "downsample_hidden_size": 8, "output_proj_dims": 32,
    "subsampling_conv_channels": [8, 8], "mlp_layer_types": ["dense"],
}  # fmt: skip

CHANGES: dict[str, dict[str, Any]] = {
    "beam": {"num_experts_per_tok": 2},
    "flint": {"mlp_only_layers": [0]},
    "gemma4_text": {"enable_moe_block": True, "global_head_dim": 16},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "inkling2_loop_text": {"n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 2, "loop_num_passes": 3},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0},
    "jetmoe": {"kv_channels": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "laguna": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "mellum": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "mimo_v2_flash": {"num_key_value_heads": 1},  # its sliding layers have twice as many
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "index_n_heads": 2},
    "nemotron_h": {"layer_types": ["linear_attention", "moe", "full_attention", "moe"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
for _name in ("num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
    CHANGES.setdefault("dots3_note_text", {})[f"swa_{_name}"] = SHAPE[_name]
CHANGES["dots3_note_text"] |= {"swa_head_dim": 32, "head_dim": 16}


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A config of that type whose model has some 10 000 to 300 000 weights; ``changes`` are fields of it.

    Raises whatever the config's own validation raises: then the type needs an entry in ``CHANGES``.

    >>> tiny_config("mixtral").num_hidden_layers
    3
    """
    return AutoConfig.for_model(model_type, **{**_fields(CONFIG_MAPPING[model_type]), **changes})


def tiny_model(model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model of that type in evaluation mode, the same for the same ``seed``.

    Its weights are larger than a fresh model's and its biases aren't zero: routers choose, and tokens vary.

    >>> tiny_model("mixtral").training
    False
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes), dtype=dtype).eval()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if not tensor.is_floating_point():
                    continue
                if "bias" in name:
                    tensor.normal_(std=0.1)
                elif tensor.ndim >= 2:
                    tensor.normal_(std=tensor.shape[-1] ** -0.5)
    return model


def _fields(config_class: Any) -> dict[str, Any]:
    """The generic shape, as far as ``config_class`` has such fields, with its own kinds of layers and its changes."""
    names = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    fields = {name: value for name, value in SHAPE.items() if name in names}
    layers = {key: kinds for key, kinds in _layer_kinds(config_class).items() if key in names}
    if layers:
        fields["num_hidden_layers"] = max(LAYERS, *map(len, layers.values()))
        fields |= {key: (kinds + kinds[-1:] * LAYERS)[: fields["num_hidden_layers"]] for key, kinds in layers.items()}
    for part, part_class in config_class.sub_configs.items():
        if part == "text_config":
            fields[part] = _fields(part_class)
        elif dataclasses.is_dataclass(part_class):
            theirs = {field.name for field in dataclasses.fields(part_class)}
            fields[part] = {name: value for name, value in _SMALL_SIDE.items() if name in theirs}
    return {**fields, **CHANGES.get(config_class.model_type, {})}


@functools.cache
def _layer_kinds(config_class: Any) -> dict[str, list[str]]:
    """The distinct kinds of layers of the type's default config, in order of appearance."""
    try:
        default = config_class()
    except Exception:  # a type without a valid default: its own layers are then up to CHANGES
        return {}
    kinds = {key: getattr(default, key, None) for key in ("layer_types", "mlp_layer_types")}
    return {key: list(dict.fromkeys(value)) for key, value in kinds.items() if isinstance(value, (list, tuple)) and value}
