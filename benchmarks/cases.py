"""The cases of the literature, every system, several generated texts each. Simulated: no weights, no GPU.

``python -m benchmarks.cases``, or with other numbers: ``--texts 2 --new-tokens 32 --name cases_smoke``.
"""

from __future__ import annotations

import argparse
from typing import Any

import specter_lab as sl

WHAT = (
    "rows of sl.run_case for each case: replays on the simulated machine over generated routing, at the device memory of Specter's own "
    "setting; intervals are 95 % over texts; bytes_short: what systems lack that don't fit"
)


def work(case: str, *, texts: int, new_tokens: int) -> dict[str, Any]:
    """One case."""
    done = sl.run_case(case, prompts=texts, max_new_tokens=new_tokens, skip_unfit=True)
    return {**done.as_dict(), "conditions": {name: done.conditions[name] for name in ("model", "link_gb_s", "latency_us", "prompt_tokens")}}


def main() -> None:
    """Run what is missing and write ``results/cases.json``."""
    from benchmarks.common import run_cells

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--name", default="cases")
    options = parser.parse_args()
    settings = {"texts": options.texts, "new_tokens": options.new_tokens}
    print(run_cells(options.name, WHAT, list(sl.hardware().cases), work, settings))


if __name__ == "__main__":
    main()
