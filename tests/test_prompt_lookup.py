"""Prompt lookup: what it proposes, and that its index is the same however the text came about."""

import random
from collections.abc import Sequence

import pytest

from duoexp.drafters import PromptLookup
from duoexp.drafters.prompt_lookup import NgramIndex
from duoexp.tree import Draft


def proposed(context: Sequence[int], pending: Draft = Draft(), budget: int = 10, **settings: int) -> list[int]:
    """The proposal's tokens behind those of `pending`."""
    drafts = list(PromptLookup(**settings).propose(context, pending, budget))
    return list(drafts[-1].tokens[len(pending) :]) if drafts else []


def searched(text: Sequence[int], budget: int, max_ngram: int = 3) -> list[int]:
    """The same by looking at every place."""
    for n in range(min(max_ngram, len(text) - 1), 0, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                return list(text[start + n : start + n + budget])
    return []


@pytest.mark.parametrize(
    ("context", "tokens"),
    (
        ([1, 2, 3, 4, 5, 9, 3, 6, 1, 2, 3], [4, 5, 9, 3, 6, 1, 2, 3]),  # the longest match, though a shorter is later
        ([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], [5, 1, 2, 3]),  # of equal ones the latest
        ([7, 7], [7]),  # short continuations too
        ([1, 2, 3], []),  # no dummy where nothing matches
        ([1], []),
    ),
)
def test_the_longest_then_the_latest_match_is_continued(context: list[int], tokens: list[int]) -> None:
    assert proposed(context) == tokens
    assert proposed(context, budget=2) == tokens[:2]


def test_the_ngrams_sizes_are_bounded() -> None:
    context = [5, 3, 8, 1, 2, 3, 4, 9, 2, 3, 6, 1, 2, 3]
    assert proposed(context, max_ngram=2)[:1] == [6]
    assert proposed([1, 9, 1], min_ngram=2) == []


def test_a_proposal_goes_on_behind_the_pending_draft() -> None:
    pending = Draft((3, 8, 4), (-1, -1, 0))  # its first sequence is 3 4
    [draft] = PromptLookup().propose([1, 2, 3, 4, 5, 6, 1, 2], pending, 2)
    assert draft.tokens == (3, 8, 4, 5, 6) and draft.parents == (-1, -1, 0, 2, 3)


def test_the_index_follows_the_text_through_every_change() -> None:
    chance = random.Random(0)
    lookup, text = PromptLookup(), [1]
    for _ in range(300):
        text = text[: max(1, len(text) - chance.choice((0, 0, 0, 1, 4, 40)))]
        text = text + [chance.randrange(3) for _ in range(chance.choice((1, 1, 2, 5)))]
        pending = Draft().grow(-1, [chance.randrange(3)]) if chance.random() < 0.5 else Draft()
        drafts = list(lookup.propose(text, pending, 6))
        found = list(drafts[0].tokens[len(pending) :]) if drafts else []
        assert found == searched([*text, *pending.tokens], 6)


def test_an_index_taken_back_is_that_of_the_shorter_text() -> None:
    grown, fresh = NgramIndex((3, 2, 1)), NgramIndex((3, 2, 1))
    grown.align([1, 2, 3, 1, 2, 3])
    grown.align([1, 2])
    fresh.align([1, 2])
    assert {ngram: ends for ngram, ends in grown._ends.items() if ends} == fresh._ends
