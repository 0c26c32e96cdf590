"""Does lookahead prefetch pay? Four link speeds, three cache sizes, against the same pipeline without prefetch and on-demand LRU.

Throttled machine, one thread for compute; equal device memory in each cell: the budget is what the lookahead pipeline
takes with slots for 1/8, 1/4 or 1/2 of the experts, and the draft-free systems turn the draft's bytes into slots.
"""

from __future__ import annotations

import torch

import specter_lab as sl
from benchmarks.common import conditions, write

LINKS, FRACTIONS = (0.025, 0.05, 0.1, 0.2), (1 / 8, 1 / 4, 1 / 2)
SYSTEMS = ("on_demand", "next_layer_gate", "speculative_on_demand", "lookahead")
NEW, PER_KIND, LENGTH, CONTEXT = 32, 1, 6, 192


def main() -> None:
    """Run and write ``results/pays.json``."""
    torch.set_num_threads(1)
    moe = sl.load_moe("tiny-moe", dtype="float32")
    prompts = [prompt.text for prompt in sl.load_prompts(per_kind=PER_KIND)]
    cells = []
    with moe:
        bank = moe.quantize("qint4")
        for fraction in FRACTIONS:
            memory = sl.plan_memory(moe, "lookahead", slots=round(24 * fraction), context_length=CONTEXT, bank=bank).device.total
            for link in LINKS:
                drafting = {"bank": bank, "draft_length": LENGTH}
                done = sl.compare(
                    SYSTEMS, prompts, target=moe, machine=sl.ThrottledMachine(link), memory=memory, context_length=CONTEXT, confidence=0.95,
                    system_options={"speculative_on_demand": drafting, "lookahead": drafting}, max_new_tokens=NEW, do_sample=False,
                )  # fmt: skip
                rows = {row["system"]: row for row in done.rows}
                cell = {
                    "link_gb_s": link,
                    "slots_fraction": fraction,
                    "memory_bytes": memory,
                    "identical_tokens": done.identical_tokens,
                    "tpot_ms": {name: row["tpot_ms"] for name, row in rows.items()},
                    "exposed_ms_per_token": {name: row["exposed_ms_per_token"] for name, row in rows.items()},
                    "lookahead_over": {name: done.speedup("lookahead", name) for name in SYSTEMS if name != "lookahead"},
                }
                cells.append(cell)
                ratios = ", ".join(f"{name} {value[0]:.2f}x" for name, value in cell["lookahead_over"].items())
                print(f"{link * 1e3:.0f} MB/s, slots 1/{1 / fraction:.0f}: lookahead over {ratios}", flush=True)
                path = write(
                    "pays",
                    {
                        "what": "mean TPOT of each system / mean TPOT of lookahead, with 95 % intervals over prompts; throttled machine",
                        "cells": cells,
                        "conditions": conditions(
                            model="tiny-moe", dtype="float32", prompts=len(prompts), new_tokens=NEW, draft_length=LENGTH, draft="qint4"
                        ),
                    },
                )  # after each cell: an interrupt keeps what was measured
    print(path)


if __name__ == "__main__":
    main()
