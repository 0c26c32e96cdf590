"""A draft that goes on while its tokens are verified: in pieces, wherever the target's pass waits."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from specter_lab.pieces import Machine
from specter_lab.records import DraftToken

LONGEST = 32
"""Most tokens of a draft that goes on beside verifications: then it begins anew, from what the target committed."""

Pieces = Generator[DraftToken | None, None, None]
"""A draft that stops after each layer (None) and with each token."""


class DraftStream:
    """The tokens of one draft, for as many windows as hold.

    The loop takes a window's ``tokens``; ``given``: how many there were in all. While the target verifies them, ``advance``
    drafts on: first the ``guess`` of the token that the pass adds if all of them hold, then the next window's tokens, which
    are ``ready`` if the guess comes true. A piece is begun only in a wait of at least half its time (moving average): the
    target's pass isn't held up for what a rejection may throw away.

    Source: our own, for one device; PEARL (arXiv 2408.11850) drafts on while a target of its own device verifies.

    >>> from specter_lab.machines.simulated import SimulatedMachine
    >>> stream = DraftStream((t for t in (None, DraftToken(5, 1), None, DraftToken(6, 2))), SimulatedMachine())
    >>> [token.token for token in stream.tokens(1)], stream.advance(0.0), stream.advance(0.0), stream.guess.token
    ([5], True, True, 6)
    """

    def __init__(self, pieces: Pieces, machine: Machine) -> None:
        self._pieces, self._machine = pieces, machine
        self._piece_us, self.given = 0.0, 0
        self.verifying(most=0, told=lambda token: None)

    def verifying(self, most: int, told: Callable[[DraftToken], None]) -> None:
        """A window's verification begins: draft the guess and at most ``most`` tokens behind it; ``told`` hears of each."""
        self.guess: DraftToken | None = None
        self.ready: list[DraftToken] = []
        self._most, self._told = most, told

    def advance(self, free_us: float) -> bool:
        """One piece, if enough of it fits in a wait of ``free_us``; whether it did."""
        if (self.guess is not None and len(self.ready) >= self._most) or 2 * free_us < self._piece_us:
            return False
        try:
            piece = self._piece()
        except StopIteration:
            return False
        if piece is not None:
            if self.guess is None:
                self.guess = piece
            else:
                self.ready.append(piece)
            self._told(piece)
        return True

    def tokens(self, most: int) -> Iterator[DraftToken]:
        """At most so many tokens at once; fewer if the draft is over."""
        given = 0
        while given < most:
            try:
                piece = self._piece()
            except StopIteration:
                return
            if piece is not None:
                given += 1
                yield piece

    def _piece(self) -> DraftToken | None:
        start = self._machine.now_us()
        piece = next(self._pieces)
        spent = self._machine.now_us() - start
        self._piece_us += 0.1 * (spent - self._piece_us) if self._piece_us else spent
        self.given += piece is not None
        return piece

    def close(self) -> None:
        """Give up what isn't finished. Idempotent."""
        self._pieces.close()
