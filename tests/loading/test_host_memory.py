"""Free memory: the system's, or a container's."""

from __future__ import annotations

import psutil

from specter_lab.loading import host_memory


def test_the_system_says(monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    assert 0 < host_memory.available_bytes() <= psutil.virtual_memory().total
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.available_bytes() > 1000


def test_a_container_has_what_its_limit_leaves(monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("100000\n")
    (tmp_path / "memory.current").write_text("70000\n")
    (tmp_path / "memory.stat").write_text("anon 50000\ninactive_file 15000\n")
    assert host_memory.available_bytes() == 45000
