"""Drafters that know the answer: always right, always wrong, or right for the first few of each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specter_lab.pieces import DraftContext
from specter_lab.records import DraftToken


class Knowing:
    """Drafts ``own`` (the target's new tokens) rightly up to ``right`` a step, then wrongly; past their end, whatever."""

    def __init__(self, own: Sequence[int], prompt_tokens: int, right: int, vocabulary: int) -> None:
        self.own, self.prompt_tokens, self.right, self.vocabulary = own, prompt_tokens, right, vocabulary
        self.name = f"knowing ({right} right a step)"

    def draft(self, context: DraftContext, length: int) -> Iterator[DraftToken]:
        begin = context.ids.shape[1]
        for i in range(length):
            place = begin - self.prompt_tokens + i
            token = self.own[place] if place < len(self.own) else 0
            yield DraftToken(token if i < self.right else (token + 1 + i) % self.vocabulary, begin - 1 + i)

    def learn(self, drafted: Sequence[DraftToken], accepted: int) -> None:
        pass
