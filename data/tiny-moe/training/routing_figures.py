"""Held-out routing figures of a MoE model: balance, locality in time, cache hit rates, next-layer prediction.

Axes: L layers, N sequences, T tokens, E experts, H hidden size, K experts a token.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

WINDOW_TOKENS = 256
TOKENS_PER_KIND = 60000
WINDOWS_REPORTED = (2, 4, 5, 8, 9, 16, 32)
DEAD_BELOW = 0.05  # share of an even load
CACHE_WARM_UP_TOKENS = 32


@torch.no_grad()
def forward_with_routing(model: torch.nn.Module, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ids (N, T) -> logits (N, T, vocabulary), router logits (L, N, T, E), router inputs (L, N, T, H)."""
    router_inputs: list[Tensor] = []

    def keep(_module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        router_inputs.append(inputs[0].detach().reshape(*ids.shape, -1))

    hooks = [layer.mlp.gate.register_forward_pre_hook(keep) for layer in model.model.layers]
    output = model(input_ids=ids, output_router_logits=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    router_logits = torch.stack([logits.float().view(*ids.shape, -1) for logits in output.router_logits])
    return output.logits.float(), router_logits, torch.stack(router_inputs)


def chosen_mask(scores: Tensor, count: int) -> Tensor:
    """1.0 at the ``count`` highest scores of the last axis, else 0.0.

    >>> chosen_mask(torch.tensor([0.1, 0.7, 0.2]), 2)
    tensor([0., 1., 1.])
    """
    return torch.zeros_like(scores).scatter_(-1, scores.topk(count, -1).indices, 1.0)


def held_out_windows(rows: list[dict[str, str]], tokenizer, windows_per_kind: int) -> tuple[Tensor, np.ndarray]:
    """Windows of 256 tokens, evenly spread over the first 60,000 of each kind -> (ids (N, 256), kind of each window)."""
    windows, kinds = [], []
    for kind in sorted({row["domain"] for row in rows}):
        ids: list[int] = []
        for row in rows:
            if row["domain"] == kind:
                ids += [0] + tokenizer(row["text"][:60000])["input_ids"]
            if len(ids) > TOKENS_PER_KIND:
                break
        for start in np.linspace(0, len(ids) - WINDOW_TOKENS, windows_per_kind).astype(int):
            windows.append(ids[start : start + WINDOW_TOKENS])
            kinds.append(kind)
    return torch.tensor(windows), np.array(kinds)


def route_all(model: torch.nn.Module, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Router logits (L, N, T, E) and router inputs (L, N, T, H) of all windows, eight at a time."""
    parts = [forward_with_routing(model, batch)[1:] for batch in windows.split(8)]
    return torch.cat([logits for logits, _ in parts], 1), torch.cat([inputs for _, inputs in parts], 1)


def distinct_experts(chosen: Tensor, tokens: int) -> Tensor:
    """Mean number of distinct experts in runs of ``tokens`` tokens, shape (L,); ``chosen`` is (L, N, T, E)."""
    length = chosen.shape[2]
    runs = [chosen[:, :, start : start + tokens].amax(2).sum(-1) for start in range(0, length - tokens, tokens)]
    return torch.stack(runs).mean((0, 2))


def routing_statistics(router_logits: Tensor, kinds: np.ndarray, experts_per_token: int) -> dict:
    """Sharpness, balance and reuse of the routing, one number a layer; ``router_logits`` is (L, N, T, E)."""
    experts = router_logits.shape[-1]
    probs = router_logits.softmax(-1)
    chosen = chosen_mask(router_logits, experts_per_token)
    popularity = chosen.mean((1, 2))  # (L, E), the chance that a token uses the expert
    share = popularity / experts_per_token
    entropy = (-(probs * probs.clamp_min(1e-9).log()).sum(-1)).mean((1, 2))
    common_with_next = (chosen[:, :, 1:] * chosen[:, :, :-1]).sum(-1)
    by_kind = {kind: chosen[:, kinds == kind].mean((1, 2)) for kind in sorted(set(kinds))}
    return {
        "entropy_nats": entropy.tolist(),
        "entropy_over_max": (entropy / math.log(experts)).tolist(),
        "topk_mass": probs.topk(experts_per_token, -1).values.sum(-1).mean((1, 2)).tolist(),
        "usage_max_over_mean": (share.max(-1).values * experts).tolist(),
        "usage_min_over_mean": (share.min(-1).values * experts).tolist(),
        "usage_cv": (share.std(-1, unbiased=False) * experts).tolist(),
        "effective_experts": torch.exp(-(share * share.clamp_min(1e-9).log()).sum(-1)).tolist(),
        "dead_experts": (share * experts < DEAD_BELOW).sum(-1).tolist(),
        "reuse_next_token": (common_with_next.mean((1, 2)) / experts_per_token).tolist(),
        "reuse_chance_marginals": ((popularity**2).sum(-1) / experts_per_token).tolist(),
        "reuse_chance_uniform": experts_per_token / experts,
        "any_expert_reused": (common_with_next > 0).float().mean((1, 2)).tolist(),
        "unique_in_window": {
            tokens: {
                "measured": distinct_experts(chosen, tokens).tolist(),
                "independent": (1 - (1 - popularity) ** tokens).sum(-1).tolist(),
            }
            for tokens in WINDOWS_REPORTED
        },
        "domain_usage_tv_from_mean": {
            kind: (0.5 * (usage / experts_per_token - share).abs().sum(-1)).tolist() for kind, usage in by_kind.items()
        },
    }


def lru_hit_rates(experts_used: np.ndarray, capacity: int) -> list[float]:
    """Hit rate a layer of a least-recently-used cache of ``capacity`` experts in batch-1 decoding.

    ``experts_used`` is (L, N, T, K), best expert first. The cache starts empty at each sequence; the first 32 tokens
    are not counted. All of a token's experts are in the cache together before the oldest leave.
    """
    rates = []
    for layer in experts_used:
        hits = uses = 0
        for sequence in layer:
            cache: list[int] = []  # oldest first
            for position, experts in enumerate(sequence.tolist()):
                for expert in experts:
                    if position >= CACHE_WARM_UP_TOKENS:
                        uses += 1
                        hits += expert in cache
                    if expert in cache:
                        cache.remove(expert)
                    cache.append(expert)
                del cache[: max(0, len(cache) - capacity)]
        rates.append(hits / uses)
    return rates


def cache_figures(router_logits: Tensor, experts_per_token: int) -> dict:
    """Hit rates a layer with 1/8, 1/4, 1/2 and 3/4 of the experts kept: LRU, the most popular ones (oracle), any."""
    experts = router_logits.shape[-1]
    used = router_logits.topk(experts_per_token, -1).indices.numpy()
    popularity = chosen_mask(router_logits, experts_per_token).mean((1, 2))
    figures = {}
    for capacity in (experts // 8, experts // 4, experts // 2, 3 * experts // 4):
        figures[f"{capacity}_of_{experts}"] = {
            "lru": lru_hit_rates(used, capacity),
            "static_popular": (popularity.topk(capacity, -1).values.sum(-1) / experts_per_token).tolist(),
            "uniform": capacity / experts,
        }
    return figures


def next_layer_figures(
    model: torch.nn.Module, router_logits: Tensor, router_inputs: Tensor, kinds: np.ndarray, experts_per_token: int
) -> list[dict]:
    """Recall of predictions of the next layer's experts, with K and 2K guesses.

    * ``gate_ahead``: the next layer's router on this layer's router input, with the next layer's norm weights;
    * ``table``: co-occurrence with this layer's experts, fitted on every other sequence, tested on the rest;
    * ``popular``: the next layer's most used experts; ``prev_token``: those of the previous token.
    """
    chosen = chosen_mask(router_logits, experts_per_token)
    popularity = chosen.mean((1, 2))
    reuse = (chosen[:, :, 1:] * chosen[:, :, :-1]).sum(-1).mean((1, 2)) / experts_per_token
    fitted = torch.from_numpy(np.arange(len(kinds)) % 2 == 0)

    def recalls(name: str, scores: Tensor, needed: Tensor) -> dict[str, float]:
        counts = (experts_per_token, 2 * experts_per_token)
        hits = [(chosen_mask(scores, count) * needed).sum(-1) / experts_per_token for count in counts]
        return {f"{name}@{count}": hit.mean().item() for count, hit in zip(counts, hits, strict=True)}

    figures = []
    for layer in range(len(chosen) - 1):
        block, next_block = model.model.layers[layer], model.model.layers[layer + 1]
        norm, next_norm = (b.post_attention_layernorm.weight.detach() for b in (block, next_block))
        gate_ahead = (router_inputs[layer] / norm * next_norm) @ next_block.mlp.gate.weight.detach().T
        counts = torch.einsum("nte,ntf->ef", chosen[layer][fitted], chosen[layer + 1][fitted]) + 0.5
        evidence = (counts / counts.sum(-1, keepdim=True)).log() - (popularity[layer + 1] / experts_per_token + 1e-6).log() * 0.75
        table = torch.einsum("nte,ef->ntf", chosen[layer][~fitted], evidence)
        needed = chosen[layer + 1]
        figures.append(
            {
                "layer": layer + 1,
                **recalls("gate_ahead", gate_ahead, needed),
                **recalls("table", table, needed[~fitted]),
                **recalls("popular", popularity[layer + 1].expand(needed.shape), needed),
                f"prev_token@{experts_per_token}": reuse[layer + 1].item(),
            }
        )
    return figures
