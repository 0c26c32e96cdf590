"""One request's result, and the card that stands beside its figures."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specter_lab.observe.metrics import summarize
from specter_lab.observe.trace import Trace
from specter_lab.records import Conditions, DeviceBytes

if TYPE_CHECKING:
    from specter_lab.models import MoE
    from specter_lab.pipeline import Pipeline


@dataclass(frozen=True)
class Generation:
    """The result of one request.

    ``ids`` are prompt and output, ``new_ids`` the output alone, ``text`` the output decoded (None without a tokenizer).
    ``scores`` (asked for with ``output_scores=True``) are (1, vocabulary) for each new token, after the processors;
    ``logits`` (``output_logits=True``) before them: what ``model.generate`` returns under these names.

    >>> import specter_lab as sl
    >>> with sl.Pipeline("tiny-moe", machine=sl.SimulatedMachine()) as p: p.generate("Once", max_new_tokens=2).metrics["tokens"]
    2
    """

    text: str | None
    ids: tuple[int, ...]
    new_ids: tuple[int, ...]
    trace: Trace
    device: DeviceBytes
    conditions: Conditions
    scores: tuple[Tensor, ...] | None = field(default=None, repr=False, compare=False)
    logits: tuple[Tensor, ...] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls, target: MoE, ids: list[int], prompt_tokens: int, trace: Trace, device: DeviceBytes, conditions: Conditions, **outputs: Any
    ) -> Generation:
        """Split and decode ``ids``; ``outputs`` are scores and logits."""
        new = ids[prompt_tokens:]
        text = None
        if target.tokenizer is not None:
            # a model may have more rows than its tokenizer has words: those ids are left out of the text, never of new_ids
            text = target.tokenizer.decode([i for i in new if i < len(target.tokenizer)], skip_special_tokens=True)
        return cls(text, tuple(ids), tuple(new), trace, device, conditions, **outputs)

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """Every figure of the run; see ``summarize``."""
        return summarize(self.trace)

    def __repr__(self) -> str:
        return f"Generation({len(self.new_ids)} tokens, {self.trace.machine}: {self.text!r})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th><td>{'' if value is None else f'{value:.3g}'}</td></tr>"
            for name, value in self.metrics.items()
        )
        return (
            f"<p style='white-space:pre-wrap'>{escape(self.text or str(list(self.new_ids)))}</p>"
            f"<table><caption>Figures ({escape(self.trace.machine)})</caption>{rows}</table>"
        )


def conditions_of(pipeline: Pipeline, *, prompt_tokens: int, new_tokens: int, sampling: bool, seed: int | None) -> Conditions:
    """The card that stands beside a run's figures."""
    target, plan, machine = pipeline.target, pipeline.plan, pipeline.machine
    return Conditions(
        {
            "model": target.name,
            "model_type": target.geometry.model_type,
            "computed_in": str(target.dtype).removeprefix("torch."),
            "experts_stored_in": target.store.name,
            "machine": machine.label,
            "link_gb_s": getattr(machine, "link_gb_s", None),
            "latency_us": getattr(machine, "latency_us", None),
            "drafter": getattr(pipeline.drafter, "name", None),
            "draft_length": repr(pipeline.draft_length),
            "draft_ahead": pipeline.assembly.draft_ahead,
            "predictor": pipeline.predictor.name,
            "eviction": pipeline.residency.eviction.name,
            "slots": list(plan.slots),
            "device_bytes": plan.device.total,
            "context_length": plan.context_length,
            "start": "warm" if pipeline.warm else "cold",
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "sampling": sampling,
            "seed": seed,
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "optimum-quanto")},
        }
    )
