"""The one loop: draft -> predict -> prefetch -> verify -> commit. A text, decoded or replayed, goes through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from specter_lab.ahead import Ahead
from specter_lab.offload.prefetcher import Prefetcher
from specter_lab.offload.residency import Residency
from specter_lab.offload.server import MissSplit, OffloadServer
from specter_lab.pieces import Drafter, DraftLength, EvictionPolicy, ExpertStore, Machine, Predictor
from specter_lab.records import DraftToken, ExpertKey, LayerCall, Prediction
from specter_lab.speculate.stream import Pieces


@dataclass(frozen=True)
class Committed:
    """What a pass added: ``tokens`` committed, ``accepted`` drafts among what was verified, and whether the text ends.

    >>> Committed(tokens=3, accepted=2, finished=False).tokens
    3
    """

    tokens: int
    accepted: int
    finished: bool


class Text(Protocol):
    """The text that grows: a model decoding (``decoding.py``), or a recorded or synthetic one replayed (``replay.py``)."""

    @property
    def position(self) -> int:
        """The last committed token's place: the first row of the coming pass."""

    def left(self) -> int:
        """How many tokens may still come."""

    def prefill(self, server: OffloadServer) -> Committed:
        """The prompt through the target; commits the first token."""

    @property
    def last_token(self) -> int:
        """The last committed token."""

    @property
    def longest_draft(self) -> int:
        """Most tokens of a ``stream``."""

    def draft(self, step: int, length: int) -> Iterator[DraftToken]:
        """Propose at most ``length`` tokens, one at a time."""

    def stream(self, step: Callable[[], int]) -> Pieces:
        """A draft from here on that may go on beside verifications, stamped with the ``step`` of the moment."""

    def verify(self, step: int, drafted: Sequence[DraftToken], server: OffloadServer) -> Committed:
        """One pass of the target over the last committed token and the drafts; commits what holds."""


class Assembly:
    """Pieces put together around one store, one machine and one set of slots.

    ``host_store``: the experts that the host itself computes with, where ``store`` holds residuals. ``barrier``:
    verification starts once all planned copies have arrived. ``split``: which misses the host computes. ``draft_ahead``:
    the next window is drafted while this one's verification waits.
    """

    def __init__(
        self,
        store: ExpertStore,
        slots: Sequence[int],
        machine: Machine,
        *,
        drafter: Drafter | None,
        predictor: Predictor,
        eviction: EvictionPolicy,
        draft_length: DraftLength,
        barrier: bool = False,
        split: MissSplit | None = None,
        poison: bool = False,
        device: str = "cpu",
        host_store: ExpertStore | None = None,
        on_arrival: bool = False,
        draft_ahead: bool = False,
    ) -> None:
        self.draft_ahead = draft_ahead
        self.machine, self.drafter, self.predictor = machine, drafter, predictor
        self.eviction, self.draft_length, self.barrier, self.split = eviction, draft_length, barrier, split
        self.host_store = host_store or store
        self.residency = Residency(store, slots, eviction, on_arrival=on_arrival, poison=poison, device=device)
        self.prefetcher = Prefetcher(store, self.residency, machine, host_store=self.host_store if split else None)
        for piece in (predictor, eviction, draft_length):
            if hasattr(piece, "bind"):
                piece.bind(self.prefetcher)

    def start(self, *, warm: bool) -> None:
        """Time 0, pieces that have learned nothing, and empty slots unless ``warm``."""
        if not warm:
            self.reset()
        self.residency.new_request()
        self.prefetcher.reset()
        for piece in (self.drafter, self.predictor, self.eviction, self.draft_length):
            begin = getattr(piece, "new_request", None)
            if begin is not None:
                begin()
        self.machine.start(self.prefetcher)

    def reset(self) -> None:
        """Empty every slot and queue."""
        self.prefetcher.reset()
        self.residency.forget_all()

    def run(self, text: Text) -> None:
        """Decode (or replay) the whole text."""
        ahead = Ahead(text, self.machine, self.predictor, self._want) if self.draft_ahead else None
        try:
            self._run(text, ahead)
        finally:  # also after an interrupt: a draft may stand halfway
            if ahead is not None:
                ahead.drop()

    def _run(self, text: Text, ahead: Ahead | None) -> None:
        step = 0
        committed = text.prefill(self._server(step, 0, {}))
        self._commit(step, text.position, committed, drafted=[])
        predicted: dict[ExpertKey, Prediction] = {}
        while not committed.finished:
            step += 1
            position = text.position
            drafted = self._draft(text, step, position, predicted, ahead)
            if self.barrier:
                self._wait_for_plan(step)
            server = self._server(step, position, predicted)
            if ahead is not None:
                longest = getattr(self.draft_length, "longest", self._length)
                ahead.verifying(server, len(drafted), longest, predicted)
            committed = text.verify(step, drafted, server)
            self.predictor.learn(step, predicted, server.needed)
            self.draft_length.learn(len(drafted), committed.accepted)
            if self.drafter is not None:
                self.drafter.learn(drafted, committed.accepted)
            self._commit(step, text.position, committed, drafted)
            coming = None if ahead is None else ahead.decided(step, committed.tokens == len(drafted) + 1 and not committed.finished)
            if ahead is not None and coming is None:
                with self.machine.lock:
                    self.prefetcher.cancel(step + 1, "rejected")
            predicted = coming or {}

    def _draft(self, text: Text, step: int, position: int, predicted: dict[ExpertKey, Prediction], ahead: Ahead | None) -> list[DraftToken]:
        """Draft, predicting and prefetching after each token; what is ready already comes first."""
        most = text.left() - 1 if ahead is None else min(text.left() - 1, text.longest_draft)
        drafted: list[DraftToken] = [] if ahead is None else ahead.ready(step)
        if hasattr(self.draft_length, "handed"):
            self.draft_length.handed(len(drafted))
        self._length = length = self.draft_length.choose(step, most) if self.drafter is not None else 0
        self._want(self.predictor.step_begins(step, position, max(length, len(drafted))), predicted)
        if ahead is not None:
            ahead.tell(predicted)
        go_on = getattr(self.draft_length, "go_on", None)
        more = length - len(drafted)
        for token in () if more <= 0 else text.draft(step, more) if ahead is None else ahead.tokens(more):
            self._want(self.predictor.drafted(step, token, horizon=len(drafted)), predicted)
            self.machine.compute("draft", "plan", step=step)
            drafted.append(token)
            if go_on is not None and not go_on(len(drafted)):
                break
        self.machine.mark("draft_length", step=step, position=position, value=len(drafted))
        return drafted

    def _server(self, step: int, position: int, predicted: dict[ExpertKey, Prediction]) -> OffloadServer:
        def predict(call: LayerCall) -> list[Prediction]:
            return _noted(self.predictor.layer_called(step, position, call), predicted)

        return OffloadServer(self.prefetcher, self.machine, step, position, predict, self.split, self.host_store)

    def _want(self, predictions: Iterable[Prediction], predicted: dict[ExpertKey, Prediction]) -> None:
        noted = _noted(predictions, predicted)
        if noted:
            with self.machine.lock:
                self.prefetcher.want(noted)
                self.machine.notify()

    def _wait_for_plan(self, step: int) -> None:
        while True:
            with self.machine.lock:
                self.machine.notify()
                planned = self.prefetcher.planned
            if planned is None:
                return
            self.machine.wait(*planned, step=step)

    def _commit(self, step: int, position: int, committed: Committed, drafted: Sequence[DraftToken]) -> None:
        """Requests of decided tokens go; the commit is stamped."""
        with self.machine.lock:
            self.prefetcher.cancel(step, "decided")
        self.machine.compute("target", "plan", step=step)
        accepted = min(committed.accepted, committed.tokens, len(drafted))
        self.machine.mark(
            "commit", step=step, position=position, tokens=committed.tokens, value=accepted, outcome="step" if step else "first"
        )


def _noted(predictions: Iterable[Prediction], predicted: dict[ExpertKey, Prediction]) -> list[Prediction]:
    """The predictions as a list, each first one of an expert kept in ``predicted``."""
    listed = list(predictions)
    for prediction in listed:
        predicted.setdefault(prediction.key, prediction)
    return listed
