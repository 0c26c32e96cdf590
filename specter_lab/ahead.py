"""Drafting the next window while this one is verified."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from specter_lab.offload.server import OffloadServer
from specter_lab.pieces import Machine, Predictor
from specter_lab.records import DraftToken, ExpertKey, Prediction
from specter_lab.speculate.stream import DraftStream

if TYPE_CHECKING:
    from specter_lab.loop import Text

Want = Callable[[Iterable[Prediction], dict[ExpertKey, Prediction]], None]


class Ahead:
    """One text's draft, that goes on with the window that comes after in the waits of each verification.

    The first token behind a window is the draft's guess of what the target adds to it. If the window holds as a whole and
    the guess is right, what was drafted behind it is the next window's beginning, and the experts that it wants are on their
    way; otherwise all of that is dropped. The guess's own row tells which experts the last draft's row needs: a lookahead that
    comes late, for the layers that the pass hasn't reached.

    Source: our own, for waits of an offloaded pass; drafting on during verification is PEARL's idea (arXiv 2408.11850).
    """

    def __init__(self, text: Text, machine: Machine, predictor: Predictor, want: Want) -> None:
        self.text, self.machine, self.predictor, self.want = text, machine, predictor, want
        self._stream: DraftStream | None = None
        self._step = 0

    def ready(self, step: int) -> list[DraftToken]:
        """A step begins: the tokens that are drafted already; a new draft begins where there is none."""
        self._step = step
        if self._stream is None:
            self._stream = DraftStream(self.text.stream(lambda: self._step), self.machine)
        return list(self._stream.ready)

    def tell(self, predicted: dict[ExpertKey, Prediction]) -> None:
        """The predictor's step has begun: it hears of what is ready, if it hasn't when that was drafted."""
        assert self._stream is not None
        for horizon, token in enumerate(() if self._tells_early else self._stream.ready):
            self.want(self.predictor.drafted(self._step, token, horizon), predicted)

    def tokens(self, most: int) -> Iterator[DraftToken]:
        """At most so many more, at once."""
        assert self._stream is not None, "a step begins with what is ready"
        return self._stream.tokens(most)

    def verifying(self, server: OffloadServer, drafted: int, most: int, predicted: dict[ExpertKey, Prediction]) -> None:
        """From now on the waits of ``server`` draft ahead: at most ``most`` tokens."""
        assert self._stream is not None
        stream, step = self._stream, self._step
        self._coming: dict[ExpertKey, Prediction] = {}

        def told(token: DraftToken) -> None:
            self._step = step + 1
            if self._tells_early and not stream.ready:
                late = self.predictor.drafted(step, token, drafted)
                self.want((p for p in late if p.key.layer > server.layer), predicted)
            elif self._tells_early:
                self.want(self.predictor.drafted(step + 1, token, len(stream.ready) - 1), self._coming)

        most = min(most, self.text.left() - drafted - 2)  # left by this window and by what the target adds to the next
        stream.verifying(most, told)
        if most > 0 and stream.given + 1 + most <= self.text.longest_draft:  # else the next window would come up short
            server.meanwhile = stream.advance

    def decided(self, step: int, held: bool) -> dict[ExpertKey, Prediction] | None:
        """The pass is over; ``held``: as a whole. What is predicted for the coming step, None if the draft was dropped."""
        assert self._stream is not None
        guess, ready = self._stream.guess, self._stream.ready
        kept = held and guess is not None and guess.token == self.text.last_token
        if guess is not None:
            self.machine.mark("ahead", step=step + 1, position=self.text.position, value=len(ready), outcome="kept" if kept else "dropped")
        if kept:
            return self._coming
        self.drop()
        return None

    def drop(self) -> None:
        """Give up what is drafted. Idempotent."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    @property
    def _tells_early(self) -> bool:
        """Whether the predictor may be told of a token before its step begins."""
        return getattr(self.predictor, "looks_past", False)
