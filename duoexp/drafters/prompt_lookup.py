"""Prompt lookup decoding: what followed the last words when they stood in the context before (Saxena, 2023)."""

from collections.abc import Iterator, Sequence

from duoexp.config import InputError
from duoexp.drafters.base import Drafter
from duoexp.lm.causal_lm import shared
from duoexp.tree import Draft


class PromptLookup(Drafter):
    """Drafts the tokens behind the latest earlier occurrence of the last n tokens, the longest n first.

    Saxena's settings are n up to 3 and a budget of 10. Unlike the first code, it prefers the latest occurrence to the
    first one, takes what little may follow it, and proposes nothing where nothing matches.
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        whole = isinstance(max_ngram, int) and isinstance(min_ngram, int)
        if not whole or not 1 <= min_ngram <= max_ngram:
            raise InputError(
                f"draft.drafter.min_ngram={min_ngram!r} and max_ngram={max_ngram!r}: give whole numbers, "
                "1 <= min_ngram <= max_ngram"
            )
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self.clear()

    def propose(self, context: Sequence[int], pending: Draft, budget: int, depth: int | None = None) -> Iterator[Draft]:
        tip = pending.tip()
        if depth is not None:
            budget = max(0, min(budget, depth - pending.depth(tip)))
        text = [*context, *(pending.tokens[node] for node in pending.path(tip))]
        self._index.align(text)
        start = self._index.latest()
        found = [] if start is None else text[start : start + budget]
        if found:
            yield pending.hang(tip, Draft(tuple(found), tuple(range(-1, len(found) - 1))))

    def clear(self) -> None:
        self._index = NgramIndex(self._sizes)


class NgramIndex:
    """Where the n-grams of a text stand, for each n of `sizes`. It follows the text: what a change leaves is kept.

    A token costs a few entries once; a search costs one look-up for each n, however long the text.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # of each n-gram, in order; never that of the whole text

    def align(self, text: list[int]) -> None:
        """Makes `text` the text, by taking back tokens from its end and adding others."""
        kept = shared(self._text, text)
        for end in range(len(self._text) - 1, max(kept, 1) - 1, -1):
            for ngram in self._ngrams(end):
                self._ends[ngram].pop()
        self._text[kept:] = text[kept:]
        for end in range(max(kept, 1), len(text)):
            for ngram in self._ngrams(end):
                self._ends.setdefault(ngram, []).append(end)

    def latest(self) -> int | None:
        """Where the latest earlier occurrence of the last n tokens ends, for the largest n that has one."""
        for ngram in self._ngrams(len(self._text)):
            if ends := self._ends.get(ngram):
                return ends[-1]
        return None

    def _ngrams(self, end: int) -> Iterator[tuple[int, ...]]:
        return (tuple(self._text[end - n : end]) for n in self._sizes if n <= end)
