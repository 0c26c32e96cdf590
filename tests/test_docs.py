"""What the documents show runs, and the names, files and figures they mention are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

import specter_lab as sl
from specter_lab import pieces
from specter_lab.baselines import SYSTEMS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
SLOW, FAST = "sl.ThrottledMachine(link_gb_s=0.1)", "sl.SimulatedMachine()"


def blocks(name: str, language: str) -> list[str]:
    """The fenced code of a document; blank lines in front keep its line numbers, so that a traceback points into it."""
    text = (ROOT / name).read_text("utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in found]


def run(name: str, sources: list[str]) -> dict[str, Any]:
    """Run the blocks in order in one namespace, as a reader would in a notebook."""
    names: dict[str, Any] = {}
    for source in sources:
        exec(compile(source, str(ROOT / name), "exec"), names)
    return names


def between(text: str, marker: str) -> str:
    """What stands between ``<!-- marker -->`` and ``<!-- /marker -->``."""
    parts = re.findall(rf"^<!-- {marker} -->$(.*?)^<!-- /{marker} -->$", text, re.MULTILINE | re.DOTALL)
    assert len(parts) == 1, f"{len(parts)} pairs of {marker} markers"
    return parts[0]


def unknown_names(table: str) -> list[str]:
    """Names in the second column of a Markdown table that specter_lab doesn't have."""
    cells = [row.split("|")[2] for row in table.splitlines() if row.startswith("|")]
    named = [name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)]
    return [name for name in named if not has(sl, name)]


def has(thing: object, path: str) -> bool:
    """Is there an attribute of an attribute of ``thing``?"""
    for part in path.split("."):
        if not hasattr(thing, part):
            return False
        thing = getattr(thing, part)
    return True


def tree_paths(tree: str) -> list[str]:
    """The paths of an indented listing, ``name/   comment`` a line, several names parted by commas."""
    paths: list[str] = []
    parents: list[str] = []
    for line in tree.splitlines():
        if not line.strip():
            continue
        depth = (len(line) - len(line.lstrip())) // 2
        parents = parents[:depth]
        paths += ["".join([*parents, name]) for name in re.split(r"\s{2,}", line.strip())[0].split(", ")]
        parents.append(paths[-1].removeprefix("".join(parents)))
    return paths


def test_the_example_of_the_readme_runs() -> None:
    (source,) = blocks("README.md", "python")
    assert source.count(SLOW) == 1, f"the README's pipeline no longer says {SLOW}: change the line that is replaced here too"
    names = run("README.md", [source.replace(SLOW, FAST)])
    run_, figure = names["run"], sl.plot_timeline(names["run"].trace, steps=(1, 3))
    assert run_.trace.machine == "simulated"
    transfers = run_.trace.of_kind("transfer")
    assert {"demand", "prefetch"} == set(transfers["reason"])
    assert isinstance(figure, go.Figure)


def test_the_example_of_the_readme_is_short() -> None:
    (source,) = blocks("README.md", "python")
    assert len([line for line in source.splitlines() if line.strip()]) <= 15


def test_the_pieces_of_the_contributors_guide_run() -> None:
    sources = blocks("CONTRIBUTING.md", "python")
    names = run("CONTRIBUTING.md", sources)
    shown = [value() for value in names.values() if isinstance(value, type)]
    for protocol in (pieces.Drafter, pieces.Predictor, pieces.EvictionPolicy, pieces.DraftLength):
        assert [type(piece).__name__ for piece in shown if isinstance(piece, protocol)], f"there is no example of a {protocol.__name__}"
    assert sum("assert " in source for source in sources) == len(shown)  # each shows that it did something


def test_the_micro_reference_names_what_there_is() -> None:
    table = between((ROOT / "README.md").read_text("utf-8"), "api")
    assert unknown_names(table) == []
    assert "`Pipeline`" in table


def test_each_public_name_is_explained() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    named = set(re.findall(r"`([\w.]+)`", text))
    assert [name for name in sl.__all__ if name not in named and f"sl.{name}" not in text] == [], "add it to the README's API on one screen"


def test_the_systems_are_all_listed() -> None:
    table = between((ROOT / "README.md").read_text("utf-8"), "systems")
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(SYSTEMS)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_each_class_that_is_named_is_there(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    named = set(re.findall(r"`([A-Z][A-Za-z0-9]*[a-z]\w*)`", text)) - {"Makefile"}
    sources = text + "".join(path.read_text("utf-8") for path in (ROOT / "specter_lab").rglob("*.py"))
    assert named - set(re.findall(r"^\s*class (\w+)", sources, re.MULTILINE)) == set()


def test_the_layout_lists_what_there_is() -> None:
    (tree,) = blocks("README.md", "text")
    paths = tree_paths(tree)
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md"])
def test_figures_say_which_machine_made_them(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    part = between(text, "results") if name == "README.md" else text.partition("### Negative results")[2]
    assert re.search(r"throttled|simulated|measured on", part, re.IGNORECASE)
    assert "python -m specter_lab" in part


def test_the_results_have_a_column_for_each_system() -> None:
    heading = next(line for line in between((ROOT / "README.md").read_text("utf-8"), "results").splitlines() if line.startswith("|"))
    columns = {cell.strip().replace(" ", "_") for cell in heading.split("|")[2:-1]}
    assert columns <= set(SYSTEMS) and "lookahead" in columns


def test_what_is_missing_is_seen() -> None:
    assert unknown_names("| piece | `nothing` |\n| a | `LRU`, `MoE.fly`, `MoE.quantize` |") == ["nothing", "MoE.fly"]
    assert tree_paths("a/     one\n  b/   two\n    c.py  three\n  d, e  four\nf") == ["a/", "a/b/", "a/b/c.py", "a/d", "a/e", "f"]
    with pytest.raises(ZeroDivisionError):
        run("README.md", ["x = 1", "x / 0"])
