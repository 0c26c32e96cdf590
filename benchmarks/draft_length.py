"""Draft length by bytes against fixed lengths, the residual plan of every case. Simulated: no weights, no GPU.

``python -m benchmarks.draft_length``, or with other numbers: ``--texts 2 --new-tokens 32 --name draft_length_smoke``.
"""

from __future__ import annotations

import argparse
from typing import Any

import specter_lab as sl
from specter_lab.cases import case_machine, case_texts
from specter_lab.hardware import case_named
from specter_lab.planning import stand_in

FIXED, ALONE, PROMPT = (0, 2, 3, 4, 6, 8), "bytes, none ahead", 16
WHAT = (
    "mean TPOT in ms of the residual plan with each fixed draft length and with ByteLength, drafting ahead, and with ByteLength without; "
    "replays on the simulated machine"
)


def work(case: str, *, texts: int, new_tokens: int) -> dict[str, Any]:
    """One case: TPOT by length, and ByteLength's over the best fixed one."""
    setting, context = case_named(case), PROMPT + new_tokens
    target = stand_in(setting)
    memory = setting.device_bytes + context * target.geometry.kv_bytes_per_token
    generated = case_texts(setting, texts, context + 1, seed=2)
    found = {}
    for length in (*FIXED, "bytes", ALONE):
        chosen = length if length in FIXED else sl.ByteLength()
        options = {"machine": case_machine(setting), "memory": memory, "context_length": context, "draft_length": chosen}
        options["draft_ahead"] = length != ALONE
        with sl.planned(target, "residual", **options) as pipeline:
            runs = [pipeline.replay(text, prompt_tokens=PROMPT, max_new_tokens=new_tokens) for text in generated]
        found[str(length)] = sum(run.metrics["tpot_ms"] for run in runs) / texts
    return {"tpot_ms": found, "over_best_fixed": found["bytes"] / min(found[str(length)] for length in FIXED)}


def main() -> None:
    """Run what is missing and write ``results/draft_length.json``."""
    from benchmarks.common import run_cells

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--name", default="draft_length")
    options = parser.parse_args()
    settings = {"texts": options.texts, "new_tokens": options.new_tokens}
    print(run_cells(options.name, WHAT, list(sl.hardware().cases), work, settings))


if __name__ == "__main__":
    main()
