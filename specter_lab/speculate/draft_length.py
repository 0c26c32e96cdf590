"""How many tokens to draft in the coming step."""

from __future__ import annotations


class FixedLength:
    """The same number in every step; 0 means no speculation.

    >>> FixedLength(4).choose(step=1, most=2)
    2
    """

    def __init__(self, length: int) -> None:
        if length < 0:
            raise ValueError(f"A draft length counts tokens; got {length}; give 0 (no speculation) or more.")
        self.length = length

    def choose(self, step: int, most: int) -> int:
        """The fixed length, or what is left of the request."""
        return min(self.length, most)

    def learn(self, drafted: int, accepted: int) -> None:
        """Nothing to learn."""

    def __repr__(self) -> str:
        return f"FixedLength({self.length})"


class HeuristicLength:
    """Two more after a step whose drafts all held, one fewer after any other, from ``start``, at least 1.

    Source: the "heuristic" schedule of assisted generation in transformers.

    >>> length = HeuristicLength(start=5); length.learn(drafted=5, accepted=5); length.choose(step=2, most=20)
    7
    """

    def __init__(self, start: int = 5) -> None:
        if start < 1:
            raise ValueError(f"The heuristic starts at one token or more; got {start}; 5 is usual.")
        self.start = self.length = start

    def new_request(self) -> None:
        """Back to ``start``."""
        self.length = self.start

    def choose(self, step: int, most: int) -> int:
        """The current length, or what is left of the request."""
        return min(self.length, most)

    def learn(self, drafted: int, accepted: int) -> None:
        """Grow or shrink; a step without drafts says nothing."""
        if drafted:
            self.length = self.length + 2 if accepted == drafted else max(1, self.length - 1)

    def __repr__(self) -> str:
        return f"HeuristicLength(now {self.length})"
