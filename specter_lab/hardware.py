"""Links, GPUs, hosts, runtimes and cases to simulate on, read from a TOML file that names its sources."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from specter_lab.bundled import data_folder
from specter_lab.machines.simulated import CostTable, LaneCosts
from specter_lab.shapes import ModelShape

MAY_BE_ZERO = frozenset(
    {"dense_layers", "dense_size", "shared_size", "latent_size", "rotary_size"}
    | {f"{lane}_{part}_us" for lane in ("target", "draft") for part in ("layer", "expert")}
)
T = TypeVar("T")


@dataclass(frozen=True)
class Link:
    """Host to device: ``gb_s`` of expert-sized copies, as measured rather than as the bus promises.

    >>> hardware().links["pcie4_x16"].gb_s
    22.0
    """

    name: str
    gb_s: float
    source: str


@dataclass(frozen=True)
class GPU:
    """A device's memory, its bandwidth, and its bfloat16 rate without sparsity.

    >>> hardware().gpus["a100_40gb"].memory_gb_s
    1555.0
    """

    name: str
    memory_gb: float
    memory_gb_s: float
    bf16_tflops: float
    source: str


@dataclass(frozen=True)
class Host:
    """A CPU that computes with experts where they are: weights it reads a second while doing so.

    >>> hardware().hosts["xeon_16_threads"].weights_gb_s
    43.9
    """

    name: str
    weights_gb_s: float
    source: str


@dataclass(frozen=True)
class Runtime:
    """Launches and framework: microseconds a decoder layer and a routed expert take beside reading their weights.

    >>> hardware().runtimes["eager"].target_layer_us > hardware().runtimes["compiled"].target_layer_us
    True
    """

    name: str
    target_layer_us: float
    target_expert_us: float
    draft_layer_us: float
    draft_expert_us: float
    source: str


@dataclass(frozen=True)
class Case:
    """A setting that systems are compared in. ``slots``: what a system was given in each layer, by its name.

    >>> case_named("ds_high").slots["specter"]
    16
    """

    name: str
    model: ModelShape
    gpu: GPU
    link: Link
    budget_gb: float
    draft_length: int
    slots: Mapping[str, int]
    source: str

    @property
    def device_bytes(self) -> int:
        """What Specter's setting holds: weights, INT4 draft, slots, without KV and buffers. Equal memory means this for all."""
        model = self.model
        experts = model.experts * model.int4_expert_bytes + self.slots["specter"] * model.expert_bytes()
        return model.non_expert_bytes + model.moe_layers * experts


@dataclass(frozen=True)
class Hardware:
    """All that a file describes, by name.

    >>> sorted(hardware().links)
    ['pcie3_x16', 'pcie4_x16', 'pcie4_x8', 'pcie5_x16', 'pcie5_x8']
    """

    links: Mapping[str, Link]
    gpus: Mapping[str, GPU]
    hosts: Mapping[str, Host]
    runtimes: Mapping[str, Runtime]
    models: Mapping[str, ModelShape]
    cases: Mapping[str, Case]


@cache
def hardware() -> Hardware:
    """What comes with the package, read once.

    >>> hardware().models["deepseek_v2_lite"].layers
    26
    """
    return read_hardware(data_folder() / "hardware.toml")


def case_named(name: str) -> Case:
    """A case that comes with the package; ``ValueError`` names the nearest for any other name.

    >>> case_named("phi_low").model.name
    'phi_35_moe'
    """
    return _known(hardware().cases, name, "case", "specter_lab.hardware")


def read_hardware(path: str | Path) -> Hardware:
    """A file with the tables of ``data/hardware.toml``; its cases may use its own links, GPUs and models only.

    Raises ``ValueError`` naming table and key for what is missing, unknown, of a wrong kind or not above 0.

    >>> read_hardware(data_folder() / "hardware.toml") == hardware()
    True
    """
    with Path(path).open("rb") as file:
        try:
            content = tomllib.load(file)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"Hardware is described in TOML; {path} is not: {error}. Start from a copy of data/hardware.toml.") from error
    groups = ("links", "gpus", "hosts", "runtimes", "models", "cases")
    for group in content:
        _known(dict.fromkeys(groups), group, "group of tables", path)

    def described(group: str, kind: type[T]) -> dict[str, T]:
        return {name: _parse(kind, f"{group}.{name}", name, table, path) for name, table in content.get(group, {}).items()}

    links, gpus, models, cases = described("links", Link), described("gpus", GPU), described("models", ModelShape), {}
    for name, case in described("cases", _CaseTable).items():
        for system, slots in case.slots.items():
            _number(f"cases.{name}", f"slots.{system}", slots, int, path)
        if "specter" not in case.slots:
            raise _missing(f"cases.{name}", "slots.specter", path)
        cases[name] = Case(
            name, _known(models, case.model, "model", path), _known(gpus, case.gpu, "GPU", path), _known(links, case.link, "link", path),
            case.budget_gb, case.draft_length, case.slots, case.source,
        )  # fmt: skip
    return Hardware(links, gpus, described("hosts", Host), described("runtimes", Runtime), models, cases)


def costs_for(model: ModelShape, gpu: GPU, runtime: Runtime | None = None) -> CostTable:
    """Compute costs of a model and its INT4 draft on a GPU, for ``SimulatedMachine``; ``runtime``: "compiled" if not given.

    A part takes its bfloat16 weights' bytes / memory bandwidth and the runtime's fixed time, and for each row its operations
    at the data sheet's rate. Attention is projections, router and shared experts; reading the cache is left out (a few
    microseconds for short contexts). Dense layers count at the end of a pass, with the head. A draft reads its experts in INT4.

    >>> costs = costs_for(hardware().models["deepseek_v2_lite"], hardware().gpus["a100_40gb"])
    >>> 3.5 < costs.target.expert_us / costs.draft.expert_us
    True
    """
    runtime = runtime or hardware().runtimes["compiled"]

    def lane(layer_us: float, expert_us: float, expert_bytes: int) -> LaneCosts:
        def read_us(size: float) -> float:
            return size / (gpu.memory_gb_s * 1e3)

        def row_us(weights: int) -> float:
            return 2 * weights / (gpu.bf16_tflops * 1e6)

        return LaneCosts(
            attention_us=read_us(2 * model.skeleton_weights) + layer_us,
            attention_row_us=row_us(model.skeleton_weights),
            expert_us=read_us(expert_bytes) + expert_us,
            expert_row_us=row_us(model.expert_weights),
            head_us=read_us(2 * model.head_weights) + model.dense_layers * layer_us,
            head_row_us=row_us(model.head_weights),
        )

    return CostTable(
        target=lane(runtime.target_layer_us, runtime.target_expert_us, model.expert_bytes()),
        draft=lane(runtime.draft_layer_us, runtime.draft_expert_us, model.int4_expert_bytes),
    )


@dataclass(frozen=True)
class _CaseTable:
    """A case as it is written down."""

    name: str
    model: str
    gpu: str
    link: str
    budget_gb: float
    draft_length: int
    slots: dict[str, int]
    source: str


def _parse(kind: type[T], where: str, name: str, table: Any, path: str | Path) -> T:
    """One table as a ``kind``: exactly its fields, sources and names not empty, numbers above 0."""
    wanted = {field.name: str(field.type) for field in fields(kind) if field.name != "name"}  # type: ignore[arg-type]
    for key in table:
        _known(wanted, key, f"key of [{where}]", path)
    values: dict[str, Any] = {}
    for key, annotation in wanted.items():
        if key not in table or table[key] == "":
            raise _missing(where, key, path)
        if annotation in ("int", "float"):
            values[key] = _number(where, key, table[key], int if annotation == "int" else float, path)
        elif isinstance(table[key], dict if annotation.startswith("dict") else str):
            values[key] = table[key]
        else:
            raise ValueError(f"[{where}] {key} of {path} is a {annotation}; got {table[key]!r}. See data/hardware.toml for one like it.")
    return kind(**{"name": name, **values})


def _number(where: str, key: str, value: Any, kind: type, path: str | Path) -> Any:
    fits = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if not fits or not (0 < value < float("inf") or (value == 0 and key in MAY_BE_ZERO)):
        least = "0 or more" if key in MAY_BE_ZERO else "above 0"
        whole = "a whole number" if kind is int else "a number"
        raise ValueError(f"[{where}] {key} of {path} is {whole} {least}; got {value!r}. Correct it there.")
    return kind(value)


def _missing(where: str, key: str, path: str | Path) -> ValueError:
    return ValueError(
        f"Each table of {path} has all its keys, and a source for its numbers; [{where}] has no {key}. Add {key} = ... to it."
    )


def _known(choices: Mapping[str, T], name: str, what: str, where: str | Path) -> T:
    """``choices[name]``, or an error with the nearest names."""
    if name not in choices:
        near = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
        raise ValueError(
            f"A {what} is one of those in {where}; got {name!r}. "
            + (f"Did you mean {' or '.join(near)}?" if near else f"There are {', '.join(choices) or 'none'}.")
        )
    return choices[name]
