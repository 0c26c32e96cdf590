"""Colours that mean something: one for each category of bar, the same in every figure.

Chosen so that every colour stands out from white and from a dark notebook (contrast at least 3 : 1 against #ffffff
and #1e1e1e), and so that the colours of one lane stay apart for readers with red, green or blue colour blindness.
The tests compute both. Hatching repeats what a colour says where time was lost.
"""

from __future__ import annotations

import pandas as pd

LANES = ("draft", "target", "link", "disk")

COLOURS: dict[str, str] = {
    "attention": "#7e94c5",
    "head": "#7457c1",
    "plan": "#979385",
    "expert": "#1f7281",
    "expert: draft": "#1f7281",
    "expert: hit": "#237945",
    "expert: late": "#c28b02",
    "expert: miss": "#a95112",
    "stall": "#f60359",
    "transfer: demand": "#c65d14",
    "transfer: prefetch used": "#0b7cd5",
    "transfer: prefetch wasted": "#8e6680",
    "read": "#a0658f",
    "other": "#767676",
}

MEANINGS: dict[str, str] = {
    "attention": "a decoder layer up to its experts: attention, norms, router",
    "head": "last norm, vocabulary and choice of the token",
    "plan": "the pipeline's own work",
    "expert": "computed with an expert of which the trace doesn't say how it was found",
    "expert: draft": "the draft's own experts, which stay on the device",
    "expert: hit": "computed with an expert that was on the device when it was needed",
    "expert: late": "computed with an expert that was still on the link when it was needed",
    "expert: miss": "computed with an expert that nobody had asked for before it was needed",
    "stall": "compute waits for a transfer: exposed time",
    "transfer: demand": "a copy that the router asked for",
    "transfer: prefetch used": "a copy that a prediction asked for, and that was computed with",
    "transfer: prefetch wasted": "a copy that a prediction asked for, and that nothing was computed with",
    "read": "bytes of a mapped store from its file: from the disk, or what the system keeps of it in memory",
    "other": "a kind of event that this picture doesn't know",
}

HATCHES: dict[str, str] = {"stall": "/", "transfer: prefetch wasted": "x"}

LINE_COLOUR = "#767676"
"""Mid-grey for boundaries and labels: contrast above 3.5 : 1 on white and on dark."""


def describe_colours() -> pd.DataFrame:
    """The legend as a table: category, colour, hatch and meaning, in the order of the figures.

    >>> describe_colours().set_index("category").loc["stall", "meaning"]
    'compute waits for a transfer: exposed time'
    """
    rows = [(name, colour, HATCHES.get(name, ""), MEANINGS[name]) for name, colour in COLOURS.items()]
    return pd.DataFrame(rows, columns=["category", "colour", "hatch", "meaning"])
