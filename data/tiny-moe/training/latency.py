"""Time the tiny model's decoding on this CPU: one token, and a verification of 5 and 9 tokens, with a KV cache.

python latency.py --model DIR [--threads 1 2]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import linear, silu
from transformers import AutoModelForCausalLM, DynamicCache

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
WINDOWS = (1, 5, 9)
CONTEXT_TOKENS = 128
REPEATS = 12
WARM_UP_REPEATS = 2
EXPERT_CALLS = 2000


def random_tokens(vocabulary: int, count: int) -> torch.Tensor:
    """Token ids of shape (1, count), without the end of text."""
    return torch.randint(1, vocabulary, (1, count))


@torch.no_grad()
def window_times_ms(model: torch.nn.Module, window: int) -> list[float]:
    """Wall times of one forward over ``window`` tokens after 128 tokens of context, warm-up left out."""
    times_ms = []
    for _ in range(REPEATS):
        cache = DynamicCache(config=model.config)
        model(input_ids=random_tokens(model.config.vocab_size, CONTEXT_TOKENS), past_key_values=cache, use_cache=True)
        ids = random_tokens(model.config.vocab_size, window)
        begin = time.perf_counter()
        model(input_ids=ids, past_key_values=cache, use_cache=True)
        times_ms.append(1e3 * (time.perf_counter() - begin))
    return times_ms[WARM_UP_REPEATS:]


@torch.no_grad()
def bare_expert_us(model: torch.nn.Module) -> float:
    """Mean wall time of one expert's arithmetic for one token, no framework around the loop."""
    experts = model.model.layers[0].mlp.experts
    count = model.config.num_experts
    hidden = torch.randn(1, model.config.hidden_size)
    begin = time.perf_counter()
    for call in range(EXPERT_CALLS):
        gate, up = linear(hidden, experts.gate_up_proj[call % count]).chunk(2, -1)
        linear(silu(gate) * up, experts.down_proj[call % count])
    return 1e6 * (time.perf_counter() - begin) / EXPERT_CALLS


def main() -> None:
    """Print the median of each combination of threads, experts implementation and window."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts to try")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for implementation in IMPLEMENTATIONS:
            model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, experts_implementation=implementation).eval()
            for window in WINDOWS:
                median_ms = np.median(window_times_ms(model, window))
                print(f"threads {threads} {implementation:10s} window {window}: median {median_ms:.1f} ms", flush=True)
            if threads == arguments.threads[0] and implementation == "eager":
                print(f"one expert, one token: {bare_expert_us(model):.0f} us", flush=True)


if __name__ == "__main__":
    main()
