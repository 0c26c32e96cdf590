"""Notebooks are stories that run: short cells, nothing saved but the text, assertions at the end."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook, new_output

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_BYTES, MOST_LINES = 500_000, 24


def offences(notebook: NotebookNode, size: int) -> list[str]:
    """What keeps a notebook from being small, clean and checked."""
    bad = []
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        bad.append("the kernel isn't python3")
    if "widgets" in notebook.metadata:
        bad.append("widget state is saved")
    if size >= MOST_BYTES:
        bad.append(f"{size:,} bytes")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code):
        if cell.outputs or cell.execution_count is not None:
            bad.append(f"code cell {number} is saved with its output or count")
        if len(cell.source.splitlines()) > MOST_LINES:
            bad.append(f"code cell {number} has {len(cell.source.splitlines())} lines")
    if not code or not asserts(code[-1].source):
        bad.append("the last code cell asserts nothing")
    if not notebook.cells or not re.match(r"# \S", notebook.cells[0].source):
        bad.append("the first cell is no title")
    return bad


def asserts(source: str) -> bool:
    """Does the code assert something that could fail?"""
    return any(isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant) for node in ast.walk(ast.parse(source)))


def substituted(notebook: NotebookNode, line: str, other: str) -> NotebookNode:
    """The notebook with one line replaced; ``ValueError`` unless it is there exactly once."""
    found = [(cell, cell.source.splitlines()) for cell in notebook.cells if cell.cell_type == "code"]
    count = sum(lines.count(line) for _, lines in found)
    if count != 1:
        raise ValueError(f"A variant replaces exactly one line; {line!r} is there {count} times. Bring the test and the notebook together.")
    for cell, lines in found:
        cell.source = "\n".join(other if each == line else each for each in lines)
    return notebook


def test_there_are_notebooks_with_numbers_of_their_own() -> None:
    assert NOTEBOOKS
    numbers = [re.fullmatch(r"(\d\d)_[a-z0-9_]+\.ipynb", path.name) for path in NOTEBOOKS]
    assert all(numbers)
    assert len({match[1] for match in numbers if match}) == len(NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_clean_and_checked(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert offences(notebook, path.stat().st_size) == []


def test_the_quickstart_runs_in_simulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same story on another machine: every promise at its end must hold there too."""
    notebook = nbformat.read(FOLDER / "01_quickstart.ipynb", as_version=4)
    notebook = substituted(notebook, "machine = sl.ThrottledMachine(link_gb_s=0.1)", "machine = sl.SimulatedMachine()")
    notebook.cells.append(new_code_cell('assert run.trace.machine == comparison.machine == "simulated"'))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]))
    client = NotebookClient(notebook, kernel_name="python3", timeout=100, resources={"metadata": {"path": str(FOLDER)}})
    client.execute()
    shown = {kind for cell in notebook.cells for out in cell.get("outputs", []) for kind in out.get("data", {})}
    assert {"application/vnd.plotly.v1+json", "text/html"} <= shown


def test_an_untidy_notebook_is_seen() -> None:
    done = new_code_cell("1", outputs=[new_output("stream", text="1")], execution_count=1)
    notebook = new_notebook(cells=[done, new_code_cell("\n".join(["x = 1"] * 30)), new_code_cell("assert True")], metadata={"widgets": {}})
    assert len(offences(notebook, MOST_BYTES)) == 7


def test_a_variant_needs_its_line() -> None:
    notebook = new_notebook(cells=[new_code_cell("a = 1\nb = 2"), new_code_cell("c = 3")])
    assert substituted(notebook, "b = 2", "b = 4").cells[0].source == "a = 1\nb = 4"
    with pytest.raises(ValueError, match="0 times"):
        substituted(notebook, "b = 2", "b = 5")
