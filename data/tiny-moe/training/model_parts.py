"""What train.py trains and measures: tokenizer, model, optimizer, load-balancing loss, held-out bits per byte."""

from __future__ import annotations

import argparse
import copy
import math
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

END_OF_TEXT = "<|endoftext|>"
MAX_POSITIONS = 1024
HEAD_SIZE = 32


def train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer with ``<|endoftext|>`` as token 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer as transformers opens it."""
    special = {"eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=MAX_POSITIONS, **special).save_pretrained(folder)


def bytes_of_tokens(tokenizer: Tokenizer) -> Tensor:
    """Bytes of text that each token stands for, shape (vocabulary,); 0 for ``<|endoftext|>``."""
    # A byte-level vocabulary writes each byte as one character.
    return torch.tensor([0] + [len(tokenizer.id_to_token(token)) for token in range(1, tokenizer.get_vocab_size())])


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts as one row of token ids (uint16), ``<|endoftext|>`` before each."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids.append(0)
        ids += encoding.ids
    return np.array(ids, dtype=np.uint16)


def build_model(arguments: argparse.Namespace, vocabulary: int) -> Qwen3MoeForCausalLM:
    """An untrained model of the shape that the command line of train.py asks for."""
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // HEAD_SIZE,
        num_key_value_heads=2,
        head_dim=HEAD_SIZE,
        intermediate_size=4 * arguments.hidden,
        moe_intermediate_size=arguments.expert_width,
        num_experts=arguments.experts,
        num_experts_per_tok=arguments.experts_per_token,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=True,
        max_position_embeddings=MAX_POSITIONS,
        router_aux_loss_coef=arguments.balance_weight,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    config._experts_implementation = arguments.experts_implementation
    return Qwen3MoeForCausalLM(config).train()


def save_model(model: Qwen3MoeForCausalLM, folder: Path) -> None:
    """Write a bfloat16 copy of the weights; the model itself stays as it is."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)


def build_optimizer(model: torch.nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """AdamW; weight decay for matrices only, and not for the embedding."""
    decayed, plain = [], []
    for name, weight in model.named_parameters():
        (decayed if weight.dim() >= 2 and "embed" not in name else plain).append(weight)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)


def balance_loss(router_logits: tuple[Tensor, ...], experts_per_token: int) -> Tensor:
    """Load-balancing loss of each layer, averaged over layers (1.0 = perfectly even); logits (tokens, experts) a layer.

    The loss in transformers pools all layers before it multiplies, which lets single layers collapse.

    Source: Fedus et al. 2021, Switch Transformers, section 2.2 (there for one expert a token).
    """
    total = torch.zeros(())
    for logits in router_logits:
        tokens, experts = logits.shape
        probs = logits.float().softmax(-1)
        chosen = probs.topk(experts_per_token, -1).indices.reshape(-1)
        load = torch.zeros(experts).index_add_(0, chosen, torch.ones(tokens * experts_per_token))
        total = total + experts * (load / load.sum() * probs.mean(0)).sum()
    return total / len(router_logits)


def windows_at(ids: np.ndarray, starts: np.ndarray, window: int) -> Tensor:
    """The windows of ``ids`` that begin at ``starts``, int64 of shape (len(starts), window)."""
    return torch.from_numpy(np.stack([ids[start : start + window] for start in starts]).astype(np.int64))


@torch.no_grad()
def bits_per_byte(model: torch.nn.Module, ids: np.ndarray, token_bytes: Tensor, sequences: int, length: int) -> float:
    """Held-out cross-entropy in bits per byte of text, over at most ``sequences`` windows spread evenly over ``ids``."""
    model.eval()
    window = length + 1
    starts = np.linspace(0, len(ids) - window, min(sequences, len(ids) // window)).astype(int)
    nats = byte_count = 0.0
    for batch in windows_at(ids, starts, window).split(8):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits.float()
        nats += cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item()
        byte_count += token_bytes[batch[:, 1:]].sum().item()
    model.train()
    return nats / math.log(2) / byte_count
