"""The page of versions says what was run, and pyproject.toml allows nothing else at its lower end."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.compat import PAGE, PARTS, as_markdown, load

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
NEEDS = {need.name: need for need in map(Requirement, PROJECT["dependencies"])}
GOOD = [row for row in load() if not any(part["failed"] for part in row["parts"].values())]


def test_the_page_is_what_the_results_say() -> None:
    assert PAGE.read_text("utf-8") == as_markdown(load())
    assert all(set(row["parts"]) == set(PARTS) and min(part["passed"] for part in row["parts"].values()) > 10 for row in GOOD)


@pytest.mark.parametrize("package", ["torch", "transformers", "optimum-quanto"])
def test_the_oldest_version_that_is_allowed_was_run_and_no_failing_one_is_allowed(package: str) -> None:
    floor = next(spec.version for spec in NEEDS[package].specifier if spec.operator in (">=", "=="))
    assert any(row[package].partition("+")[0].startswith(floor) for row in GOOD), f"run benchmarks.compat with {package} {floor}"
    failing = [row[package] for row in load() if row not in GOOD and package == "transformers"]
    assert not any(NEEDS[package].specifier.contains(number) for number in failing)
