"""What a cheaper copy of a MoE model is worth as its own draft: agreement, accepted lengths, expert recall.

Greedy drafting needs no rollout: along the target's own greedy path the draft's token at each position is its
teacher-forced arg-max, and whatever it drafts after its first mismatch is thrown away.

Axes: L layers, N sequences, T tokens, E experts, K experts a token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from optimum.quanto import AbsmaxOptimizer, HqqOptimizer, MaxOptimizer, qint2, qint4, qint8, quantize_weight
from routing_figures import chosen_mask, forward_with_routing
from torch import Tensor
from torch.nn.functional import cross_entropy

DRAFT_LENGTHS = (4, 8)
PROMPT_TOKENS = 96
TEXT_WINDOWS = 24
SAMPLING_TEMPERATURE = 0.7


def round_trip(weight: Tensor, bits: int, group: int, optimizer) -> Tensor:
    """Quantise one expert matrix with quanto's own scale search and rounding, then back to float32.

    8 bits: a scale a row. 4 and 2 bits: scale and shift for each group of ``group`` weights.
    """
    if bits == 8:
        return quantize_weight(weight, qint8, 0, AbsmaxOptimizer()(weight, qint8, 0)).dequantize()
    number = {4: qint4, 2: qint2}[bits]
    scale, shift = optimizer(weight, number, 0, group)
    return quantize_weight(weight, number, 0, scale, shift, group_size=group, optimized=False).dequantize()


@torch.no_grad()
def quantised_copy(target: torch.nn.Module, bits: int, group: int = 64, optimizer=None) -> tuple[torch.nn.Module, float]:
    """(copy with every expert weight quantised and restored, mean relative error of the expert matrices)."""
    draft, errors = copy.deepcopy(target), []
    for layer in draft.model.layers:
        for stacked in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            for weight in stacked:
                restored = round_trip(weight.clone(), bits, group, optimizer or MaxOptimizer())
                errors.append(((restored - weight).norm() / weight.norm()).item())
                weight.copy_(restored)
    return draft, float(np.mean(errors))


def fewer_experts_copy(target: torch.nn.Module, experts_per_token: int) -> tuple[torch.nn.Module, float]:
    """(copy that routes each token to fewer experts, 0)."""
    draft = copy.deepcopy(target)
    for layer in draft.model.layers:
        layer.mlp.gate.top_k = experts_per_token
    return draft, 0.0


@torch.no_grad()
def control_copy(target: torch.nn.Module, shuffle: bool) -> tuple[torch.nn.Module, float]:
    """(copy whose experts are shuffled within each layer, or give zero, 0): what the experts matter."""
    draft, generator = copy.deepcopy(target), torch.Generator().manual_seed(0)
    for layer in draft.model.layers:
        experts = layer.mlp.experts
        if shuffle:
            new_order = torch.randperm(len(experts.down_proj), generator=generator)
            experts.gate_up_proj.copy_(experts.gate_up_proj[new_order].clone())
            experts.down_proj.copy_(experts.down_proj[new_order].clone())
        else:
            experts.down_proj.zero_()
    return draft, 0.0


DRAFTS: dict[str, Callable[[torch.nn.Module], tuple[torch.nn.Module, float]]] = {
    "int8": lambda target: quantised_copy(target, 8),
    "int4_g64": lambda target: quantised_copy(target, 4),
    "int4_g32": lambda target: quantised_copy(target, 4, group=32),
    "int2_g32_max": lambda target: quantised_copy(target, 2, group=32),
    "int2_g64_hqq": lambda target: quantised_copy(target, 2, 64, HqqOptimizer()),
    "int2_g32_hqq": lambda target: quantised_copy(target, 2, 32, HqqOptimizer()),
    "top2_experts": lambda target: fewer_experts_copy(target, 2),
    "top1_expert": lambda target: fewer_experts_copy(target, 1),
    "control_no_experts": lambda target: control_copy(target, shuffle=False),
    "control_shuffled_experts": lambda target: control_copy(target, shuffle=True),
}


def accepted_lengths(matches: list[bool], draft_length: int) -> list[int]:
    """Accepted tokens of each draft + verify round along the target's path; ``matches``: does the draft agree there?

    >>> accepted_lengths([True, True, False, True, True, True], draft_length=2)
    [2, 2]
    """
    position, accepted = 0, []
    while position + draft_length < len(matches):
        count = 0
        while count < draft_length and matches[position + count]:
            count += 1
        accepted.append(count)
        position += count + 1
    return accepted


def overlap(logits: Tensor, other_logits: Tensor, temperature: float = 1.0) -> float:
    """Mean over positions of sum(min(p, q)): the chance that speculative sampling accepts; logits (..., vocabulary).

    Source: Leviathan et al. 2023, Fast Inference from Transformers via Speculative Decoding, section 3.2.
    """
    probs, other_probs = (logits / temperature).softmax(-1), (other_logits / temperature).softmax(-1)
    return torch.minimum(probs, other_probs).sum(-1).mean().item()


@dataclass(frozen=True)
class Continuation:
    """A continuation that the target wrote: ``ids`` (T,), of which the first ``prompt_tokens`` are the prompt."""

    domain: str
    ids: Tensor
    prompt_tokens: int
    logits: Tensor
    router_logits: Tensor

    @property
    def predicting(self) -> slice:
        """Positions whose logits predict the new tokens."""
        return slice(self.prompt_tokens - 1, -1)


@torch.no_grad()
def continue_prompt(target: torch.nn.Module, tokenizer, prompt: dict[str, str], new_tokens: int, temperature: float = 0.0) -> Continuation:
    """Let the target continue a prompt (its last 96 tokens), greedily or sampled, and record logits and routing."""
    ids = torch.tensor([tokenizer(prompt["prompt"])["input_ids"][-PROMPT_TOKENS:]])
    choice = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    written = target.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, pad_token_id=0, **choice)
    logits, router_logits, _ = forward_with_routing(target, written)
    return Continuation(prompt["domain"], written[0], ids.shape[1], logits[0], router_logits[:, 0])


class DraftBench:
    """Everything of the target that drafts are measured against, computed once."""

    def __init__(self, target: torch.nn.Module, tokenizer, prompts: list[dict[str, str]], windows: Tensor, new_tokens: int) -> None:
        self.experts_per_token = target.config.num_experts_per_tok
        self.greedy = [continue_prompt(target, tokenizer, prompt, new_tokens) for prompt in prompts]
        self.samples = self._sampled_texts(target, tokenizer, prompts)
        self.windows = windows[:: max(1, len(windows) // TEXT_WINDOWS)]
        self.text_logits, self.text_router_logits, _ = forward_with_routing(target, self.windows)
        self.sampled = [continue_prompt(target, tokenizer, prompt, new_tokens, SAMPLING_TEMPERATURE) for prompt in prompts[::4]]

    @staticmethod
    @torch.no_grad()
    def _sampled_texts(target: torch.nn.Module, tokenizer, prompts: list[dict[str, str]]) -> list[dict[str, str]]:
        """Up to four sampled continuations (temperature 0.8, top-p 0.95), to be read."""
        texts = []
        for prompt in prompts[:: max(1, len(prompts) // 4)][:4]:
            ids = torch.tensor([tokenizer(prompt["prompt"])["input_ids"]])
            written = target.generate(ids, max_new_tokens=90, do_sample=True, temperature=0.8, top_p=0.95, pad_token_id=0)
            texts.append({"id": prompt["id"], "text": tokenizer.decode(written[0])})
        return texts

    def expert_recall(self, router_logits: Tensor, draft_router_logits: Tensor) -> Tensor:
        """Share of the target's experts that the draft routes to as well; (..., E) -> (...)."""
        chosen, drafted = (chosen_mask(logits, self.experts_per_token) for logits in (router_logits, draft_router_logits))
        return (chosen * drafted).sum(-1) / self.experts_per_token

    def window_coverage(self, path: Continuation, draft_router_logits: Tensor, draft_length: int) -> list[float]:
        """Share of the experts needed to verify ``draft_length`` + 1 tokens that drafting them had used, each window and layer mean."""
        new = slice(path.prompt_tokens, None)
        needed = chosen_mask(path.router_logits[:, new], self.experts_per_token)
        drafted = chosen_mask(draft_router_logits[:, new], self.experts_per_token)
        shares = []
        for start in range(0, needed.shape[1] - draft_length - 1, draft_length + 1):
            union = needed[:, start : start + draft_length + 1].amax(1)
            drafted_union = drafted[:, start : start + draft_length].amax(1)
            shares.append(((union * drafted_union).sum(-1) / union.sum(-1)).mean().item())
        return shares

    def text_figures(self, draft: torch.nn.Module) -> dict[str, float]:
        """Agreement on human-written held-out text."""
        logits, router_logits, _ = forward_with_routing(draft, self.windows)
        targets = self.windows[:, 1:].flatten()
        losses = [cross_entropy(each[:, :-1].flatten(0, 1), targets) for each in (logits, self.text_logits)]
        return {
            "text_top1_agreement": (logits.argmax(-1) == self.text_logits.argmax(-1)).float().mean().item(),
            "text_sampling_acceptance_T1": overlap(logits, self.text_logits),
            "text_expert_recall": self.expert_recall(self.text_router_logits, router_logits).mean().item(),
            "text_loss_delta_nats": (losses[0] - losses[1]).item(),
        }

    def sampled_acceptance(self, draft: torch.nn.Module) -> float:
        """Acceptance a token at temperature 0.7 on continuations that the target sampled at 0.7."""
        rates = []
        for path in self.sampled:
            logits = forward_with_routing(draft, path.ids[None])[0][0]
            rates.append(overlap(path.logits[path.predicting], logits[path.predicting], SAMPLING_TEMPERATURE))
        return float(np.mean(rates))

    def figures(self, draft: torch.nn.Module, weight_error: float) -> dict:
        """All figures of one draft, under the keys of report.json."""
        matches, domains, overlaps, recalls = [], [], [], []
        coverage: dict[int, list[float]] = {length: [] for length in DRAFT_LENGTHS}
        for path in self.greedy:
            logits, router_logits, _ = forward_with_routing(draft, path.ids[None])
            logits, router_logits = logits[0], router_logits[:, 0]
            matches.append((logits[path.predicting].argmax(-1) == path.ids[path.prompt_tokens :]).tolist())
            domains.append(path.domain)
            overlaps.append(overlap(path.logits[path.predicting], logits[path.predicting]))
            recalls.append(self.expert_recall(path.router_logits, router_logits)[:, path.prompt_tokens :])
            for length, shares in coverage.items():
                shares += self.window_coverage(path, router_logits, length)
        recall = torch.cat(recalls, 1)  # (L, new tokens of all paths)

        def of_domain(domain: str) -> list[list[bool]]:
            return [match for match, own in zip(matches, domains, strict=True) if own == domain]

        result = {
            "weight_rel_err": weight_error,
            **self.text_figures(draft),
            "sampled_path_acceptance_T0.7": self.sampled_acceptance(draft),
            "top1_agreement": float(np.mean(list(chain(*matches)))),
            "sampling_acceptance_T1": float(np.mean(overlaps)),
            "expert_recall": recall.mean().item(),
            "expert_recall_per_layer": recall.mean(1).tolist(),
            "exact_set": (recall == 1).float().mean().item(),
            "window_coverage": {length: float(np.mean(shares)) for length, shares in coverage.items()},
            "per_domain": {domain: float(np.mean(list(chain(*of_domain(domain))))) for domain in dict.fromkeys(domains)},
        }
        for length in DRAFT_LENGTHS:
            accepted = list(chain.from_iterable(accepted_lengths(match, length) for match in matches))
            rejections = sum(count < length for count in accepted)
            result[f"gamma{length}"] = {
                "mean_accepted": float(np.mean(accepted)),
                "tokens_per_verify": float(np.mean(accepted)) + 1,
                "all_accepted": float(np.mean([count == length for count in accepted])),
                "per_token_alpha": float(sum(accepted) / (sum(accepted) + rejections)),
                "mean_accepted_per_domain": {
                    domain: float(np.mean(list(chain.from_iterable(accepted_lengths(match, length) for match in of_domain(domain)))))
                    for domain in dict.fromkeys(domains)
                },
            }
        return result


def distinct_experts_on_path(bench: DraftBench, new_tokens: int) -> dict[int, float]:
    """Mean number of distinct experts a layer in runs of 1 to 16 tokens that the target wrote greedily."""
    figures = {}
    for tokens in (1, 2, 5, 9, 16):
        counts = []
        for path in bench.greedy:
            chosen = chosen_mask(path.router_logits[:, path.prompt_tokens :], bench.experts_per_token)
            starts = range(0, new_tokens - tokens, tokens)
            counts += [chosen[:, start : start + tokens].amax(1).sum(-1).mean().item() for start in starts]
        figures[tokens] = float(np.mean(counts))
    return figures


def distinct_4gram_share(paths: list[Continuation]) -> float:
    """Distinct 4-grams over 4-grams of the greedy continuations: low when the text runs in loops."""
    shares = []
    for path in paths:
        new = path.ids[path.prompt_tokens :].tolist()
        grams = list(zip(new, new[1:], new[2:], new[3:], strict=False))
        shares.append(len(set(grams)) / len(grams))
    return float(np.mean(shares))
