"""How long a simulated run of 128 tokens takes here, for each system: 26 layers of 64 experts, one core. Aim: below 2 s."""

from __future__ import annotations

import time
from typing import Any

import torch

import specter_lab as sl
from benchmarks.common import conditions, write
from specter_lab.cases import case_named, case_texts
from specter_lab.planning import stand_in

NEW, PROMPT, RUNS = 128, 16, 3


def main() -> None:
    """Run and write ``results/replay_speed.json``."""
    torch.set_num_threads(1)
    case = case_named("ds_high")
    target, text = stand_in(case), case_texts(case, 1, PROMPT + NEW + 1)[0]
    context = PROMPT + NEW
    shared: dict[str, Any] = {
        "machine": sl.SimulatedMachine(case.link.gb_s), "context_length": context,
        "memory": case.device_bytes + context * case.model.kv_bytes_per_token,
    }  # fmt: skip
    seconds = {}
    for name in sl.baselines.SYSTEMS:
        options = {"library": [text.log()]} if name == "activation_aware" else {}
        with sl.baselines.named(name)(target, **shared, **options) as pipeline:
            taken = []
            for _ in range(RUNS):
                start = time.process_time()
                run = pipeline.replay(text, prompt_tokens=PROMPT, max_new_tokens=NEW)
                run.metrics  # noqa: B018  the figures are part of it
                taken.append(time.process_time() - start)
        seconds[name] = min(taken)
        print(f"{name:22} {seconds[name]:.2f} s", flush=True)
    what = f"processor seconds of one replay and its figures, the best of {RUNS}; {case.model.name}, {NEW} tokens after {PROMPT}"
    print(write("replay_speed", {"what": what, "seconds": seconds, "conditions": conditions(aim_s=2.0)}))


if __name__ == "__main__":
    main()
