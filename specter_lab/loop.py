"""The one loop: draft -> predict -> prefetch -> verify -> commit. A text, decoded or replayed, goes through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from specter_lab.offload.prefetcher import Prefetcher
from specter_lab.offload.residency import Residency
from specter_lab.offload.server import MissSplit, OffloadServer
from specter_lab.pieces import Drafter, DraftLength, EvictionPolicy, ExpertStore, Machine, Predictor
from specter_lab.records import DraftToken, ExpertKey, LayerCall, Prediction
from specter_lab.speculate.stream import DraftStream, Pieces


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

    def draft(self, step: int, length: int) -> Iterator[DraftToken]:
        """Propose at most ``length`` tokens, one at a time."""

    def stream(self, step: Callable[[], int]) -> Pieces:
        """A draft from here on that may go on beside verifications, stamped with the ``step`` of the moment."""

    def verify(self, step: int, drafted: Sequence[DraftToken], server: OffloadServer) -> Committed:
        """One pass of the target over the last committed token and the drafts; commits what holds."""


import os
AHEAD = int(os.environ.get("AHEAD", "4"))


class Assembly:
    """Pieces put together around one store, one machine and one set of slots.

    ``host_store``: the experts that the host itself computes with, where ``store`` holds residuals. ``barrier``:
    verification starts once all planned copies have arrived. ``split``: which misses the host computes.
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
        self._stream: DraftStream | None = None
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
        try:
            self._run(text)
        finally:  # also after an interrupt: a stream is a forward that stands halfway
            self._drop()

    def _run(self, text: Text) -> None:
        step = 0
        committed = text.prefill(self._server(step, 0, {}))
        self._commit(step, text.position, committed, drafted=[])
        predicted: dict[ExpertKey, Prediction] = {}
        while not committed.finished:
            step += 1
            position = text.position
            drafted = self._draft(text, step, position, predicted)
            if self.barrier:
                self._wait_for_plan(step)
            server = self._server(step, position, predicted)
            coming: dict[ExpertKey, Prediction] = {}
            if self._stream is not None:
                self._begin_ahead(step, len(drafted), text.left(), server, predicted, coming)
            committed = text.verify(step, drafted, server)
            self.predictor.learn(step, predicted, server.needed)
            self.draft_length.learn(len(drafted), committed.accepted)
            if self.drafter is not None:
                self.drafter.learn(drafted, committed.accepted)
            self._commit(step, text.position, committed, drafted)
            predicted = coming if self._held(step, text, committed, drafted) else {}

    def _begin_ahead(
        self, step: int, drafted: int, left: int, server: OffloadServer, predicted: dict[ExpertKey, Prediction], coming: dict[ExpertKey, Prediction]
    ) -> None:
        """From now on, waits of the pass draft ahead."""
        stream = self._stream
        assert stream is not None

        def told(token: DraftToken) -> None:
            if not stream.ready:  # the guess: its routing is that of the last draft's row, whose first layers have run already
                rest = self.predictor.drafted(step, token, horizon=drafted)
                self._want((p for p in rest if p.key.layer > server.layer), predicted)
            else:
                self._want(self.predictor.drafted(step + 1, token, horizon=len(stream.ready) - 1), coming)
            self._at = step + 1

        stream.verifying(most=min(AHEAD, left - drafted - 2), told=told)
        server.meanwhile = stream.advance

    def _held(self, step: int, text: Text, committed: Committed, drafted: Sequence[DraftToken]) -> bool:
        """Whether the text goes on as the stream guessed; if not, it's dropped, with all that it wanted."""
        stream = self._stream
        if stream is None:
            return False
        all_held = committed.accepted == len(drafted) < committed.tokens and not committed.finished
        held = all_held and stream.guess is not None and stream.guess.token == text.last_token
        if stream.guess is not None:
            self.machine.mark("ahead", step=step, position=text.position, value=len(stream.ready), outcome="kept" if held else "dropped")
        if not held:
            with self.machine.lock:
                self.prefetcher.cancel(step + 1, "rejected")
            self._drop()
        return held

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _draft(self, text: Text, step: int, position: int, predicted: dict[ExpertKey, Prediction]) -> list[DraftToken]:
        """Draft, predicting and prefetching after each token."""
        most = text.left() - 1
        length = self.draft_length.choose(step, most) if self.drafter is not None else 0
        self._want(self.predictor.step_begins(step, position, length), predicted)
        drafted: list[DraftToken] = []
        go_on = getattr(self.draft_length, "go_on", None)
        if self.draft_ahead:
            self._at = step
            if self._stream is None:
                self._stream = DraftStream(text.stream(lambda: self._at), self.machine)
            drafted = self._stream.ready[:most]
            handed = getattr(self.draft_length, "handed", None)
            if drafted and handed is not None and not handed(len(drafted)):
                length = 0
            source = self._stream.tokens(length - len(drafted))
        else:
            source = text.draft(step, length) if length > 0 else iter(())
        for token in source:
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
