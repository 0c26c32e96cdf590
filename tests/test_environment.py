"""The files that build an environment say the same, and the documents name what exists."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import specter_lab

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
DOCUMENTS = [name for name in ("README.md", "CONTRIBUTING.md") if (ROOT / name).exists()]
NEEDS = {r.name: r for r in map(Requirement, PROJECT["dependencies"])}


def conda() -> tuple[dict[str, str], list[str]]:
    """environment.yml: conda's packages with their specifiers, and pip's lines."""
    parts = yaml.safe_load((ROOT / "environment.yml").read_text("utf-8"))["dependencies"]
    packages = [Requirement(part) for part in parts if isinstance(part, str)]
    pip = [line for part in parts if isinstance(part, dict) for line in part["pip"]]
    return {r.name: str(r.specifier) for r in packages}, pip


def missing_files(text: str, root: Path) -> list[str]:
    """Files and folders that a document names, as `code` or as a link, and that ``root`` doesn't have."""
    code = re.findall(r"`([\w.-]+(?:/[\w.-]+)*(?:/|\.(?:py|ipynb|md|toml|yml|json|sh)))`", text)
    links = [
        link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link and not link.startswith("mailto:")
    ]
    return sorted({name for name in [*code, *links] if name and not (root / name).exists()})


def imported(folder: Path) -> set[str]:
    """Top-level names of the packages that a folder's files import."""
    nodes = [node for path in folder.rglob("*.py") for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)


def test_every_package_that_is_imported_is_asked_for() -> None:
    extras = [Requirement(line).name for lines in PROJECT["optional-dependencies"].values() for line in lines]
    homes = packages_distributions()
    runtime = {name: homes.get(name, ["?"]) for name in imported(ROOT / "specter_lab") - {"specter_lab"}}
    assert {name: home for name, home in runtime.items() if not {*NEEDS, *extras} & set(home)} == {}


def test_conda_asks_for_the_same_python_and_torch() -> None:
    packages, _ = conda()
    assert packages["python"] == PROJECT["requires-python"]
    assert packages["pytorch-cpu"] == str(NEEDS["torch"].specifier)


def test_conda_installs_the_project_with_extras_that_exist() -> None:
    _, pip = conda()
    extras = re.fullmatch(r"-e \.\[(.+)\]", pip[0])
    assert len(pip) == 1
    assert extras and set(extras[1].split(",")) == set(PROJECT["optional-dependencies"])


def test_the_makefile_pins_a_torch_that_the_project_accepts() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    pins = re.findall(r"^TORCH\s*\??=\s*(\S+)$", makefile, re.MULTILINE)
    assert len(pins) == 1
    assert pins[0] in NEEDS["torch"].specifier
    assert f'"[{",".join(PROJECT["optional-dependencies"])}]"' in makefile.replace(".[", "[")


def test_tools_check_for_the_oldest_python() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]
    oldest = tools["mypy"]["python_version"]
    assert oldest in SpecifierSet(PROJECT["requires-python"]) and f">={oldest}" == PROJECT["requires-python"]
    assert tools["ruff"]["target-version"] == "py" + oldest.replace(".", "")


def test_the_version_stands_in_one_place() -> None:
    assert specter_lab.__version__ in (PROJECT["version"], "0+uninstalled")
    copies = [p for p in (ROOT / "specter_lab").rglob("*.py") if f'"{PROJECT["version"]}"' in p.read_text("utf-8")]
    assert copies == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_names_only_files_that_exist(name: str) -> None:
    assert missing_files((ROOT / name).read_text("utf-8"), ROOT) == []


def test_a_missing_file_is_seen(tmp_path: Path) -> None:
    (tmp_path / "there.md").touch()
    text = "`there.md` `gone.py` `gone/` [a](there.md#part) [b](lost.md) [c](https://example.org/x.md) `sl.load_moe` `a/b`"
    assert missing_files(text, tmp_path) == ["gone.py", "gone/", "lost.md"]
