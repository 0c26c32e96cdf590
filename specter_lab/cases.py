"""Whole comparisons: the cases of Specter's artifact (and two more) replayed on modelled hardware, and the bundled model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from specter_lab.baselines import DRAFTLESS, SYSTEMS
from specter_lab.bundled import load_prompts
from specter_lab.comparison import Comparison, compare
from specter_lab.demo import machine_named, one_thread, own_tokens
from specter_lab.hardware import Case, case_named, costs_for, hardware
from specter_lab.machines.simulated import SimulatedMachine
from specter_lab.memory import BudgetError
from specter_lab.opening import load_moe
from specter_lab.planning import plan_memory, stand_in
from specter_lab.routing.recorder import RouterRecorder
from specter_lab.routing.synthetic import SyntheticRouting, SyntheticText

OWN_LENGTH = frozenset({"specmoeoff_b1", "moe_speq", "specter_plus"})


def case_texts(case: Case, count: int, tokens: int, *, seed: int = 0) -> list[SyntheticText]:
    """``count`` generated texts with the routing statistics of the case's model, the same for the same seed.

    >>> len(case_texts(case_named("ds_high"), 1, 20)[0])
    20
    """
    routing = SyntheticRouting(case.model.geometry, case.model.routing)
    return [routing.sample(tokens, seed=1000 * seed + number) for number in range(count)]


def rebuild_us(case: Case, residual_bits: float = 8.6) -> float:
    """What rebuilding one expert is charged: derived, not measured: code and residual read, 16 bits written, one launch
    (a third of an expert's three, see ``data/hardware.toml``). A compressed expert reads fewer bits and is charged the same.

    >>> 10 < rebuild_us(case_named("ds_high")) < 100
    True
    """
    runtime = hardware().runtimes["compiled"]
    moved = case.model.int4_expert_bytes + case.model.expert_bytes() * (residual_bits + 16) / 16
    return runtime.target_expert_us / 3 + moved / (case.gpu.memory_gb_s * 1e3)


def case_machine(case: Case, latency_us: float = 10.0) -> SimulatedMachine:
    """The case's link, compute costs by ``costs_for``, rebuilding by ``rebuild_us``, the A800 host of ``hardware().hosts``.

    >>> case_machine(case_named("ds_high")).link_gb_s
    22.0
    """
    host = next(iter(hardware().hosts.values()))
    costs = costs_for(case.model, case.gpu)
    costs = replace(costs, target=replace(costs.target, rebuild_us=rebuild_us(case)))
    return SimulatedMachine(case.link.gb_s, latency_us, costs, host_gb_s=host.weights_gb_s)


def run_case(
    case: str | Case,
    systems: Sequence[str] = tuple(SYSTEMS),
    *,
    prompts: int = 8,
    prompt_tokens: int = 16,
    max_new_tokens: int = 128,
    seed: int = 0,
    latency_us: float = 10.0,
    skip_unfit: bool = False,
    progress: bool = False,
) -> Comparison:
    """Compare systems on one case at the device memory of Specter's own setting there, on the simulated machine.

    The link is the case's, compute costs come from ``costs_for``, the host reads weights as fast as the A800 host of
    ``hardware().hosts``; rebuilding a residual is charged as ``rebuild_us`` derives it. Drafts have the case's length, but
    for systems that bring their own. ``activation_aware`` and ``specter_plus`` learn from texts of another seed. Where
    ``specmoeoff_b1`` doesn't fit with a draft that copies the target's weights, it shares them (``separate_draft`` of its row).
    ``skip_unfit``: as in ``compare``.

    >>> run_case("ds_low", ["on_demand", "specter"], prompts=1, max_new_tokens=4).rows[1]["case"]
    'ds_low'
    """
    case = case_named(case) if isinstance(case, str) else case
    target = stand_in(case)
    texts = case_texts(case, prompts, prompt_tokens + max_new_tokens + 1, seed=seed)
    machine = case_machine(case, latency_us)
    context = prompt_tokens + max_new_tokens
    options: dict[str, dict[str, Any]] = {
        name: {"draft_length": case.draft_length} for name in systems if name not in DRAFTLESS and name not in OWN_LENGTH
    }
    if "activation_aware" in systems:
        options["activation_aware"] = {"library": [text.log() for text in case_texts(case, 4, 128, seed=seed + 1)]}
    if "specter_plus" in systems:
        options["specter_plus"] = {"trial": case_texts(case, 2, context, seed=seed + 1)}
    memory = case.device_bytes + context * target.geometry.kv_bytes_per_token
    separate = _fits("specmoeoff_b1", target, memory, context)
    options["specmoeoff_b1"] = {"separate": separate}
    done = compare(
        systems, texts, target=target, machine=machine, memory=memory, context_length=context, skip_unfit=skip_unfit,
        progress=progress, prompt_tokens=prompt_tokens, max_new_tokens=max_new_tokens, system_options=options,
    )  # fmt: skip
    return _labelled(done, case.name, separate)


def _labelled(done: Comparison, case: str, separate: bool) -> Comparison:
    for row in done.rows:
        row["case"] = case
        if row["system"] == "specmoeoff_b1":
            row["separate_draft"] = separate
    return done


def _fits(system: str, target: Any, memory: int | str, context: int) -> bool:
    try:
        plan_memory(target, system, memory, context_length=context)
    except BudgetError:
        return False
    return True


def compare_tiny(
    systems: Sequence[str],
    *,
    machine: str,
    link_gb_s: float,
    memory: str,
    prompts: int,
    max_new_tokens: int,
    skip_unfit: bool = False,
    progress: bool = False,
) -> Comparison:
    """Compare systems on the bundled model in fp32, against its own tokens; prompts of all kinds in turn. ``specmoeoff_b1``
    and ``skip_unfit``: as in ``run_case``.

    >>> compare_tiny(["on_demand"], machine="simulated", link_gb_s=0.05, memory="13MB", prompts=1, max_new_tokens=2).rows[0]["case"]
    'tiny'
    """
    bundled = load_prompts()
    kinds = list(dict.fromkeys(prompt.kind for prompt in bundled))
    turns = [prompt.text for group in zip(*([p for p in bundled if p.kind == kind] for kind in kinds), strict=True) for prompt in group]
    if not 1 <= prompts <= len(turns) - 4:
        raise ValueError(f"Between 1 and {len(turns) - 4} bundled prompts can be compared (4 are kept for recording); got {prompts}.")
    moe = load_moe("tiny-moe", dtype="float32")
    references = own_tokens(moe, turns[:prompts], max_new_tokens)
    library = []
    for text in turns[-4:]:
        with torch.no_grad(), RouterRecorder(moe.model) as recorder:
            moe.model(moe.tokenizer(text, return_tensors="pt").input_ids)
        library.append(recorder.log)
    with one_thread(), moe:
        bank = moe.quantize("qint4")
        options: dict[str, dict[str, Any]] = {name: {"bank": bank} for name in systems if name not in DRAFTLESS}
        options["activation_aware"] = {"library": library}
        separate = _fits("specmoeoff_b1", moe, memory, 256)
        options["specmoeoff_b1"] = {"bank": bank, "separate": separate}
        if set(systems) & {"residual_lookahead", "specter_plus"}:
            residuals = moe.residuals(bank)
            for name in ("residual_lookahead", "specter_plus"):
                options[name] = {"bank": bank, "residual": residuals}
            options["specter_plus"]["trial"] = turns[-2:]
        done = compare(
            systems, turns[:prompts], target=moe, machine=machine_named(machine, link_gb_s), memory=memory, context_length=256,
            references=references, progress=progress, skip_unfit=skip_unfit, system_options=options,
            max_new_tokens=max_new_tokens, do_sample=False,
        )  # fmt: skip
    return _labelled(done, "tiny", separate)
