"""How much host memory there is."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Host memory that can be had without swapping: the system's, or what a container's limit leaves of it.

    >>> available_bytes() > 0
    True
    """
    available = int(psutil.virtual_memory().available)
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container, no limit ("max"), or another system
        return available
    return min(available, limit - used + int(statistics.get("inactive_file", 0)))
