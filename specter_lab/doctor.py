"""What this computer can do for specter_lab, and what it cannot."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from html import escape
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

from specter_lab.quantize.compiled import rebuild_path

# Runs in a process of its own: asking for the name, or for page-locked memory, would start CUDA in the user's.
_CUDA_PROBE = "import torch; print(torch.cuda.get_device_name()); torch.empty(1, pin_memory=True); print('yes')"


@dataclass(frozen=True)
class DoctorReport:
    """What ``doctor`` found: ``rows`` of (subject, what was found, what follows from it); look one up by its subject.

    ``machines`` names those that can run here, out of "simulated", "throttled" and "cuda".

    >>> doctor().machines[:2]
    ('simulated', 'throttled')
    """

    rows: tuple[tuple[str, str, str], ...]
    machines: tuple[str, ...]

    def __getitem__(self, subject: str) -> str:
        for name, found, _ in self.rows:
            if name == subject:
                return found
        raise KeyError(f"A report is looked up by one of its subjects; {subject!r} is none. Use one of {[row[0] for row in self.rows]}.")

    def __repr__(self) -> str:
        width = max(len(name) for name, _, _ in self.rows)
        return "\n".join(f"{name:<{width}}  {found}{f'  ({follows})' if follows else ''}" for name, found, follows in self.rows)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th>"
            + "".join(f"<td style='text-align:left'>{escape(text)}</td>" for text in (found, follows))
            + "</tr>"
            for name, found, follows in self.rows
        )
        return f"<table><caption>What this computer can do</caption>{rows}</table>"


def doctor() -> DoctorReport:
    """Look at versions, processor, memory, GPU and notebook packages; changes nothing and starts no CUDA in this process.

    Memory is in GB (10^9 bytes). With a GPU it takes some seconds: a second process asks for its name and for
    page-locked memory.

    >>> doctor()["machines"].startswith("simulated, throttled")
    True
    """
    rows = [("python", platform.python_version(), "")]
    rows += [(name, _version(name) or "missing", "") for name in ("torch", "transformers", "optimum-quanto")]
    cores = psutil.cpu_count(logical=False)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count()
    rows.append(("processor", f"{cores or 'unknown'} cores, {usable} usable threads", f"torch computes with {torch.get_num_threads()}"))
    memory = psutil.virtual_memory()
    rows.append(("memory", f"{memory.total / 1e9:.1f} GB, {memory.available / 1e9:.1f} GB available", "the host keeps every expert in it"))
    gpu = torch.cuda.is_available()
    if gpu:
        name, locks = _probe_cuda()
        rows.append(("gpu", name, f"PyTorch built for CUDA {torch.version.cuda}"))
        rows.append(("page-locked memory", locks, "needed for copies that run beside compute"))
    else:
        rows.append(("gpu", "none", "not needed: the simulated and the throttled machine run on the processor"))
    tools = [name for name in ("c++", "g++", "clang", "cl", "nvcc", "ninja") if shutil.which(name)]
    rows.append(("compilers", ", ".join(tools) or "none", "not needed: with one, experts are rebuilt faster"))
    rows.append(("rebuild", rebuild_path(), "how residual experts are rebuilt in host memory"))
    widgets = {name: _version(name) for name in ("anywidget", "ipywidgets")}
    missing = [name for name, found in widgets.items() if found is None]
    found = ", ".join(f"{name} {found or 'missing'}" for name, found in widgets.items())
    rows.append(("notebook widgets", found, 'for interactive notebooks: pip install "specter-lab[notebooks]"' if missing else ""))
    machines = ("simulated", "throttled", *(["cuda"] if gpu else []))
    rows.append(("machines", ", ".join(machines), "where a pipeline can run here"))
    return DoctorReport(tuple(rows), machines)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _probe_cuda() -> tuple[str, str]:
    """The GPU's name, and whether the host can page-lock memory: "yes", or "no" with the reason."""
    try:
        probe = subprocess.run([sys.executable, "-c", _CUDA_PROBE], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return "present, but it did not answer", "no: asking for it took longer than 120 s"
    lines = probe.stdout.splitlines()
    last_words = (probe.stderr.strip().splitlines() or ["no reason given"])[-1]
    name = lines[0] if lines else f"present, but it failed to start: {last_words}"
    return name, "yes" if lines[1:] == ["yes"] else f"no: {last_words}"
