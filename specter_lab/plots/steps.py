"""Steps as stretches of time, and the selection of some of them."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Any

import pandas as pd

from specter_lab.observe.trace import COMPUTE_KINDS, Trace


@dataclass(frozen=True)
class StepSpan:
    """When compute worked for one step, and what that step committed; ``first_token`` counts generated tokens from 0.

    >>> StepSpan(step=3, start_ms=1.0, end_ms=2.0, tokens=3, first_token=5, accepted=2, drafted=4).label(long=True)
    'step 3: 2/4 accepted'
    """

    step: int
    start_ms: float
    end_ms: float
    tokens: int
    first_token: int
    accepted: int
    drafted: int

    def label(self, *, long: bool) -> str:
        """``step 3: 2/4 accepted`` where there is room, else ``3: 2/4`` (accepted / drafted)."""
        if self.step == 0:
            return "prefill" if long else "0"
        if not self.drafted:
            return f"step {self.step}" if long else f"{self.step}"
        share = f"{self.step}: {self.accepted}/{self.drafted}"
        return f"step {share} accepted" if long else share


def choose_steps(trace: Trace, steps: Any, tokens: Any) -> list[StepSpan]:
    """The steps ``first..last``, or those that committed tokens ``first..last``, or all; ``ValueError`` says what there is.

    >>> choose_steps(Trace.of([("target", "head", 0.0, 5.0, 7, -1, -1, -1, 1, 0, -1, "", "", 0.0)], "simulated"), (7, 7), None)[0].end_ms
    0.005
    """
    every = _steps(trace.events)
    numbers, committed = [step.step for step in every], sum(step.tokens for step in every)
    held = f"this trace has {len(every)} steps" + (f" ({numbers[0]} to {numbers[-1]})" if every else "")
    held += f" and {committed} generated tokens" + (f" (0 to {committed - 1})" if committed else "")
    if steps is not None and tokens is not None:
        raise ValueError(f"Select by steps or by tokens, not both; you gave steps={steps!r} and tokens={tokens!r}; {held}; leave one out.")
    if steps is None and tokens is None:
        return every
    name, pair = ("steps", steps) if tokens is None else ("tokens", tokens)
    try:
        low, high = (index(end) for end in pair)
    except (TypeError, ValueError):
        low, high = 1, 0  # not a pair of whole numbers: the same message helps
    if name == "steps":
        known = low in numbers and high in numbers
        chosen = [step for step in every if low <= step.step <= high]
    else:
        known = 0 <= low <= high < committed
        chosen = [step for step in every if step.tokens and step.first_token <= high and step.first_token + step.tokens > low]
    if not known or not chosen:
        raise ValueError(
            f"{name}=(first, last) takes two numbers, first <= last, that the trace holds; you gave {name}={pair!r} and {held}; "
            f"choose within these, or leave {name} out to see everything."
        )
    return chosen


def _steps(events: pd.DataFrame) -> list[StepSpan]:
    """The steps that computed something, in order."""
    compute = events[events["kind"].isin((*COMPUTE_KINDS, "stall")) & (events["step"] >= 0)]
    spans = (compute.groupby("step").agg(start=("start_us", "min"), end=("end_us", "max")) / 1000.0).sort_index()
    commits = events[events["kind"] == "commit"].groupby("step")
    # The commit ends a step, even where the pipeline's own work goes unrecorded.
    commit_ms = (commits["start_us"].max() / 1000.0).to_dict()
    committed, accepted = commits["tokens"].sum().to_dict(), commits["value"].sum().to_dict()
    drafted = events[events["kind"] == "draft_length"].groupby("step")["value"].sum().to_dict()
    steps: list[StepSpan] = []
    for step, start, end in zip(spans.index.tolist(), spans["start"].tolist(), spans["end"].tolist(), strict=True):
        first_token = steps[-1].first_token + steps[-1].tokens if steps else 0
        start = max(start, steps[-1].end_ms) if steps else start  # what was drafted ahead lies in the step before
        counts = (committed.get(step, 0), first_token, accepted.get(step, 0), drafted.get(step, 0))
        steps.append(StepSpan(step, start, max(end, commit_ms.get(step, end)), *(int(count) for count in counts)))
    return steps
