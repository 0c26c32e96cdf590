"""Prompt lengths of 16, 128 and 512 tokens, outputs of 128, three sizes of device memory, 40 prompts, every system. Simulated.

The bundled model decodes each prompt once (``record_text``); then its own routing is replayed, which takes a tenth of the time.
``python -m benchmarks.figures``, or with other numbers: ``--prompts 3 --new-tokens 16 --name figures_smoke``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch

import specter_lab as sl
from specter_lab.planning import stand_in

LENGTHS, SLOTS, LONGEST = (16, 128, 512), {"low": 3, "middle": 6, "high": 12}, 16
LINK_GB_S, TRIAL, TRIED = 0.1, 2, 32
KEPT = Path("build/recorded")
WHAT = (
    "rows of sl.compare for each memory / prompt length: the bundled model's own greedy texts, replayed on the simulated machine "
    f"({LINK_GB_S} GB/s, default costs). Memory: what a qint4 self-draft takes "
    f"with {', '.join(f'{n} ({name})' for name, n in SLOTS.items())} slots a layer; intervals are 95 % over prompts"
)


def prompt_ids(moe: sl.MoE, number: int, length: int) -> list[int]:
    """The bundled prompt of that number and as many of the next as it takes, cut to ``length`` tokens."""
    texts = [prompt.text for prompt in sl.load_prompts()]
    ids: list[int] = []
    while len(ids) < length:
        ids += moe.tokenizer(texts[number % len(texts)]).input_ids
        number += 1
    return ids[:length]


def texts_of(length: int, prompts: int, new_tokens: int) -> list[sl.RecordedText]:
    """Recorded texts, from ``build/recorded`` where they are there already."""
    KEPT.mkdir(parents=True, exist_ok=True)
    paths = [KEPT / f"{length}-{new_tokens}-{number}.safetensors" for number in range(prompts)]
    if not all(path.is_file() for path in paths):
        with sl.load_moe("tiny-moe", dtype="float32") as moe:
            bank = moe.quantize("qint4")
            for number, path in enumerate(paths):
                if not path.is_file():
                    ids, most = prompt_ids(moe, number, length), max(new_tokens, TRIED)  # plans are tried on so many
                    text = sl.record_text(moe, bank, ids, new_tokens=most + 1, longest_draft=LONGEST)
                    os.replace(text.save(path.with_suffix(f".{os.getpid()}")), path)
    return [sl.RecordedText.load(path) for path in paths]


def library() -> list[sl.RoutingLog]:
    """Routing of four bundled prompts, for the system that learns from recordings."""
    moe, logs = sl.load_moe("tiny-moe", dtype="float32"), []
    for prompt in sl.load_prompts()[-4:]:
        with torch.no_grad(), sl.RouterRecorder(moe.model) as recorder:
            moe.model(moe.tokenizer(prompt.text, return_tensors="pt").input_ids)
        logs.append(recorder.log)
    return logs


def work(cell: str, *, prompts: int, new_tokens: int) -> dict[str, Any]:
    """One memory and prompt length."""
    level, length = cell.split("/")[0], int(cell.split("/")[1])
    target, texts = stand_in(sl.load_moe("tiny-moe", dtype="float32")), texts_of(length, prompts + TRIAL, new_tokens)
    context = length + new_tokens
    memory = sl.plan_memory(target, "lookahead", slots=SLOTS[level], context_length=context).device.total
    machine = sl.SimulatedMachine(LINK_GB_S)
    own = {"activation_aware": {"library": library()}, "specter_plus": {"trial": texts[prompts:]}}
    done = sl.compare(
        list(sl.baselines.SYSTEMS), texts[:prompts], target=target, machine=machine, memory=memory, context_length=context,
        skip_unfit=True, system_options=own, max_new_tokens=new_tokens,
    )  # fmt: skip
    return {"memory_bytes": memory, **done.as_dict(), "conditions": {"prompts": prompts, "acceptance": _acceptance(texts[:prompts])}}


def _acceptance(texts: list[sl.RecordedText]) -> float:
    """Of a single drafted token, over all texts."""
    held = [text.accepted[text.prompt_tokens - 1 : -1] for text in texts]
    return float(sum(h.sum() for h in held) / sum(h.size for h in held))


def main() -> None:
    """Run what is missing and write ``results/figures.json``."""
    from benchmarks.common import run_cells

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--name", default="figures")
    options = parser.parse_args()
    cells = [f"{level}/{length}" for level in SLOTS for length in LENGTHS]  # neighbours share no recording: nobody records twice
    print(run_cells(options.name, WHAT, cells, work, {"prompts": options.prompts, "new_tokens": options.new_tokens}))


if __name__ == "__main__":
    main()
