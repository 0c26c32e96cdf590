"""The demo: four pipelines on the bundled model, the same prompts, the same device memory, one table, one timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from specter_lab.baselines import DRAFTLESS
from specter_lab.bundled import load_prompts
from specter_lab.comparison import Comparison, compare
from specter_lab.machines.simulated import SimulatedMachine
from specter_lab.machines.throttled import ThrottledMachine
from specter_lab.models import MoE
from specter_lab.observe.export import save_chrome_trace
from specter_lab.opening import load_moe
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


def own_tokens(moe: MoE, prompts: Sequence[str], max_new_tokens: int) -> list[list[int]]:
    """The model's own greedy new tokens with eager experts for each prompt: what every system must give in fp32.

    >>> from specter_lab.models import MoE; from specter_lab.opening import load_moe
    >>> len(own_tokens(load_moe("tiny-moe", dtype="float32"), ["Once"], 3)[0])
    3
    """
    references = []
    for prompt in prompts:
        ids = moe.tokenizer(prompt, return_tensors="pt").input_ids
        references.append(moe.own_generate(ids, max_new_tokens=max_new_tokens, do_sample=False)[0, ids.shape[1] :].tolist())
    return references


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread inside: a core for compute, a core for the link.

    >>> with one_thread(): torch.get_num_threads()
    1
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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
    references = own_tokens(moe, prompts, max_new_tokens)
    with one_thread(), moe:
        drafting = {"bank": moe.quantize("qint4"), "draft_length": draft_length}
        comparison = compare(
            SHOWN, prompts, target=moe, machine=machine_named(machine, link_gb_s), memory=memory, context_length=256, references=references,
            progress=progress, max_new_tokens=max_new_tokens, do_sample=False,
            system_options={name: drafting for name in SHOWN if name not in DRAFTLESS},
        )  # fmt: skip
    shown = comparison.generations["lookahead"][0].trace
    return DemoResult(
        comparison, save_html(plot_timeline(shown), folder / "timeline.html"), save_chrome_trace(shown, folder / "trace.json")
    )
