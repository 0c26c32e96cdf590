"""The doctor reports facts and leaves the process as it found it."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

import psutil
import pytest
import torch

from specter_lab.doctor import DoctorReport, doctor


def test_it_reports_this_computer() -> None:
    started = torch.cuda.is_initialized()
    report = doctor()
    assert report["python"] == platform.python_version()
    assert report["torch"] == version("torch") and report["optimum-quanto"] == "0.2.7"
    assert report["memory"].startswith(f"{psutil.virtual_memory().total / 1e9:.1f} GB")
    assert report.machines == ("simulated", "throttled", *(["cuda"] if torch.cuda.is_available() else []))
    assert ", ".join(report.machines) in repr(report)
    assert torch.cuda.is_initialized() == started


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        if name == "anywidget":
            raise PackageNotFoundError(name)
        return "9.9"

    monkeypatch.setattr(sys.modules[doctor.__module__], "version", absent)
    report = doctor()
    assert report["notebook widgets"] == "anywidget missing, ipywidgets 9.9"
    assert 'pip install "specter-lab[notebooks]"' in repr(report)


@pytest.mark.parametrize(
    ("stdout", "stderr", "name", "locks"),
    [
        ("Card 9000\nyes\n", "", "Card 9000", "yes"),
        (
            "Card 9000\n",
            "Traceback\nRuntimeError: no memory left\n",
            "Card 9000",
            "no: RuntimeError: no memory left",
        ),
        ("", "Traceback\nRuntimeError: driver too old\n", "present, but it failed to start: RuntimeError: driver too old", "no"),
    ],
)
def test_a_gpu_is_asked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, stdout: str, stderr: str, name: str, locks: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=stdout, stderr=stderr))
    report = doctor()
    assert report["gpu"] == name
    assert report["page-locked memory"].startswith(locks)
    assert report.machines == ("simulated", "throttled", "cuda")


def test_a_gpu_that_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("python", 120)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(subprocess, "run", hang)
    assert doctor()["gpu"] == "present, but it did not answer"


def test_html_is_escaped_and_an_unknown_subject_is_refused() -> None:
    report = DoctorReport(rows=(("gpu", "<b>&", "x"),), machines=())
    assert "&lt;b&gt;&amp;" in report._repr_html_() and "<b>" not in report._repr_html_()
    with pytest.raises(KeyError, match=r"'ram' is none. Use one of \['gpu'\]"):
        report["ram"]
