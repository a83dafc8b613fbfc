"""Prompt lookup decoding: what followed the last words when they stood in the context before (Saxena, 2023)."""

from collections.abc import Iterator, Sequence

from duoexp.config import InputError
from duoexp.drafters.base import Drafter
from duoexp.tree import Draft


class PromptLookup(Drafter):
    """Drafts the tokens behind the latest earlier occurrence of the context's last n tokens, the longest n first."""

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        whole = isinstance(max_ngram, int) and isinstance(min_ngram, int)
        if not whole or not 1 <= min_ngram <= max_ngram:
            raise InputError(
                f"draft.drafter.min_ngram={min_ngram!r} and max_ngram={max_ngram!r}: give whole numbers, "
                "1 <= min_ngram <= max_ngram"
            )
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def propose(self, context: Sequence[int], pending: Draft, budget: int) -> Iterator[Draft]:
        tip = pending.tip()
        text = [*context, *(pending.tokens[node] for node in pending.path(tip))]
        found = self._continuation(text, budget)
        if found:
            yield pending.hang(tip, Draft(tuple(found), tuple(range(-1, len(found) - 1))))

    def _continuation(self, text: list[int], length: int) -> list[int]:
        for n in range(min(self.max_ngram, len(text) - 1), self.min_ngram - 1, -1):
            tail = text[-n:]
            for start in range(len(text) - n - 1, -1, -1):
                if text[start : start + n] == tail:
                    return text[start + n : start + n + length]
        return []
