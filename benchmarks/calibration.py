"""Does the simulator predict the throttled machine? Each system's TPOT on bundled prompts, measured and predicted in turn.

Needs a quiet computer: one thread computes, one copies. Aim: each system's median within 10 %, and the order of the systems.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from scipy.stats import spearmanr
from tqdm import tqdm

import specter_lab as sl
from benchmarks.common import conditions, rounded, write

LINK_GB_S, MEMORY, CONTEXT = 0.05, "13MB", 256


def main() -> None:
    """Run and write ``results/calibration.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--name", default="calibration")
    options = parser.parse_args()
    torch.set_num_threads(1)
    prompts = [prompt.text for prompt in sl.load_prompts(per_kind=-(-options.prompts // 4))][: options.prompts]
    with sl.load_moe("tiny-moe", dtype="float32") as moe:
        bank = moe.quantize("qint4")
        residual = moe.residuals(bank)
        measured = sl.ThrottledMachine(LINK_GB_S)
        twin = sl.calibrate(measured, moe, bank=bank, residual=residual)
        pairs: dict[str, list[tuple[float, float]]] = {}
        systems = [name for name in sl.baselines.SYSTEMS if name not in ("activation_aware", "oracle")]
        for prompt in tqdm(prompts, unit="prompt"):
            for name in systems:
                own: dict[str, Any] = {} if name in sl.baselines.DRAFTLESS else {"bank": bank}
                own |= {"residual": residual} if name in ("residual_lookahead", "specter_plus") else {}
                own |= {"separate": False} if name == "specmoeoff_b1" else {}  # copies of the weights don't fit
                request = {"max_new_tokens": options.new_tokens, "do_sample": False}
                tpots = []
                for machine in (measured, twin):
                    with sl.baselines.named(name)(moe, machine=machine, memory=MEMORY, context_length=CONTEXT, **own) as pipeline:
                        tpots.append(pipeline.generate(prompt, **request).metrics["tpot_ms"])
                pairs.setdefault(name, []).append((tpots[0], tpots[1]))
    rows = {}
    for name, tpots in pairs.items():
        real, predicted = (statistics.median(side) for side in zip(*tpots, strict=True))
        errors = [b / a - 1 for a, b in tpots]
        rows[name] = {"measured_ms": real, "predicted_ms": predicted, "error": statistics.median(errors), "errors": errors}
        print(f"{name:22} measured {real:6.1f} ms  predicted {predicted:6.1f} ms  error {100 * rows[name]['error']:+.1f} %")
    order = float(spearmanr([row["measured_ms"] for row in rows.values()], [row["predicted_ms"] for row in rows.values()]).statistic)
    print(f"rank correlation {order:.3f}; beyond its bytes a copy takes {twin.copy_delay_us:.0f} us, a host job {twin.host_delay_us:.0f}")
    what = (
        "median TPOT on the throttled machine and on its simulated twin (sl.calibrate), in turn; error: median of predicted / measured - 1"
    )
    result = {
        "what": what,
        "systems": rows,
        "rank_correlation": order,
        "copy_delay_us": twin.copy_delay_us,
        "host_delay_us": twin.host_delay_us,
        "costs": repr(twin.costs),
    }
    print(
        write(
            options.name,
            rounded({**result, "conditions": conditions(prompts=len(prompts), new_tokens=options.new_tokens, link_gb_s=LINK_GB_S)}),
        )
    )


if __name__ == "__main__":
    main()
