"""Whatever is drafted, in whatever shape and at whatever moment it is taken, the answer is the target's own."""

import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from duoexp.budget import Fixed, Size
from duoexp.drafters import Drafter
from duoexp.rounds import Round
from duoexp.sampling import Sampler
from duoexp.schedule import SCHEDULES, Stop
from duoexp.tree import Draft
from duoexp.verify import RULES
from duoexp.worker import Inline

TOKENS = 6  # so few that wrong drafts are often right by chance
LENGTH = 60
EOS = 5


class Stub:
    """A target whose next token depends on every token before it, and on their order."""

    vocabulary, context_size = TOKENS, 10**6

    def __init__(self, seed: int) -> None:
        self.table = torch.randn(97, TOKENS, generator=torch.Generator().manual_seed(seed)) * 2
        self.table[:, EOS] -= 4  # rare, so that most answers end at their length

    def logits(self, context: Sequence[int], draft: Draft = Draft(), rows: Sequence[int] | None = None) -> Tensor:
        paths = [[draft.tokens[node] for node in draft.path(end)] for end in range(-1, len(draft))]
        states = [self.state([*context, *path]) for path in paths]
        return self.table[states if rows is None else [states[row] for row in rows]]

    def state(self, text: Sequence[int]) -> int:
        state = 0
        for token in text:
            state = (state * 31 + token + 1) % 97
        return state

    def clear(self) -> None:
        pass


class Random(Drafter):
    """Grows trees at random. It often knows the target's token, and often hangs it beside wrong ones, or twice."""

    def __init__(self, target: Stub, sampler: Sampler, seed: int) -> None:
        self.target, self.sampler, self.dice = target, sampler, random.Random(seed)

    def propose(self, context: Sequence[int], pending: Draft, budget: int, depth: int | None = None) -> Iterator[Draft]:
        draft = pending
        for _ in range(self.dice.randint(0, budget)):
            node = self.dice.choice([pending.tip(), len(draft) - 1, self.dice.randrange(-1, len(draft))])
            if depth is not None and draft.depth(node) >= depth:
                continue
            text = [*context, *(draft.tokens[each] for each in draft.path(node))]
            token = self.dice.randrange(TOKENS)
            if self.dice.random() < 0.7:
                token = self.sampler.token(self.target.table[self.target.state(text)], len(text))
            draft = draft.grow(node, [token])
            if self.dice.random() < 0.5:  # else with the next nodes
                yield draft


class Restless:
    """A budget of any size, that waits for the draft or takes what is there."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def choose(self, pending: int, room: int) -> Size:
        return Size(self.dice.randrange(9), "chance", waits=self.dice.random() < 0.7)

    def observe(self, round: Round) -> None:
        pass


@pytest.mark.parametrize("temperature", (0.0, 0.8))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_tree_at_any_moment_leaves_the_answer_the_targets_own(schedule: str, temperature: float) -> None:
    """At temperature 0 the ratio test is bound to the same answer as `match`."""
    accepted = rejected = 0
    for seed in range(40):
        target, sampler = Stub(seed), Sampler(temperature, seed=seed)
        rule = "match" if temperature or seed % 2 else "rejection"
        alone = decoded(schedule, rule, target, sampler, Drafter(), Fixed(0))
        rounds = decoded(schedule, rule, target, sampler, Random(target, sampler, seed), Restless(seed))
        assert text(rounds) == text(alone), seed
        accepted += sum(each.accepted for each in rounds)
        rejected += sum(each.rejected for each in rounds)
    assert accepted > 40 and rejected > 40, "little was tested"


def decoded(
    schedule: str, rule: str, target: Stub, sampler: Sampler, drafter: Drafter, budget: Fixed | Restless
) -> list[Round]:
    stop, worker = Stop(frozenset({EOS}), LENGTH), Inline(drafter, TOKENS)
    return list(SCHEDULES[schedule](target, worker, RULES[rule], sampler, [1, 2], budget, stop))


def text(rounds: Sequence[Round]) -> list[int]:
    return [token for each in rounds for token in each.tokens]
