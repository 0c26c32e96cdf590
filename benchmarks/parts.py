"""What experts in parts would give: each expert split by its neurons into 2 or 4, cached, copied and computed apart. Simulated only.

A layer that misses one expert keeps either link or host idle; in parts, both work on it. Not built for real models: the parts' outputs are
added, which rounds otherwise than one sum does. Every part is charged the launches of a whole expert. ``python -m benchmarks.parts``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

import specter_lab as sl
from specter_lab.cases import case_machine, case_texts
from specter_lab.hardware import Case, case_named
from specter_lab.planning import stand_in

PROMPT, PLANS, PARTS = 16, ("residual", "compressed"), (1, 2, 4)
WHAT = (
    "mean TPOT in ms of two plans of specter_plus with experts in 1, 2 and 4 parts, and of fiddler with whole ones, on the same generated "
    "texts; speedup: fiddler's over the best of them; simulated, not built for real models"
)


def parted(ids: np.ndarray, parts: int) -> np.ndarray:
    """(..., rank) ids of experts -> (..., parts x rank) ids of their parts; -1 stays.

    >>> parted(np.array([[3, -1]]), 2).tolist()
    [[6, -1, 7, -1]]
    """
    wide = ids.astype(np.int64)
    return np.concatenate([np.where(wide < 0, -1, parts * wide + part) for part in range(parts)], axis=-1)


class PartedText:
    """A replayable text whose experts are in parts."""

    def __init__(self, text: Any, parts: int) -> None:
        self.text, self.parts = text, parts
        self.experts, self.gate = parted(text.experts, parts), parted(text.gate, parts)

    def window(self, start: int, length: int) -> Any:
        """The text's own window, in parts."""
        window = self.text.window(start, length)
        draft, needed = (parted(ids, self.parts) for ids in (window.draft, window.needed))
        return SimpleNamespace(draft=draft, needed=needed, accepted=window.accepted)


def pipeline_of(case: Case, system: str, parts: int, context: int) -> sl.Pipeline:
    """That plan (or ``fiddler``) for the case's model with experts in parts, at the case's memory."""
    whole, machine = stand_in(case), case_machine(case)
    geometry, launches = whole.geometry, sl.hardware().runtimes["compiled"].target_expert_us
    target, draft = machine.costs.target, machine.costs.draft
    target = replace(
        target,
        expert_us=launches + (target.expert_us - launches) / parts,
        expert_row_us=target.expert_row_us / parts,
        rebuild_us=launches / 3 + (target.rebuild_us - launches / 3) / parts,
    )
    draft = replace(draft, expert_us=draft.expert_us / parts, expert_row_us=draft.expert_row_us / parts)  # its experts are whole
    machine.costs = sl.CostTable(target, draft)
    geometry = replace(
        geometry,
        experts=tuple(parts * count for count in geometry.experts),
        expert_bytes=tuple(size // parts for size in geometry.expert_bytes),
        experts_per_token=parts * geometry.experts_per_token,
    )
    memory = case.device_bytes + context * geometry.kv_bytes_per_token
    options: dict[str, Any] = {"machine": machine, "memory": memory, "context_length": context}
    shapes = sl.ReplayTarget(geometry, whole.name, bits=whole.bits)
    return sl.baselines.fiddler(shapes, **options) if system == "fiddler" else sl.planned(shapes, system, **options)


def tpot(case: Case, system: str, parts: int, texts: Sequence[Any], new_tokens: int) -> float:
    """Mean TPOT in ms."""
    with pipeline_of(case, system, parts, PROMPT + new_tokens) as pipeline:
        runs = [pipeline.replay(PartedText(text, parts), prompt_tokens=PROMPT, max_new_tokens=new_tokens) for text in texts]
    return float(sum(run.metrics["tpot_ms"] for run in runs) / len(runs))


def work(case: str, *, texts: int, new_tokens: int) -> dict[str, Any]:
    """One case."""
    setting = case_named(case)
    samples = case_texts(setting, texts, PROMPT + new_tokens + 1, seed=0)
    times = {f"{plan} / {parts}": tpot(setting, plan, parts, samples, new_tokens) for plan in PLANS for parts in PARTS}
    rival = tpot(setting, "fiddler", 1, samples, new_tokens)
    whole = min(times[f"{plan} / 1"] for plan in PLANS)
    return {"fiddler": rival, "tpot_ms": times, "speedup": rival / min(times.values()), "speedup_whole": rival / whole}


def main() -> None:
    """Run what is missing and write ``results/parts.json``."""
    from benchmarks.common import run_cells

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--name", default="parts")
    options = parser.parse_args()
    print(run_cells(options.name, WHAT, list(sl.hardware().cases), work, {"texts": options.texts, "new_tokens": options.new_tokens}))


if __name__ == "__main__":
    main()
