"""The cascade: a chain in fewer passes."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from duoexp.config import InputError
from duoexp.drafters import ModelDrafter
from duoexp.drafters.cascade import Cascade
from duoexp.lm.causal_lm import CachedLM
from duoexp.policy import Chain, Policy
from duoexp.sampling import Sampler
from duoexp.tree import Draft


class Repeating(CachedLM):
    """Says the token that stood `period` places before, and counts its passes."""

    def __init__(self, period: int) -> None:
        super().__init__(vocabulary=50, context_size=1000)
        self.period, self.passes, self.tokens = period, 0, list[int]()

    def run(self, tokens: list[int], positions: list[int], hidden: Tensor | None, places: list[int]) -> Tensor:
        self.passes += 1
        self.tokens += tokens
        rows = torch.zeros(len(places), self.vocabulary)
        for row, place in enumerate(places):
            rows[row, self.tokens[len(self.tokens) - len(tokens) + place + 1 - self.period]] = 1
        return rows

    def keep(self, start: int, slots: list[int]) -> None:
        self.tokens = [*self.tokens[:start], *(self.tokens[slot] for slot in slots)]


def drafted(policy: Policy, context: Sequence[int], budget: int, pending: Draft = Draft()) -> tuple[Draft, int]:
    lm, drafter = Repeating(period=5), ModelDrafter(policy)
    drafter.start(lambda: lm, Sampler(), sampled=False)
    *_, draft = drafter.propose(context, pending, budget)
    return draft, lm.passes


@pytest.mark.parametrize("pending", [Draft(), Draft((13, 14), (-1, 0))])
def test_it_is_the_chain_in_fewer_passes(pending: Draft) -> None:
    context = [10, 11, 12, 13, 14, 10, 11, 12]
    chain, passes = drafted(Chain(), context, 9, pending)
    cascade, fewer = drafted(Cascade(guesses=3), context, 9, pending)
    assert cascade == chain and passes == 9
    assert fewer == 3  # of 4 tokens, 4 and 1


def test_wrong_guesses_cost_no_pass() -> None:
    context = [10, 11, 12, 20, 21, 10, 11, 13, 10, 11]  # behind 10, 11 stood 13; the model says 10
    chain, passes = drafted(Chain(), context, 5)
    cascade, as_many = drafted(Cascade(guesses=3), context, 5)
    assert cascade == chain and as_many <= passes


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InputError, match="guesses=-1"):
        Cascade(guesses=-1)
    with pytest.raises(InputError, match="min_ngram=3 and max_ngram=2"):
        Cascade(max_ngram=2, min_ngram=3)
