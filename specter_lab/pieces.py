"""What plugs in: the protocols that a notebook may replace with its own idea.

A piece may also have ``bind(view)``, called once with a ``DeviceView``, and ``new_request()``, called before each request:
what it learned must be gone then, or results would depend on the order of prompts.

Each has at least two implementations in this package. A class fits by having the methods; it needn't inherit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from specter_lab.records import DraftToken, ExpertKey, LayerCall, Prediction, Transfer

if TYPE_CHECKING:
    from specter_lab.observe.trace import TraceWriter


class DraftContext(Protocol):
    """What a drafter may use: the committed tokens, the target's model and cache, and the chooser."""

    @property
    def ids(self) -> Tensor:
        """(1, committed tokens) of this request."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens after which nothing is worth drafting."""

    def forward(self, token: int, bank: ExpertStore, *, slots_first: bool = False) -> tuple[Tensor, DraftToken]:
        """Run the shared skeleton on one more token with the experts of ``bank``: next-token logits (vocabulary,)
        and an unchosen draft token that carries the routing. Its cache entries are scratch: the pipeline crops them.
        ``slots_first``: with the target's exact experts instead, where a device slot holds them."""

    def choose(self, logits: Tensor, prefix: Sequence[int]) -> tuple[int, Tensor | None]:
        """Pick a token after the committed ids and the drafted ``prefix``, with the request's own processors;
        also the distribution (vocabulary,) it was drawn from, None when greedy."""

    def spent(self, kind: str, *, layer: int = -1, tokens: int = 1, experts: int = 1) -> None:
        """For a drafter with a model of its own: stamp what it computed since the last stamp, on the draft's lane.

        ``kind``: "attention", "expert" or "head", over ``tokens`` rows and ``experts`` experts."""


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens, one at a time, so that prefetching starts before drafting ends.

    An implementation may also have ``bank`` (an ``ExpertStore``), and ``weight_bytes`` and ``kv_bytes_per_token`` of a model
    and a cache of its own: they count as device memory. ``no_routing``: why its tokens carry no routing of the target's
    experts, empty if they do. ``target``: the one ``MoE`` that it can draft for. ``close()``: give up what a request left.
    ``reads_slots``: True if what it proposes depends on what the slots hold, which no recorded text can tell.
    """

    name: str

    def draft(self, context: DraftContext, length: int) -> Iterator[DraftToken]:
        """Yield at most ``length`` tokens that continue ``context.ids``."""

    def learn(self, drafted: Sequence[DraftToken], accepted: int) -> None:
        """Told after each verification how many of its tokens held."""


@runtime_checkable
class Predictor(Protocol):
    """Says which experts the coming pass needs. Every hook may return nothing.

    An implementation may also have ``reads_routing``: True if it needs draft tokens that carry routing; ``looks_past``: True if it
    may be told of a token that is drafted ahead before that token's step begins, since it keeps nothing for each step.
    """

    name: str

    def step_begins(self, step: int, position: int, length: int) -> Iterable[Prediction]:
        """Before drafting: ``position`` is the first row of the coming pass, ``length`` the draft length."""

    def drafted(self, step: int, token: DraftToken, horizon: int) -> Iterable[Prediction]:
        """After each draft token; ``horizon`` is how many drafts came before it."""

    def layer_called(self, step: int, position: int, call: LayerCall) -> Iterable[Prediction]:
        """In the target's pass, when a layer's routing is known and its experts are about to run."""

    def learn(self, step: int, predicted: Mapping[ExpertKey, Prediction], needed: Mapping[ExpertKey, int]) -> None:
        """After the pass: what was predicted for it, and what it needed (key -> rows)."""


@runtime_checkable
class EvictionPolicy(Protocol):
    """Chooses which resident expert to forget. Never asked about one that is in use or still loading."""

    name: str

    def loaded(self, key: ExpertKey) -> None:
        """``key`` has taken a slot."""

    def used(self, key: ExpertKey) -> None:
        """``key`` was just computed with."""

    def forgotten(self, key: ExpertKey) -> None:
        """``key`` has lost its slot."""

    def victim(self, candidates: Sequence[ExpertKey]) -> ExpertKey:
        """One of ``candidates`` (not empty, in no particular order, all of one layer). Break ties by key: runs must repeat."""


@runtime_checkable
class DraftLength(Protocol):
    """How many tokens to draft in the coming step; 0 is a length.

    An implementation may also have ``go_on(drafted)``: told after each drafted token, False ends the draft there;
    ``handed(ready)``: told before ``choose`` how many tokens were drafted ahead; ``longest``: no draft will be longer.
    """

    def choose(self, step: int, most: int) -> int:
        """At most ``most``, what the request still may take."""

    def learn(self, drafted: int, accepted: int) -> None:
        """Told after each verification."""


class ExpertStore(Protocol):
    """Experts as flat blobs: the host's full-precision copy, or a draft's packed one."""

    name: str

    @property
    def layers(self) -> int:
        """Number of MoE layers."""

    def experts(self, layer: int) -> int:
        """Number of experts of that layer."""

    def blob_bytes(self, layer: int) -> int:
        """Size of one expert's blob."""

    def blob(self, key: ExpertKey) -> Tensor | None:
        """(blob_bytes,) uint8, contiguous; None in a replay, where nothing is copied."""

    def weights(self, layer: int, blob: Tensor) -> Mapping[str, Tensor]:
        """Named tensors that alias ``blob``: refilling the blob refills them."""

    def own_weights(self, key: ExpertKey) -> Mapping[str, Tensor]:
        """The same over the store's own blob of ``key``."""


Compute = Callable[[int, Mapping[str, Tensor]], None]
"""Runs one expert of the layer at hand with these tensors; results are summed in id order, whatever the order of calls."""


class ExpertServer(Protocol):
    """Runs a layer's experts as their weights become ready."""

    def serve(self, call: LayerCall, compute: Compute) -> None:
        """``compute(expert, tensors)`` for each of ``call.needed`` once; the tensors are valid during that call only."""


class DeviceView(Protocol):
    """What a scheduling piece may know of device and link; a piece with a ``bind(view)`` method is given one."""

    def slots(self, layer: int) -> int:
        """Device slots of that layer."""

    def absent(self, key: ExpertKey) -> bool:
        """Neither resident nor on the link."""

    def wanted(self, key: ExpertKey) -> bool:
        """Whether a prediction for a pass still to come wants it."""

    def expected_uses(self, key: ExpertKey) -> float:
        """How many positions of the coming pass are expected to use it."""

    def experts(self, layer: int) -> int:
        """Experts of that layer, wherever they are."""

    def blob_bytes(self, layer: int) -> int:
        """What one expert of that layer moves."""

    def missing_us(self) -> float:
        """What link and host together need for all that is wanted and absent."""

    def now_us(self) -> float:
        """The machine's time."""

    def link_rate(self) -> float:
        """Bytes a microsecond, a moving average over this pipeline's own copies."""


class LinkSource(Protocol):
    """Where the link takes its next copy from whenever it is free, so that intents stay in software."""

    def next_transfer(self) -> Transfer | None:
        """The most urgent copy that has a slot now, or None."""

    def arrived(self, transfer: Transfer) -> None:
        """That copy is done."""


@runtime_checkable
class Machine(Protocol):
    """Owns time: the only one that stamps it. One compute timeline, one link.

    The compute timeline is a chain of segments without gaps: ``compute`` closes the running one.
    """

    label: str
    trace: TraceWriter

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while residency or the request queues change."""

    def start(self, source: LinkSource | None) -> None:
        """Begin a request at time 0 with an empty trace."""

    def now_us(self) -> float:
        """Time since ``start``."""

    def mark(self, kind: str, **fields: Any) -> None:
        """Record an instant; ``fields`` are columns of the trace."""

    def compute(
        self, lane: str, kind: str, *, step: int, layer: int = -1, expert: int = -1, tokens: int = 0, experts: int = 1, request_id: int = -1
    ) -> None:
        """Everything on the compute timeline since the last segment was ``kind``, on ``lane``: ``tokens`` rows over ``experts`` experts."""

    def wait(self, key: ExpertKey, request_id: int, *, step: int) -> None:
        """Compute stops until that transfer has arrived; recorded as a stall."""

    def on_host(self, key: ExpertKey, bytes: int, work: Callable[[], None], *, step: int, tokens: int) -> None:
        """Run ``work`` on the host's lane, beside the device: one expert's rows with the host's own weights."""

    def join_host(self, *, step: int, layer: int) -> None:
        """Compute stops until the host lane is done; recorded as a stall."""

    def host_us(self, bytes: int) -> float:
        """What the host takes to read and apply an expert of that size."""

    def host_backlog_us(self) -> float:
        """How long the host lane is busy already."""

    def copy_us(self, bytes: int) -> float:
        """What the link takes to move that much, alone."""

    def link_backlog_us(self) -> float:
        """How long the copy on the link still takes."""

    def notify(self) -> None:
        """The source may have new work: an idle link looks again."""

    def stop(self) -> None:
        """End the request: nothing more is taken from the source; a copy on the link finishes. Idempotent."""

    def close(self) -> None:
        """Release threads and streams. Idempotent."""
