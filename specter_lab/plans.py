"""Plans: what the device's memory is given to. Codes for all experts and a draft, or none; rebuilt at each use or on arrival."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from specter_lab.memory import BudgetError
from specter_lab.models import MoE
from specter_lab.offload.expected_use import ExpectedUse
from specter_lab.offload.misses import SplitByFinish
from specter_lab.pieces import ExpertStore
from specter_lab.pipeline import Pipeline
from specter_lab.replay import ReplayTarget
from specter_lab.routing.predictors import DraftLookahead, NextLayerGate
from specter_lab.speculate.byte_length import ByteLength
from specter_lab.speculate.drafters import SelfDrafter

PLANS = ("residual", "residual on arrival", "compressed", "compressed on arrival", "dense")


def planned(
    target: MoE | ReplayTarget, plan: str, *, bank: ExpertStore | None = None, residual: ExpertStore | None = None, **options: Any
) -> Pipeline:
    """The pipeline of one of ``PLANS``: experts by expected use, misses shared with the host.

    "residual": all codes are resident and draft, also ahead; the link brings residuals, by the draft's lookahead. "compressed": no
    codes and no draft; the link brings losslessly compressed experts, by the next layer's gate. Slots hold what the link
    brings, or, "on arrival", rebuilt experts: fewer of them, with nothing to rebuild at use. "dense": experts as they are, on
    demand, for links so fast that nothing else pays. ``bank`` and ``residual``: those of the residual plans, if at hand.

    >>> import specter_lab as sl
    >>> with planned(sl.load_moe("tiny-moe"), "compressed", machine=sl.SimulatedMachine()) as pipeline: pipeline.drafter is None
    True
    """
    if plan not in PLANS:
        raise ValueError(f"A plan is one of {', '.join(PLANS)}; got {plan!r}. Give one of them.")
    pieces: dict[str, Any] = {"eviction": ExpectedUse(), "split": SplitByFinish(), "on_arrival": plan.endswith("on arrival")}
    if plan.startswith("residual"):
        drafter = SelfDrafter(bank or target.quantize("qint4"))
        pieces |= {"drafter": drafter, "draft_length": ByteLength(), "predictor": DraftLookahead(), "residual": residual or True}
        pieces["draft_ahead"] = True
    else:
        if plan != "dense":
            pieces |= {"predictor": NextLayerGate(target), "residual": "compressed"}
        options = {name: value for name, value in options.items() if name not in ("draft_length", "draft_ahead")}
    return Pipeline(target, **{**pieces, **options})


def try_plans(
    target: MoE | ReplayTarget,
    texts: Sequence[Any],
    *,
    max_new_tokens: int | None = None,
    prompt_tokens: int = 16,
    plans: Sequence[str] = PLANS,
    **options: Any,
) -> pd.DataFrame:
    """Run every plan on ``texts`` and compare: plan (index), tpot_ms (mean over texts), slots a layer, or why it can't be.

    ``texts``: prompts for a model, texts to replay (from their own ``prompt_tokens`` on, or these) for a ``ReplayTarget``; not
    those that are measured later. ``max_new_tokens``: 32 of each prompt, or up to 128 of what a text to replay has, if not given: a
    cold start favours what needs no draft. ``options``: machine, memory and the rest, as for ``planned``. The fastest comes first.

    >>> import specter_lab as sl
    >>> moe = sl.load_moe("tiny-moe")
    >>> table = try_plans(moe, ["Once upon"], max_new_tokens=4, plans=["compressed"], machine=sl.SimulatedMachine(), memory="13MB")
    >>> list(table.index)
    ['compressed']
    """
    if not texts:
        raise ValueError("Plans are tried on at least one text; got none. Give prompts that are not measured later.")
    rows = []
    for plan in plans:
        try:
            with planned(target, plan, **options) as pipeline:
                if isinstance(target, ReplayTarget):
                    begins = [getattr(text, "prompt_tokens", prompt_tokens) for text in texts]
                    runs = [
                        pipeline.replay(text, prompt_tokens=n, max_new_tokens=max_new_tokens or min(128, len(text.experts) - n))
                        for text, n in zip(texts, begins, strict=True)
                    ]
                else:
                    runs = [pipeline.generate(text, max_new_tokens=max_new_tokens or 32, do_sample=False) for text in texts]
                times = [run.metrics["tpot_ms"] for run in runs]
                rows.append({"plan": plan, "tpot_ms": sum(times) / len(times), "slots": min(pipeline.plan.slots), "reason": ""})
        except BudgetError as error:
            rows.append({"plan": plan, "tpot_ms": float("nan"), "slots": 0, "reason": f"{error.short:,} bytes short"})
    return pd.DataFrame(rows).set_index("plan").sort_values("tpot_ms", kind="stable")
