"""Results are written whole, made once, and shown as they are."""

import os
import time

import pytest

from benchmarks import common, tables

README = tables.README.read_text("utf-8")


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    return tmp_path


def slow_square(cell, *, power):
    with open(os.environ["RAN"], "a") as log:
        log.write(cell)
    if cell == "3":
        time.sleep(1)  # the others are written before this one fails
        raise RuntimeError("interrupted")
    return {"value": float(cell) ** power}


def test_the_tables_of_the_readme_are_those_of_the_results():
    assert tables.filled(README) == README, "run python -m benchmarks.tables"
    assert {name for name in tables.TABLES if f"<!-- table: {name} -->" in README} == set(tables.TABLES)


def test_cells_are_run_once_and_kept_when_one_fails(results, tmp_path, monkeypatch):
    monkeypatch.setenv("RAN", str(tmp_path / "ran.txt"))
    with pytest.raises(RuntimeError, match="interrupted"):
        common.run_cells("powers", "of numbers", ["1", "2", "3"], slow_square, {"power": 2})
    assert common.read("powers")["cells"] == {"1": {"value": 1.0}, "2": {"value": 4.0}}
    common.run_cells("powers", "of numbers", ["1", "2"], slow_square, {"power": 2})
    assert sorted((tmp_path / "ran.txt").read_text()) == ["1", "2", "3"]  # nothing ran again
    common.run_cells("powers", "of numbers", ["1", "2"], slow_square, {"power": 3})
    assert common.read("powers")["cells"]["2"] == {"value": 8.0}  # other settings: everything did


def test_a_result_is_written_whole_or_not_at_all(results):
    common.write("one", {"a": 1})
    with pytest.raises(TypeError):
        common.write("one", {"a": object()})
    assert common.read("one") == {"a": 1} and common.read("two") is None
    assert common.rounded({"a": [1.23456789, 7, "x", None], "b": {"c": 0.000123456}}) == {"a": [1.235, 7, "x", None], "b": {"c": 0.0001235}}


def row(system, mean, **more):
    speedups = {"specmoeoff_b1": {"mean": 1.5, "ci95": [1.4, 1.6]}}
    return {
        "system": system, "tpot_ms": {"mean": mean}, "tpot_ms_ci95": [mean - 1, mean + 1], "speedups": speedups, "fastest_rival": "fiddler",
        "speedup_vs_fastest_rival": 1.2, "ci95": [1.1, 1.3], "share_of_schedule_bound": 0.5, "share_of_bound": 0.25, **more,
    }  # fmt: skip


def test_tables_by_hand(results):
    rows = [row("specter", 9.0), row("specmoeoff_b1", 10.0, separate_draft=False), row("specter_plus", 5.0), row("oracle", 4.0)]
    settings = {"texts": 3, "new_tokens": 8}
    common.write("cases", {"cells": {"ds_high": {"rows": rows}}, "conditions": {"settings": settings}})
    text = tables.filled("a\n<!-- table: cases -->\nobsolete\n<!-- /table: cases -->\n<!-- table: ratios -->\n<!-- /table: ratios -->\nb")
    assert "| `specmoeoff_b1` | 10.0 [9.0, 11.0] † |" in text and "| `specter_plus` | **5.0 [4.0, 6.0]** |" in text
    assert "The mean of specter over specmoeoff_b1 in the artifact's six cases: 1.50 (the paper says 1.50), best 1.50 (1.88)" in text
    assert "| ds_high | 1.50 [1.40, 1.60] | `fiddler` | 1.20 [1.10, 1.30] | 0.50 | 0.25 |" in text
    assert text.startswith("a\n") and text.endswith("\nb") and "obsolete" not in text and tables.filled(text) == text
    assert tables.MISSING in tables.filled("<!-- table: figures -->\n<!-- /table: figures -->")
    with pytest.raises(ValueError, match="the document has 'nothing'"):
        tables.filled("<!-- table: nothing -->\n<!-- /table: nothing -->")
