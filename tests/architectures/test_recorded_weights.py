"""What a recorder keeps of any router: what the experts' outputs are multiplied with, never made of it once more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specter_lab as sl
from specter_lab.architectures import examine
from specter_lab.recipes import tiny_model

IDS = torch.arange(3, 19)[None]
TYPES = ("gemma4_text", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "phimoe", "glm4_moe", "zaya")


@pytest.mark.parametrize("model_type", TYPES)
def test_weights_are_those_that_experts_are_multiplied_with(model_type: str) -> None:
    """Case 47: some routers hand out probabilities under the name of logits; whatever they are, no softmax is taken of them.
    Case 48: nothing is asked of ``output_router_logits``."""
    model = tiny_model(model_type, norm_topk_prob=False) if model_type == "qwen3_moe" else tiny_model(model_type)
    moe = sl.load_moe(model)
    seen: list[Any] = []
    handles = [m.register_forward_pre_hook(lambda _, args: seen.append(args[1:3])) for m in moe.seam.modules]
    with torch.no_grad(), sl.RouterRecorder(model) as recorder:
        model(IDS)
    for handle in handles:
        handle.remove()
    log = recorder.log
    for layer, (ids, weights) in enumerate(seen):
        there = ids < moe.experts(layer)
        assert torch.equal(log.experts[:, layer, : ids.shape[1]][there], ids[there])
        assert torch.equal(log.weights[:, layer, : ids.shape[1]][there], weights[there].float())


def test_the_table_says_which_routers_hand_out_probabilities() -> None:
    """Case 47: told from the numbers (rows that sum to 1), since the name says nothing."""
    assert examine("gemma4_text").router.startswith("probabilities") and examine("mixtral").router.startswith("softmax")
