"""Measure how realistic tiny-moe is: its routing on held-out text, and cheaper copies of itself as drafts.

    python analyze.py --model DIR --corpus DIR --out report.json [--quick]

``--corpus`` is what prep_corpus.py wrote (heldout.jsonl and prompts.json). The keys of the report are explained in the
model card.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from draft_figures import DRAFTS, DraftBench, distinct_4gram_share, distinct_experts_on_path
from routing_figures import cache_figures, held_out_windows, next_layer_figures, route_all, routing_statistics
from transformers import AutoModelForCausalLM, AutoTokenizer

WINDOWS_PER_KIND = 24
SHOWN_PER_LAYER = (
    "entropy_over_max",
    "topk_mass",
    "usage_max_over_mean",
    "usage_min_over_mean",
    "dead_experts",
    "reuse_next_token",
    "reuse_chance_marginals",
    "any_expert_reused",
)
SHOWN_PER_DRAFT = ("weight_rel_err", "top1_agreement", "text_top1_agreement", "sampled_path_acceptance_T0.7", "text_expert_recall")


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--corpus", type=Path, required=True, help="folder with heldout.jsonl and prompts.json")
    parser.add_argument("--out", type=Path, required=True, help="report to write (JSON)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the prompts, a sixth of the text, 32 new tokens")
    parser.add_argument("--new-tokens", type=int, default=96, help="tokens the target writes for each prompt")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def draft_report(target: torch.nn.Module, bench: DraftBench) -> dict[str, dict]:
    """Figures of every draft; one that fails is reported as such and does not stop the others."""
    report = {}
    for name, make_draft in DRAFTS.items():
        try:
            report[name] = bench.figures(*make_draft(target))
        except (RuntimeError, ValueError, ImportError) as error:
            report[name] = {"error": repr(error)[:300]}
        print(name, {key: round(value, 3) for key, value in report[name].items() if key in SHOWN_PER_DRAFT} or report[name], flush=True)
    return report


def print_summary(report: dict) -> None:
    """The routing part of the report, rounded, for the eye."""
    for key in SHOWN_PER_LAYER:
        print(key, np.round(report["routing"][key], 3).tolist())
    for kept, rates in report["cache"].items():
        print("cache", kept, {policy: round(float(np.mean(rate)), 3) for policy, rate in rates.items()})
    for row in report["next_layer"]:
        print({key: round(value, 3) for key, value in row.items()})
    for sample in report["sampled"]:
        print("sampled", sample["id"], repr(sample["text"]))


def main() -> None:
    """Open, measure, print, write."""
    arguments = read_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    target = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, experts_implementation="grouped_mm").eval()
    config = target.config
    with (arguments.corpus / "heldout.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    prompts = json.loads((arguments.corpus / "prompts.json").read_text(encoding="utf-8"))
    new_tokens = arguments.new_tokens
    if arguments.quick:
        prompts, new_tokens = prompts[::10], 32

    windows, kinds = held_out_windows(rows, tokenizer, 4 if arguments.quick else WINDOWS_PER_KIND)
    router_logits, router_inputs = route_all(target, windows)
    experts_per_token = config.num_experts_per_tok
    bench = DraftBench(target, tokenizer, prompts, windows, new_tokens)
    shown = list(zip(prompts, bench.greedy, strict=True))[:: max(1, len(prompts) // 8)]
    report = {
        "config": {
            "E": config.num_experts,
            "K": experts_per_token,
            "L": config.num_hidden_layers,
            "hidden": config.hidden_size,
            "inter": config.moe_intermediate_size,
            "params": sum(weight.numel() for weight in target.parameters()),
        },
        "routing": routing_statistics(router_logits, kinds, experts_per_token),
        "cache": cache_figures(router_logits, experts_per_token),
        "next_layer": next_layer_figures(target, router_logits, router_inputs, kinds, experts_per_token),
        "greedy_distinct_4gram_ratio": distinct_4gram_share(bench.greedy),
        "samples": [
            {
                "id": prompt["id"],
                "prompt": prompt["prompt"][-160:],
                "greedy": tokenizer.decode(path.ids[path.prompt_tokens : path.prompt_tokens + 60]),
            }
            for prompt, path in shown
        ],
        "sampled": bench.samples,
        "drafts": draft_report(target, bench),
        "unique_experts_on_greedy_path": distinct_experts_on_path(bench, new_tokens),
    }
    arguments.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print_summary(report)


if __name__ == "__main__":
    main()
