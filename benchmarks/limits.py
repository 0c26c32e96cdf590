"""What keeps ``specter_plus`` from more: each of its mechanisms made perfect in turn, then all at once. Simulated bounds, not methods.

Costs that are set to nothing and knowledge that nobody has, in the same loop and plans; the best plan counts for each line.
``python -m benchmarks.limits``, after ``benchmarks.cases``, whose fastest rival is run again here, on the same texts.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import specter_lab as sl
from specter_lab.cases import case_machine, case_texts
from specter_lab.hardware import case_named
from specter_lab.oracle import PerfectText
from specter_lab.planning import stand_in

PROMPT, PLANS = 16, ("residual", "residual on arrival", "compressed", "compressed on arrival")
PERFECT = {
    "as it is": frozenset(),
    "rebuilding costs nothing": frozenset({"rebuild"}),
    "drafting costs nothing": frozenset({"draft"}),
    "every draft holds": frozenset({"accepted"}),
    "the coming pass is known": frozenset({"routing"}),
    "the whole text is known": frozenset({"routing", "eviction"}),
    "all of these": frozenset({"rebuild", "draft", "accepted", "routing", "eviction"}),
}
WHAT = (
    "mean TPOT in ms of specter_plus with a mechanism made perfect, by its best plan, and the fastest rival's over it, on the same texts; "
    "drafting that costs nothing bounds what drafting ahead can hide; simulated"
)


def tpot(case: Any, plan: str, perfect: frozenset[str], texts: list[Any], new_tokens: int, options: dict[str, Any]) -> float:
    """Mean TPOT in ms; infinite where the plan doesn't fit."""
    machine = case_machine(case)
    target, draft = machine.costs.target, machine.costs.draft
    target = replace(target, rebuild_us=0.0) if "rebuild" in perfect else target
    machine.costs = sl.CostTable(target, sl.LaneCosts() if "draft" in perfect else draft)
    times = []
    for text in texts:
        shown: Any = PerfectText(text) if "accepted" in perfect else text
        known = torch.from_numpy(np.asarray(text.experts, dtype=np.int64))
        own: dict[str, Any] = {"predictor": sl.Oracle(SimpleNamespace(experts=known))} if "routing" in perfect else {}
        if "eviction" in perfect and plan.startswith("compressed"):  # with drafts it isn't known which tokens a pass verifies
            rows = [[{*row.tolist()} for row in known[PROMPT:, layer]] for layer in range(known.shape[1])]
            own["eviction"] = sl.ClairvoyantEviction(
                [[{*known[:PROMPT, layer].unique().tolist()}, *rest] for layer, rest in enumerate(rows)]
            )
        try:
            with sl.planned(stand_in(case), plan, machine=machine, **options, **own) as pipeline:
                times.append(pipeline.replay(shown, prompt_tokens=PROMPT, max_new_tokens=new_tokens).metrics["tpot_ms"])
        except sl.BudgetError:
            return float("inf")
    return sum(times) / len(times)


def work(case: str, *, texts: int, new_tokens: int, rivals: dict[str, str]) -> dict[str, Any]:
    """One case."""
    setting, context = case_named(case), PROMPT + new_tokens
    target, samples = stand_in(setting), case_texts(setting, texts, context + 1, seed=0)
    memory = setting.device_bytes + context * target.geometry.kv_bytes_per_token
    options = {"memory": memory, "context_length": context}
    with sl.baselines.named(rivals[case])(target, machine=case_machine(setting), **options) as pipeline:
        runs = [pipeline.replay(text, prompt_tokens=PROMPT, max_new_tokens=new_tokens) for text in samples]
    rival = sum(run.metrics["tpot_ms"] for run in runs) / texts
    rows = {}
    for name, perfect in PERFECT.items():
        times = {plan: tpot(setting, plan, perfect, samples, new_tokens, options) for plan in PLANS}
        best = min(times, key=lambda plan: times[plan])
        rows[name] = {"plan": best, "tpot_ms": times[best], "speedup": rival / times[best]}
    return {"fastest_rival": rivals[case], "its_tpot_ms": rival, "rows": rows}


def main() -> None:
    """Run what is missing and write ``results/limits.json``."""
    from benchmarks.common import read, run_cells

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--name", default="limits")
    options = parser.parse_args()
    kept = read("cases")
    if kept is None:
        raise SystemExit("The rivals' names come from results/cases.json, which is missing. Run python -m benchmarks.cases first.")
    rivals = {
        case: next(row["fastest_rival"] for row in cell["rows"] if row["system"] == "specter_plus") for case, cell in kept["cells"].items()
    }
    print(run_cells(options.name, WHAT, list(rivals), work, {"texts": options.texts, "new_tokens": options.new_tokens, "rivals": rivals}))


if __name__ == "__main__":
    main()
