"""Policies that learn as they go, and drafters made of others."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from conftest import engine, inline, prompt_of
from torch import Tensor

from duoexp.budget import Fixed
from duoexp.drafters import Hybrid, ModelDrafter
from duoexp.policy import Adaptive, Chain
from duoexp.sampling import Sampler
from duoexp.tree import Draft
from duoexp.verify import Verdict


class Counter:
    """A model that counts up, and holds the next number for as likely as `sure` says; behind 7 it doubts."""

    vocabulary, context_size = 100, 1000

    def logits(self, context: Sequence[int], draft: Draft = Draft(), rows: Sequence[int] | None = None) -> Tensor:
        last = [context[-1], *draft.tokens]
        probs = torch.full((len(last), self.vocabulary), 0.01)
        for row, token in enumerate(last):
            probs[row, token + 1] = 0.2 if token == 7 else 9.0
        return probs.log()[list(range(len(last)) if rows is None else rows)]

    def clear(self) -> None: ...


def started(drafter: ModelDrafter | Hybrid) -> ModelDrafter | Hybrid:
    drafter.start(Counter, Sampler(), sampled=False)
    return drafter


def drafted(drafter: ModelDrafter | Hybrid, context: Sequence[int], budget: int = 20) -> list[int]:
    *_, draft = drafter.propose(context, Draft(), budget)
    return list(draft.tokens)


def test_an_adaptive_length_follows_acceptance() -> None:
    """2 more after a draft that was accepted whole, 1 less after any other, never below 1; the budget bounds it."""
    drafter = started(ModelDrafter(Adaptive(start=3)))
    lengths = []
    for rejected in (False, False, True, *[True] * 9, False):
        draft = Draft(tuple(drafted(drafter, [20], budget=6)), ())
        lengths.append(len(draft))
        drafter.observe(draft, Verdict((21,), -1, rejected), ())
    assert lengths == [3, 5, 6, 6, 5, 4, 3, 2, 1, 1, 1, 1, 1]
    drafter.observe(Draft(), Verdict((21,), -1, rejected=False), ())  # nothing drafted, nothing learnt
    assert len(drafted(drafter, [20])) == 3
    drafter.clear()
    assert len(drafted(drafter, [20])) == 3, "a new prompt starts anew"


def test_an_adaptive_draft_ends_behind_a_token_in_doubt() -> None:
    assert drafted(started(ModelDrafter(Adaptive(start=9))), [4]) == [5, 6, 7, 8]
    assert len(drafted(started(ModelDrafter(Adaptive(start=9, confidence=0.0))), [4])) == 9


@pytest.mark.parametrize("rule", ("match", "rejection"))
def test_adaptive_learns_from_the_targets_passes(rule: str) -> None:
    """Its rounds differ in length; those of a chain do not."""
    method = inline("draft=adaptive", "draft.policy.confidence=0", f"draft.rule={rule}", temperature=0.8)
    rounds = engine(temperature=0.8, limit=40).decode(replace(method, budget=Fixed(20)), prompt_of(16)).rounds
    for before, after in pairwise(rounds[1:]):
        grown = before.verified - 1 if before.rejected else before.verified + 2
        assert after.verified == max(1, grown) or after is rounds[-1]


def test_hybrid_copies_where_the_context_repeats_and_asks_the_model_elsewhere() -> None:
    hybrid = started(Hybrid(Chain(), model_budget=2, max_ngram=3, min_ngram=2))
    assert drafted(hybrid, [5, 6, 9, 30, 31, 5, 6], budget=4) == [9, 30, 31, 5]
    assert drafted(hybrid, [5, 6, 9, 30, 31, 5, 9], budget=4) == [10, 11]
    pending = Draft((6,), (-1,))
    *_, ahead = hybrid.propose([5, 6, 9, 30, 31, 5], pending, 2)
    assert ahead.tokens == (6, 9, 30), "the pending draft counts as text"
