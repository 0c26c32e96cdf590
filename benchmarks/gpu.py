"""Systems on a real GPU: a random Qwen3-MoE of OLMoE's expert shape, bf16, experts in page-locked host memory.

The routing of random weights has no structure and a draft of them is rarely accepted, so this measures the machine, not the
method: link rate, overlap, what a demand waits for, and the costs that a simulation of this GPU should be given.
"""

from __future__ import annotations

import statistics

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import specter_lab as sl
from benchmarks.common import conditions, write
from specter_lab.machines.cuda import CudaMachine

SYSTEMS = ("on_demand", "next_layer_gate", "specter", "lookahead")
NEW, RUNS = 48, 3


def main() -> None:
    """Run and write ``results/gpu.json``; says so and stops where there is no GPU."""
    if not CudaMachine.available():
        print("no GPU here: nothing measured")
        return
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=2048, moe_intermediate_size=1024, num_hidden_layers=16, num_experts=64, num_experts_per_tok=8,
        num_attention_heads=16, num_key_value_heads=16, head_dim=128, vocab_size=50304, intermediate_size=4096,
        max_position_embeddings=4096,
    )  # fmt: skip
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    moe, machine = sl.load_moe(model), CudaMachine()
    ids = torch.randint(5, 50000, (1, 64), device="cuda")
    rows = {}
    with moe:
        bank = moe.quantize("qint4")
        for name in SYSTEMS:
            drafting = {} if name in sl.baselines.DRAFTLESS else {"bank": bank, "draft_length": 4}
            memory = "6GB"
            with sl.baselines.named(name)(moe, machine=machine, memory=memory, context_length=256, **drafting) as pipeline:
                runs = [pipeline.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None) for _ in range(RUNS)]
                slots = pipeline.plan.slots[0]
            transfers = runs[-1].trace.of_kind("transfer")
            rate = transfers["bytes"] / (transfers["end_us"] - transfers["start_us"]) / 1e3
            metrics = [run.metrics for run in runs]
            keys = ("ttft_ms", "tpot_ms", "hit_rate", "moved_mb_per_token", "exposed_ms_per_token", "overlap", "link_utilisation")
            rows[name] = {
                "slots": slots,
                **{key: statistics.median(m[key] for m in metrics) for key in keys},
                "acceptance_rate": metrics[-1]["acceptance_rate"],
                "link_gb_s": float(rate.median()),
            }
            print(name, {k: round(v, 3) if isinstance(v, float) else v for k, v in rows[name].items()}, flush=True)
            costs = sl.costs_of([run.trace for run in runs])
            rows[name]["costs_us"] = {"target": vars(costs.target), "draft": vars(costs.draft)}
    shape = "random qwen3_moe: 16 layers x 64 experts of 3 x 2048 x 1024 (12.58 MB in bf16), 8 a token"
    result = {"what": machine.label, "rows": rows, "conditions": conditions(model=shape, memory="6GB", new_tokens=NEW, runs=RUNS)}
    print(write("gpu", result))


if __name__ == "__main__":
    main()
