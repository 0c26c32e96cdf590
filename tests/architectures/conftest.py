"""One tiny model of each type, built once, with a prompt whose own tokens are clear of ties."""

from __future__ import annotations

import functools
import itertools
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
    """Tokens decided by less than rounding would make any comparison a matter of luck, and one token again and again would
    say little: another prompt is taken then, or other weights."""
    for seed, first in itertools.product(range(2), range(3, 20)):
        moe = model_of(model_type, seed)
        prompt = torch.arange(first, first + 6)[None]
        out: Any = moe.own_generate(
            prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True
        )
        best = [logits[0].topk(2).values for logits in out.logits]
        own = tuple(out.sequences[0, 6:].tolist())
        margin = min(float((one - two) / logits.std()) for (one, two), logits in zip(best, out.logits, strict=True))
        if margin > 1e-3 and len(set(own)) >= 3:
            return Built(moe, prompt, own)
    raise AssertionError(f"no prompt of {model_type} has clear and varied tokens: change its recipe")


@functools.cache
def model_of(model_type: str, seed: int) -> MoE:
    return sl.load_moe(tiny_model(model_type, seed=seed))


@pytest.fixture(scope="session")
def built() -> Any:
    return build
