"""Lookahead decoding: the target's own guesses, refined in parallel and kept as n-grams (Fu et al., 2402.02057)."""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence

from duoexp.config import InputError
from duoexp.drafters.base import Drafter
from duoexp.lm.load import Model
from duoexp.tree import Draft, Trie
from duoexp.verify import Verdict

Ngram = tuple[int, ...]


class Lookahead(Drafter):
    """Needs no model: each pass of the target verifies n-grams of a pool and refines the window that fills it.

    level N, window W, guess_set G: the names and the defaults of the authors' code. pool_from_prompt: whether the pool
    begins with the n-grams of the prompt.

    Both branches of the paper (section 3) are one tree. Verification branch: up to G n-grams that began with the last
    token before. Lookahead branch: rows[0], W - 1 guesses in sequence, is a path; column i of the rows below hangs
    behind its first i tokens, so that rows[l][i] stands i + l tokens behind the last one. What the target says behind
    the columns is the next row. A guess of the window is a draft token like any other: when it is the target's own it
    is accepted, and else it counts as rejected.
    """

    observes = True

    def __init__(self, level: int = 5, window: int = 7, guess_set: int = 7, pool_from_prompt: bool = False) -> None:
        for name, value, least in (("level", level, 2), ("window", window, 1), ("guess_set", guess_set, 0)):
            if not isinstance(value, int) or value < least:
                raise InputError(f"draft.drafter.{name}={value!r} is out of range; allowed: {least} or more")
        self.level, self.window, self.guess_set = level, window, guess_set
        self.pool_from_prompt = pool_from_prompt
        self.clear()

    def prepare(self, target: Model) -> None:
        deepest = self.window + self.level - 3
        if deepest >= target.context:
            raise InputError(
                f"draft.drafter.window={self.window} with level={self.level} guesses {deepest} tokens ahead, but the "
                f"target's context holds {target.context}; give less"
            )

    def clear(self) -> None:
        self._chance = random.Random(0)  # for each prompt anew, so that an answer does not depend on those before
        self._rows: list[list[int]] = []
        self._pool: dict[int, dict[Ngram, None]] = defaultdict(dict)  # by the token before; the latest come last
        self._last, self._ends = -1, list[int]()  # of the last proposal: the token it follows, the nodes of its columns
        self._proposed = Draft()

    def propose(self, context: Sequence[int], pending: Draft, budget: int, depth: int | None = None) -> Iterator[Draft]:
        if not self._rows:
            self._begin(context)
        tip = pending.tip()
        levels = budget if depth is None else max(0, depth - pending.depth(tip))
        self._last = pending.tokens[tip] if tip >= 0 else context[-1]
        trie = Trie(budget)
        for ngram in reversed(self._pool[self._last]):  # the latest first
            trie.add(ngram[:levels])
        self._ends = self._lay(trie, levels)
        self._proposed = trie.draft
        if len(trie):
            yield pending.hang(tip, trie.draft)

    def observe(self, draft: Draft, verdict: Verdict, behind: Sequence[int]) -> None:
        """Only of a draft that was verified as it was proposed: in the serial schedule, of all of them."""
        if self._ends and (draft.tokens, draft.parents) == (self._proposed.tokens, self._proposed.parents):
            self._advance([behind[end + 1] for end in self._ends])
        self._ends = []

    def _begin(self, prompt: Sequence[int]) -> None:
        """Guesses out of the prompt. Each of the first passes adds a row, and takes a column."""
        self._rows = [self._chance.choices(prompt, k=self.window + self.level - 3)]
        if self.pool_from_prompt:
            for start in range(len(prompt) - self.level + 1):
                self._keep(prompt[start], tuple(prompt[start + 1 : start + self.level]))

    def _lay(self, trie: Trie, levels: int) -> list[int]:
        """Adds the window; returns the node at the end of each column, or none where a part of it finds no room."""
        first, rest = self._rows[0], self._rows[1:]
        columns = [[*first[:i], *(row[i] for row in rest)] for i in range(len(first) + 1)]
        ends = [trie.add(column) for column in columns if len(column) <= levels]
        whole = [end for end in ends if end is not None]
        return whole if len(whole) == len(columns) else []

    def _advance(self, row: list[int]) -> None:
        """`row`: what the target says behind the columns."""
        rows = self._rows
        if len(rows) < self.level - 1:
            self._rows = [each[1:] for each in (*rows, row)]
            return
        for i, before in enumerate([self._last, *rows[0]]):
            self._keep(before, (*(each[i] for each in rows[1:]), row[i]))
        first, *rest = (*rows[1:], row)
        self._rows = [first[1:], *rest]

    def _keep(self, before: int, ngram: Ngram) -> None:
        """The latest `guess_set` n-grams behind each token."""
        known = self._pool[before]
        known.pop(ngram, None)
        known[ngram] = None
        if len(known) > self.guess_set:
            del known[next(iter(known))]
