"""A draft beside the target's pass of the same model: left after each layer, its half-done forward stands still."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator

from greenlet import getcurrent, greenlet

from specter_lab.records import DraftToken
from specter_lab.seam import ExpertsSeam
from specter_lab.speculate.stream import Pieces


def in_pieces(draft: Callable[[Callable[[], None]], Iterator[DraftToken]], seam: ExpertsSeam) -> Pieces:
    """Run ``draft(pause)`` piece by piece: None at each ``pause()``, and its tokens. Nobody else's forward sees ``seam`` changed.

    The draft has a stack of its own in the same thread (a greenlet), so a forward that torch and transformers know nothing of
    being interrupted can be left and come back to; exceptions and interrupts go to whoever asked for the piece. Closing ends
    the forward where it stands.

    >>> import specter_lab as sl
    >>> def draft(pause): pause(); yield DraftToken(5, position=0)
    >>> [piece and piece.token for piece in in_pieces(draft, sl.load_moe("tiny-moe").seam)]
    [None, 5]
    """

    def give(piece: DraftToken | None) -> None:
        with seam.lent():
            drafting.parent.switch(piece)

    def run() -> None:
        for token in draft(lambda: give(None)):
            give(token)

    drafting = greenlet(run)
    drafting.gr_context = contextvars.copy_context()  # that of whoever begins the draft, not of a pass that its first piece is taken in
    return _pieces(drafting, seam)


def _pieces(drafting: greenlet, seam: ExpertsSeam) -> Pieces:
    try:
        while True:
            drafting.parent = getcurrent()
            with seam.lent():
                piece = drafting.switch()
            if drafting.dead:
                return
            yield piece
    finally:
        if not drafting.dead and drafting:  # begun, and not over
            with seam.lent():
                drafting.throw()
