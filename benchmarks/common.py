"""What every benchmark shares: conditions, results that are written whole or not at all, and cells that are run once."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from tqdm import tqdm

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


def rounded(value: Any, digits: int = 4) -> Any:
    """The same with floats of so many significant digits: results are for reading."""
    if isinstance(value, dict):
        return {key: rounded(inside, digits) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inside, digits) for inside in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def read(name: str) -> dict[str, Any] | None:
    """What ``write`` wrote, if it is there."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def run_cells(
    name: str, what: str, cells: Sequence[str], work: Callable[..., Any], settings: dict[str, Any], *, workers: int | None = None
) -> Path:
    """``work(cell, **settings)`` for each cell, in processes of one thread; written after each one.

    Cells that are in the file already, made with the same settings, are not run again: delete the file to begin anew.
    """
    kept = read(name) or {}
    same = kept.get("conditions", {}).get("settings") == json.loads(json.dumps(settings))
    done: dict[str, Any] = {cell: result for cell, result in kept.get("cells", {}).items() if same and cell in cells}
    missing = [cell for cell in cells if cell not in done]
    with ProcessPoolExecutor(workers or psutil.cpu_count(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running = {pool.submit(work, cell, **settings): cell for cell in missing}
        for future in tqdm(as_completed(running), total=len(running), desc=name, unit="cell"):
            done[running[future]] = rounded(future.result())
            ordered = {cell: done[cell] for cell in cells if cell in done}
            write(name, {"what": what, "cells": ordered, "conditions": conditions(settings=settings)})
    return RESULTS / f"{name}.json"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
