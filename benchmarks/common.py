"""What every benchmark shares: conditions, and results that are written whole or not at all."""

from __future__ import annotations

import datetime
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

RESULTS = Path(__file__).parent / "results"


def conditions(**more: Any) -> dict[str, Any]:
    """The machine and the versions a figure depends on."""
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "threads": torch.get_num_threads(),
        **{name: version(name) for name in ("torch", "transformers", "optimum-quanto", "specter-lab")},
        **more,
    }


def write(name: str, result: dict[str, Any]) -> Path:
    """``results/name.json``: to a temporary file first, then renamed."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(temporary, path)
    return path


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
