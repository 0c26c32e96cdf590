"""The demo: four pipelines on the bundled model, the same prompts, the same device memory, one table, one timeline."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from specter_lab.baselines import DRAFTLESS, named
from specter_lab.bundled import load_prompts
from specter_lab.comparison import Comparison, compare
from specter_lab.machines.simulated import SimulatedMachine
from specter_lab.machines.throttled import ThrottledMachine
from specter_lab.models import load_moe
from specter_lab.observe.export import save_chrome_trace
from specter_lab.pieces import Machine
from specter_lab.plots.html import save_html
from specter_lab.plots.timeline import plot_timeline

MACHINES = ("throttled", "simulated")
SHOWN = ("on_demand", "next_layer_gate", "speculative_on_demand", "lookahead")


@dataclass(frozen=True)
class DemoResult:
    """The comparison, and where its timeline and trace were written (those of the last system's first prompt)."""

    comparison: Comparison
    timeline: Path
    trace: Path


def machine_named(name: str, link_gb_s: float) -> Machine:
    """A machine of that kind with that link; ``ValueError`` lists the kinds.

    >>> machine_named("simulated", 16.0).label
    'simulated'
    """
    if name == "throttled":
        return ThrottledMachine(link_gb_s)
    if name == "simulated":
        return SimulatedMachine(link_gb_s)
    raise ValueError(f"A machine is one of {', '.join(MACHINES)}; got {name!r}. Give one of them.")


def run_demo(
    *,
    machine: str = "throttled",
    link_gb_s: float = 0.05,
    memory: str = "13MB",
    per_kind: int = 2,
    max_new_tokens: int = 32,
    draft_length: int = 8,
    out: str | Path = "demo-output",
    progress: bool = False,
) -> DemoResult:
    """Run the demo and write ``timeline.html`` and ``trace.json`` into ``out``.

    The reference tokens are the model's own greedy ``generate`` with eager experts in fp32.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    prompts = [prompt.text for prompt in load_prompts(per_kind=per_kind)]
    moe = load_moe("tiny-moe", dtype="float32")
    references = []
    for prompt in prompts:
        ids = moe.tokenizer(prompt, return_tensors="pt").input_ids
        references.append(moe.own_generate(ids, max_new_tokens=max_new_tokens, do_sample=False)[0, ids.shape[1] :].tolist())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a core for compute, a core for the link
    try:
        with ExitStack() as stack:
            stack.enter_context(moe)
            bank = moe.quantize("qint4")
            shared = {"machine": machine_named(machine, link_gb_s), "memory": memory, "context_length": 256}
            drafting = {"bank": bank, "draft_length": draft_length}
            pipelines = {name: stack.enter_context(named(name)(moe, **shared, **({} if name in DRAFTLESS else drafting))) for name in SHOWN}
            comparison = compare(
                pipelines, prompts, references=references, rivals=set(SHOWN) - {"lookahead"}, progress=progress,
                max_new_tokens=max_new_tokens, do_sample=False,
            )  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    shown = comparison.generations["lookahead"][0].trace
    return DemoResult(
        comparison, save_html(plot_timeline(shown), folder / "timeline.html"), save_chrome_trace(shown, folder / "trace.json")
    )
