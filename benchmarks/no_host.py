"""The cases without host compute on either side: ``specter_plus`` with misses on the link alone, against the rivals that use no host.

Simulated. The rivals are the rows of ``results/cases.json``, whose texts and settings this takes over: run ``benchmarks.cases`` first.
"""

from __future__ import annotations

from typing import Any

import specter_lab as sl
from specter_lab.cases import case_machine, case_texts
from specter_lab.hardware import case_named
from specter_lab.planning import stand_in

PROMPT, OURS = 16, frozenset({"lookahead", "residual_lookahead", "specter_plus", "oracle"})
WHAT = "mean TPOT in ms of specter_plus without host compute and of the fastest rival without it (see cases.json); simulated"


def work(case: str, *, texts: int, new_tokens: int) -> dict[str, Any]:
    """One case."""
    from benchmarks.common import read

    setting, context = case_named(case), PROMPT + new_tokens
    target = stand_in(setting)
    options = {
        "machine": case_machine(setting),
        "memory": setting.device_bytes + context * target.geometry.kv_bytes_per_token,
        "context_length": context,
        "split": None,
    }
    plan = str(sl.try_plans(target, case_texts(setting, 2, context, seed=1), **options).index[0])
    with sl.planned(target, plan, **options) as pipeline:
        runs = [
            pipeline.replay(text, prompt_tokens=PROMPT, max_new_tokens=new_tokens)
            for text in case_texts(setting, texts, context + 1, seed=0)
        ]
    ours = sum(run.metrics["tpot_ms"] for run in runs) / texts
    rows = (read("cases") or {})["cells"][case]["rows"]
    rivals = {row["system"]: row["tpot_ms"]["mean"] for row in rows if row["system"] not in OURS and not row["host_rate"]}
    fastest = min(rivals, key=lambda name: rivals[name])
    return {"plan": plan, "tpot_ms": ours, "fastest_rival": fastest, "its_tpot_ms": rivals[fastest], "speedup": rivals[fastest] / ours}


def main() -> None:
    """Run what is missing and write ``results/no_host.json``."""
    from benchmarks.common import read, run_cells

    kept = read("cases")
    if kept is None:
        raise SystemExit("The rivals' figures come from results/cases.json, which is missing. Run python -m benchmarks.cases first.")
    print(run_cells("no_host", WHAT, list(kept["cells"]), work, kept["conditions"]["settings"]))


if __name__ == "__main__":
    main()
