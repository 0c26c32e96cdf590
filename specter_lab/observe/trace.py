"""The trace: one table of timed events. It is the interface: whatever fills these columns gets every metric and plot.

| column | meaning |
| --- | --- |
| `lane` | `target`, `draft`, `host` (compute), `link`, `disk` (a mapped store), `control` (instants, no duration) |
| `kind` | see below |
| `start_us`, `end_us` | microseconds since the request began; equal for instants |
| `step` | 0 is the prefill, then one draft + verify round each; -1 where it has none |
| `position` | place in the sequence of the token it was for, -1 where it has none |
| `layer`, `expert` | MoE layer and expert, -1 where they have none |
| `tokens` | rows computed (compute), rows that use the expert (`need`), horizon (`predict`), tokens committed (`commit`) |
| `bytes` | bytes moved (`transfer`), read (`read`) or given up (`evict`), else 0 |
| `request_id` | ties `predict`, `transfer`, `stall`, `need`, `expert` of one copy together; -1 = no copy involved |
| `reason` | `transfer`, `read`, `evict`: `demand`, `prefetch` · `predict`: `absent`, `loading`, `resident` then · `cancel`: why |
| `outcome` | `need`: `hit`, `late`, `miss` · `transfer`: `used`, `wasted` · `predict`: `correct`, `wrong` · `commit`: `first` or `step` |
| `value` | probability (`predict`), accepted drafts (`commit`), drafted tokens (`draft_length`; early ones: `ahead`) |

Kinds. Compute: `attention` (a decoder layer up to its experts: attention, norms, router), `expert`, `head` (last
norm, vocabulary, choice), `rebuild` (a full-precision expert out of code and residual), `plan` (the pipeline's own
work). Waiting: `stall`. Link: `transfer`. Disk: `read`, before the transfer of the same request. Instants: `predict`,
`need` (one for each expert of a layer call), `route` (one for each expert of each position, from step 1 on;
`rejected` where the position wasn't committed, else `accepted`), `evict`, `cancel`, `draft_length`, `ahead` (a step's
tokens that were drafted while the one before was verified; outcome `kept` or `dropped`, which is then that of its
predictions, too: figures leave them out), `commit`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

FORMAT = "specter_lab trace 1"
COMPUTE_KINDS = ("attention", "expert", "head", "plan", "rebuild")
INSTANT_KINDS = ("predict", "need", "route", "evict", "cancel", "draft_length", "ahead", "commit")
COLUMNS: dict[str, str] = {
    "lane": "str",
    "kind": "str",
    "start_us": "float64",
    "end_us": "float64",
    "step": "int64",
    "position": "int64",
    "layer": "int64",
    "expert": "int64",
    "tokens": "int64",
    "bytes": "int64",
    "request_id": "int64",
    "reason": "str",
    "outcome": "str",
    "value": "float64",
}


@dataclass(frozen=True)
class Trace:
    """The finished table of one request and the machine that stamped it.

    >>> Trace.of([], machine="simulated").events.shape[0]
    0
    """

    events: pd.DataFrame
    machine: str

    @classmethod
    def of(cls, rows: list[tuple[Any, ...]], machine: str) -> Trace:
        """Rows in the order of ``COLUMNS`` -> a trace; ``ValueError`` names columns that don't fit."""
        events = pd.DataFrame.from_records(rows, columns=list(COLUMNS)).astype(COLUMNS)
        return cls(events, machine)

    def of_kind(self, *kinds: str) -> pd.DataFrame:
        """The events of these kinds, in order."""
        return self.events[self.events["kind"].isin(kinds)]

    def save(self, path: str | Path) -> Path:
        """Write as parquet (no pickle); the machine's label goes into the file's metadata."""
        path = Path(path)
        events = self.events.copy()
        events.attrs = {"machine": self.machine, "format": FORMAT}
        events.to_parquet(path, index=False)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what ``save`` wrote; ``ValueError`` for another version, and for missing columns."""
        events = pd.read_parquet(path)
        if events.attrs.get("format") != FORMAT:
            raise ValueError(
                f"A trace is read by the version that wrote it ({FORMAT!r}); {path} is {events.attrs.get('format')!r}. Run it again."
            )
        missing = sorted(set(COLUMNS) - set(events.columns))
        if missing:
            raise ValueError(f"A trace needs all of its columns; {path} lacks {missing}; write it with Trace.save().")
        return cls(events[list(COLUMNS)].astype(COLUMNS), str(events.attrs.get("machine", "unknown")))

    def __len__(self) -> int:
        return len(self.events)

    def __repr__(self) -> str:
        counts = self.events["kind"].value_counts().sort_index()
        return f"Trace({self.machine}, {len(self)} events: " + ", ".join(f"{n} {k}" for k, n in counts.items()) + ")"

    def _repr_html_(self) -> str:
        from html import escape

        return f"<p>{escape(repr(self))}</p>" + self.events.head(10).to_html(escape=True)


class TraceWriter:
    """Collects rows while a request runs. Only a machine calls ``add`` with times of its own.

    >>> writer = TraceWriter("simulated"); writer.add("link", "transfer", 0.0, 5.0, bytes=64)
    >>> len(writer.finish())
    1
    """

    def __init__(self, machine: str) -> None:
        self.machine = machine
        self.rows: list[tuple[Any, ...]] = []
        self._prediction_outcomes: dict[tuple[int, int], frozenset[int]] = {}
        self._used: set[int] = set()
        self._committed: dict[int, int] = {}

    def add(
        self,
        lane: str,
        kind: str,
        start_us: float,
        end_us: float,
        *,
        step: int = -1,
        position: int = -1,
        layer: int = -1,
        expert: int = -1,
        tokens: int = 0,
        bytes: int = 0,
        request_id: int = -1,
        reason: str = "",
        outcome: str = "",
        value: float = 0.0,
    ) -> None:
        """Append one event; see the module's table for the columns."""
        self.rows.append((lane, kind, start_us, end_us, step, position, layer, expert, tokens, bytes, request_id, reason, outcome, value))

    def use(self, request_id: int) -> None:
        """What that transfer brought was computed with."""
        self._used.add(request_id)

    def needed(self, step: int, layer: int, experts: tuple[int, ...]) -> None:
        """The truth that predictions for this step and layer are compared with."""
        self._prediction_outcomes[step, layer] = frozenset(experts)

    def finish(self) -> Trace:
        """The table, with the outcomes that only the end can tell (used or wasted, correct or wrong, accepted or rejected)."""
        self._committed = {row[4]: row[5] for row in self.rows if row[1] == "commit"}
        dropped = {row[4]: place for place, row in enumerate(self.rows) if row[1] == "ahead" and row[12] == "dropped"}
        rows = [self._resolved(row, dropped=place < dropped.get(row[4], -1)) for place, row in enumerate(self.rows)]
        return Trace.of(rows, self.machine)

    def _resolved(self, row: tuple[Any, ...], dropped: bool) -> tuple[Any, ...]:
        kind, step, layer, expert, request_id = row[1], row[4], row[6], row[7], row[10]
        if kind == "transfer":
            outcome = "used" if request_id in self._used else "wasted"
        elif kind == "predict" and dropped:
            outcome = "dropped"
        elif kind == "predict":
            outcome = "correct" if expert in self._prediction_outcomes.get((step, layer), ()) else "wrong"
        elif kind == "route":  # a step commits the rows before the place that it ends at
            outcome = "accepted" if row[5] < self._committed.get(step, -1) else "rejected"
        else:
            return row
        return (*row[:12], outcome, row[13])
