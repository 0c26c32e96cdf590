"""The house rules that an import or a call can break, read from the source without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "specter_lab"
SOURCES = {".".join(("specter_lab", *p.relative_to(PACKAGE).with_suffix("").parts)): p for p in sorted(PACKAGE.rglob("*.py"))}
STAGES = ("quantize", "speculate", "routing", "offload", "machines")
SHELLS = ("specter_lab.__main__", "specter_lab.cli")  # what talks to a terminal
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def imports(module: str, source: str) -> Iterator[str]:
    """Absolute names of everything ``source`` imports, ``from a import b`` as ``a.b``, also inside functions."""
    package = module.removesuffix(".__init__") if module.endswith(".__init__") else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            yield from (".".join([*base, *([node.module] if node.module else []), alias.name]) for alias in node.names)


def inside(name: str, *packages: str) -> bool:
    """Is ``name`` one of these packages or something in them?"""
    return any(name == package or name.startswith(package + ".") for package in packages)


def import_offences(module: str, source: str) -> list[str]:
    """Imports that the layering forbids to ``module``."""
    ours = [name for name in imports(module, source) if inside(name, "specter_lab")]
    stages = tuple(f"specter_lab.{stage}" for stage in STAGES)
    own = tuple(stage for stage in stages if inside(module, stage))
    bad = [name for name in imports(module, source) if inside(name, "tests")]
    if own:  # the root package and the pipeline hold every stage: through them is the same as directly
        others = [stage for stage in stages if stage not in own]
        bad += [name for name in ours if inside(name, *others, "specter_lab.pipeline") or name == "specter_lab"]
    elif module in ("specter_lab.records", "specter_lab.pieces"):
        bad += [name for name in ours if inside(name, *stages) or name == "specter_lab"]
    elif inside(module, "specter_lab.plots"):
        allowed = ["specter_lab.plots", "specter_lab.observe", "specter_lab.records"]
        if module == "specter_lab.plots.explorer":  # it lets a reader turn knobs, so it must run something
            allowed.append("specter_lab.pipeline")
        bad += [name for name in ours if not inside(name, *allowed)]
    return bad


def call_offences(module: str, source: str) -> list[str]:
    """Printing outside the shell, and loading that can run foreign code."""
    bad = [name for name in imports(module, source) if name.split(".")[0] in UNSAFE_MODULES or name == "torch.load"]
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called == "print" and module not in SHELLS:
            bad.append("print")
        if called == "torch.load" or called.endswith("read_pickle"):
            bad.append(called)
        for keyword in node.keywords:
            trusting = keyword.arg in ("trust_remote_code", "allow_pickle")
            if trusting and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False):
                bad.append(f"{called}({keyword.arg}={ast.unparse(keyword.value)})")
    return bad


@pytest.mark.parametrize("module", SOURCES)
def test_a_file_keeps_to_its_layer(module: str) -> None:
    assert import_offences(module, SOURCES[module].read_text("utf-8")) == []


@pytest.mark.parametrize("module", SOURCES)
def test_a_file_neither_prints_nor_runs_foreign_code(module: str) -> None:
    assert call_offences(module, SOURCES[module].read_text("utf-8")) == []


def test_all_stages_are_there() -> None:
    assert {f"specter_lab.{stage}.__init__" for stage in STAGES} <= set(SOURCES)


@pytest.mark.parametrize(
    ("module", "source", "offence"),
    [
        ("specter_lab.routing.recorder", "from specter_lab.offload.store import Store", "specter_lab.offload.store.Store"),
        ("specter_lab.routing.recorder", "def f():\n    from ..machines import simulated", "specter_lab.machines.simulated"),
        ("specter_lab.routing.__init__", "from ..quantize import bank", "specter_lab.quantize.bank"),
        ("specter_lab.offload.store", "from specter_lab import quantize", "specter_lab.quantize"),
        ("specter_lab.offload.store", "import specter_lab as sl", "specter_lab"),
        ("specter_lab.machines.cuda", "from specter_lab.pipeline import Pipeline", "specter_lab.pipeline.Pipeline"),
        ("specter_lab.records", "from .routing import log", "specter_lab.routing.log"),
        ("specter_lab.plots.timeline", "from specter_lab.models import load_moe", "specter_lab.models.load_moe"),
        ("specter_lab.plots.timeline", "from specter_lab.pipeline import replay", "specter_lab.pipeline.replay"),
        ("specter_lab.pipeline", "from tests.conftest import ROOT", "tests.conftest.ROOT"),
    ],
)
def test_a_forbidden_import_is_seen(module: str, source: str, offence: str) -> None:
    assert import_offences(module, source) == [offence]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("specter_lab.routing.recorder", "from specter_lab.routing.log import RoutingLog\nfrom specter_lab.seam import experts_modules"),
        ("specter_lab.routing.recorder", "from .log import RoutingLog\nimport offload"),
        ("specter_lab.plots.explorer", "from specter_lab.pipeline import replay"),
        ("specter_lab.plots.timeline", "from specter_lab.observe.trace import Trace"),
        ("specter_lab.pipeline", "from specter_lab.offload import store\nfrom specter_lab.machines import simulated"),
    ],
)
def test_an_allowed_import_passes(module: str, source: str) -> None:
    assert import_offences(module, source) == []


@pytest.mark.parametrize(
    ("source", "offence"),
    [
        ("print('x')", "print"),
        ("import pickle", "pickle"),
        ("from torch import load", "torch.load"),
        ("torch.load(p, weights_only=True)", "torch.load"),
        ("pd.read_pickle(p)", "pd.read_pickle"),
        ("A.from_pretrained(p, trust_remote_code=True)", "A.from_pretrained(trust_remote_code=True)"),
        ("A.from_pretrained(p, trust_remote_code=flag)", "A.from_pretrained(trust_remote_code=flag)"),
    ],
)
def test_a_forbidden_call_is_seen(source: str, offence: str) -> None:
    assert call_offences("specter_lab.models", source) == [offence]


def test_the_shell_may_print() -> None:
    assert call_offences("specter_lab.__main__", "print('x')\nA.from_pretrained(p, trust_remote_code=False)") == []
