"""Every system on the wall clock: three links, three sizes of device memory, the bundled model. Throttled, one compute thread.

``python -m benchmarks.wall_clock``, or with other numbers: ``--prompts 2 --new-tokens 16 --name wall_clock_smoke``. The memory of a
cell is what a qint4 self-draft takes with slots for 1/8, 1/4 or 1/2 of the experts.
"""

from __future__ import annotations

import argparse
from typing import Any

import specter_lab as sl
from specter_lab.cases import compare_tiny

LINKS, FRACTIONS, CONTEXT = (25, 50, 100), (8, 4, 2), 256
SYSTEMS = [name for name in sl.baselines.SYSTEMS if name != "oracle"]
WHAT = (
    "rows of sl.compare for each link in MB/s / slots as a fraction of the experts: wall clock of the throttled machine, systems "
    "interleaved, fp32, tokens compared with the model's own; intervals are 95 % over prompts; bytes_short: what those that don't fit lack"
)


def work(cell: str, *, prompts: int, new_tokens: int) -> dict[str, Any]:
    """One link and memory."""
    link, fraction = map(int, cell.split("/1/"))
    with sl.load_moe("tiny-moe", dtype="float32") as moe:
        memory = sl.plan_memory(moe, "lookahead", slots=24 // fraction, context_length=CONTEXT).device.total
    budget = f"{memory / 1e6 + 1e-3:.3f}MB"
    options = {"prompts": prompts, "max_new_tokens": new_tokens, "skip_unfit": True}
    done = compare_tiny(SYSTEMS, machine="throttled", link_gb_s=link / 1e3, memory=budget, **options)
    return {"memory_bytes": memory, **done.as_dict(), "conditions": {"link_mb_s": link, "memory_bytes": memory}}


def main() -> None:
    """Run what is missing and write ``results/wall_clock.json``; one cell at a time, since a run takes both cores."""
    from benchmarks.common import run_cells

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--name", default="wall_clock")
    options = parser.parse_args()
    cells = [f"{link}/1/{fraction}" for link in LINKS for fraction in FRACTIONS]
    print(run_cells(options.name, WHAT, cells, work, {"prompts": options.prompts, "new_tokens": options.new_tokens}, workers=1))


if __name__ == "__main__":
    main()
