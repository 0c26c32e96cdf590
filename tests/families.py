"""Tiny random models of several families, for tests of what must not depend on the bundled one."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 8, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 1},
    "deepseek_v3": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_shared_experts": 1,
    },
    "gpt_oss": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}  # fmt: skip


def tiny(model_type: str, **changes: Any) -> Any:
    """A random fp32 model of that type in evaluation mode, the same every time."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**_SHAPE, **FAMILIES.get(model_type, {}), **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
