"""Which versions the seam's own tests pass with: run here, in every environment that is named, and written down.

    python -m benchmarks.compat                          this environment
    python -m benchmarks.compat VENV/bin/python ...      others, where the project and its [dev] packages are installed

``results/compat.json`` keeps one row for each set of versions; ``notebooks/compat.md`` is the same as a page.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.common import RESULTS, write

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "notebooks" / "compat.md"
PARTS = {
    "seam": ["tests/test_models.py", "tests/routing/test_recorder.py"],
    "architectures": ["tests/architectures"],
    "generation": ["tests/test_generation.py", "tests/test_divergence.py"],
    "drafts, sampling": ["tests/speculate"],
    "loading": ["tests/loading"],
}
VERSIONS = """
import datetime, json, platform
from importlib.metadata import version
names = ("torch", "transformers", "optimum-quanto", "accelerate", "safetensors", "tokenizers", "numpy")
print(json.dumps({"date": datetime.date.today().isoformat(), "python": platform.python_version(), **{n: version(n) for n in names}}))
"""
COLUMNS = ("transformers", "torch", "python", "optimum-quanto", "accelerate", "safetensors", "tokenizers", "numpy", "date")


def main(pythons: list[str]) -> None:
    """Run every part in every environment, and write the results beside those of other versions."""
    rows = load()
    for python in pythons or [sys.executable]:
        said = subprocess.run([python, "-c", VERSIONS], cwd=ROOT, capture_output=True, text=True, check=True)
        row = {**json.loads(said.stdout), "parts": {part: run(python, paths) for part, paths in PARTS.items()}}
        rows = [other for other in rows if any(other[name] != row[name] for name in COLUMNS[:-1])] + [row]
        print(json.dumps(row))
    rows.sort(key=lambda row: [int(part) for part in row["transformers"].split(".")[:3]], reverse=True)
    print(write("compat", {"what": "tests passed, failed and skipped (those that need a GPU) for each set of versions", "rows": rows}))
    PAGE.write_text(as_markdown(rows), "utf-8")


def load() -> list[dict[str, Any]]:
    """The rows so far."""
    path = RESULTS / "compat.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


def run(python: str, paths: list[str]) -> dict[str, int]:
    """pytest's counts."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *paths]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, check=False)
        suite = ElementTree.parse(report).getroot()[0]
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    return {"passed": counts["tests"] - failed - counts["skipped"], "failed": failed, "skipped": counts["skipped"]}


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """The page."""
    lines = [
        "# Versions that were run",
        "",
        "Written by `python -m benchmarks.compat PYTHON ...`, which runs the seam's own tests with each interpreter. A cell is tests",
        "passed, and failed if any did; skipped ones need a GPU, or are of another version's table. No version that failed is allowed",
        "by `pyproject.toml`.",
        "",
        f"| {' | '.join((*COLUMNS, *PARTS))} |",
        f"| {' | '.join('---' for _ in (*COLUMNS, *PARTS))} |",
    ]
    for row in rows:
        cells = [f"{part['passed']}" + (f", **{part['failed']} failed**" if part["failed"] else "") for part in row["parts"].values()]
        lines.append(f"| {' | '.join([*(row[name] for name in COLUMNS), *cells])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
