"""A draft model that is itself decoded speculatively: a vertical cascade (Cascade Speculative Drafting, 2312.11462)."""

from collections.abc import Iterator

from duoexp.config import InputError
from duoexp.drafters.prompt_lookup import NgramIndex
from duoexp.policy import DraftModel, Policy
from duoexp.tree import Draft


class Cascade(Policy):
    """One sequence, the same as a chain's. But what followed the last `min_ngram` to `max_ngram` tokens before, up to
    `guesses` tokens of it, is checked by the draft model in the pass that the next token needs in any case.

    It pays where a pass over a few tokens costs the draft model little more than one over a single token: with a draft
    as large as the target, whose steps are too dear to guess far ahead of it.
    """

    def __init__(self, guesses: int = 3, max_ngram: int = 4, min_ngram: int = 2) -> None:
        if not isinstance(guesses, int) or guesses < 0:
            raise InputError(f"draft.policy.guesses={guesses!r} is no number of tokens; give 0 (a chain) or more")
        if not 1 <= min_ngram <= max_ngram:
            raise InputError(
                f"draft.policy.min_ngram={min_ngram!r} and max_ngram={max_ngram!r}: give 1 <= min_ngram <= max_ngram"
            )
        self.guesses, self._sizes = guesses, range(max_ngram, min_ngram - 1, -1)
        self.clear()

    def grow(self, model: DraftModel, budget: int) -> Iterator[Draft]:
        draft = Draft()
        while len(draft) < budget:
            tip = len(draft) - 1
            guess = self._guess([*model.text, *draft.tokens], budget - len(draft) - 1)
            guessed = draft.hang(tip, Draft(tuple(guess), tuple(range(-1, len(guess) - 1))))
            for row, expected in zip(model.after(guessed, range(tip, len(guessed))), [*guess, None], strict=True):
                draft = row.grow(draft, len(draft) - 1)
                if draft.tokens[-1] != expected:
                    break
            yield draft

    def clear(self) -> None:
        self._index = NgramIndex(self._sizes)

    def _guess(self, text: list[int], most: int) -> list[int]:
        self._index.align(text)
        start = self._index.latest()
        return [] if start is None else text[start : start + min(self.guesses, most)]
