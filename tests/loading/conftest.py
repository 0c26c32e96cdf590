"""Checkpoints of tiny random models, saved as the hub lays them out, and logits through a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging

from specter_lab.models import MoE
from specter_lab.records import ExpertKey
from tests.families import tiny

FEW = {"num_experts": 8, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "phimoe": {"num_local_experts": 8},
    "qwen2_moe": {},
    "qwen3_moe": FEW,
    "olmoe": FEW,
    "deepseek_v2": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": 16,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_shared_experts": 1,
    },
    "deepseek_v3": {},
    "gpt_oss": {},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
}  # fmt: skip
IDS = torch.arange(3, 25)[None]


@pytest.fixture(autouse=True, scope="package")
def quiet() -> Iterator[None]:
    """No progress bars, and none of transformers' remarks on tiny configs."""
    level = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(level)
    logging.enable_progress_bar()


def random_model(family: str, **changes: Any) -> Any:
    """As ``tiny``, but biases and corrections aren't zeros either, so that nothing can get lost unseen."""
    model = tiny(family, **{**FAMILIES[family], **changes})
    state = model.state_dict()
    with torch.no_grad():
        for name in sorted(state):
            state[name].add_(torch.randn(state[name].shape) * 0.02)
    return model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a family's random checkpoint, saved once; ``sharded`` in many small files."""
    folders: dict[tuple[Any, ...], Path] = {}

    def save(family: str, sharded: bool = False, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
        key = (family, sharded, dtype, *sorted(changes.items()))
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(family)
            random_model(family, **changes).to(dtype).save_pretrained(folders[key], max_shard_size="100KB" if sharded else "1GB")
        return folders[key]

    return save


class Loose:
    """Hands out a store's experts, without a machine."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def serve(self, call: Any, compute: Callable[..., None]) -> None:
        for expert in call.needed:
            compute(expert, self.store.own_weights(ExpertKey(call.layer, expert)))


def logits(moe: MoE, store: Any = None) -> torch.Tensor:
    """(1, 22, vocabulary) logits of an attached model, its experts from ``store`` (its own by default)."""
    with torch.no_grad(), moe.seam.serving(Loose(store or moe.store)):
        return moe.model(IDS).logits
