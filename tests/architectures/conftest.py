"""One tiny model of each type, built once, with a prompt whose own tokens are clear of ties."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import specter_lab as sl
from specter_lab.models import MoE
from specter_lab.recipes import tiny_model

NEW = 12


@dataclass(frozen=True)
class Built:
    """A model, a prompt of six tokens, and the model's own greedy tokens after it, with eager experts."""

    moe: MoE
    prompt: Tensor
    own: tuple[int, ...]


@functools.cache
def build(model_type: str) -> Built:
    """Tokens decided by less than rounding would make any comparison a matter of luck: another prompt is taken then."""
    moe = sl.load_moe(tiny_model(model_type))
    for first in range(3, 20):
        prompt = torch.arange(first, first + 6)[None]
        out: Any = moe.own_generate(
            prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True
        )
        best = [logits[0].topk(2).values for logits in out.logits]
        if min(float((one - two) / logits.std()) for (one, two), logits in zip(best, out.logits, strict=True)) > 1e-3:
            return Built(moe, prompt, tuple(out.sequences[0, 6:].tolist()))
    raise AssertionError(f"no prompt of {model_type} has clear tokens: change its recipe's seed")


@pytest.fixture(scope="session")
def built() -> Any:
    return build
