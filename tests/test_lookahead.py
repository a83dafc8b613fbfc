"""Lookahead: the shape of its tree, what its pool keeps, and as many tokens a pass as the authors' algorithm."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from conftest import ECHO_PROMPT, engine, inline, prompt_of, target_of
from torch import Tensor

from duoexp.budget import Fixed
from duoexp.drafters import Lookahead
from duoexp.metrics import block_efficiency
from duoexp.sampling import Sampler
from duoexp.schedule import SCHEDULES, Round, Stop
from duoexp.tree import Draft
from duoexp.verify import Verdict, match
from duoexp.worker import Inline


class Decimal:
    """A target that counts 0 to 9 and over again."""

    vocabulary, context_size = 10, 1000

    def logits(self, context: Sequence[int], draft: Draft = Draft(), rows: Sequence[int] | None = None) -> Tensor:
        return torch.eye(10)[[(token + 1) % 10 for token in (context[-1], *draft.tokens)]]

    def clear(self) -> None: ...


def decoded(drafter: Lookahead, tokens: int, budget: int = 55) -> list[Round]:
    worker, stop = Inline(drafter, 10), Stop(frozenset(), tokens)
    return list(SCHEDULES["serial"](Decimal(), worker, match, Sampler(), [3, 1, 4], Fixed(budget), stop))


def test_the_window_is_a_path_with_deeper_guesses_below_it() -> None:
    """rows[l][i] stands i + l tokens ahead, under the first i tokens of row 0 and those of its own column."""
    drafter, level, window = Lookahead(level=4, window=3), 4, 3
    context = [3, 1, 4]
    for step in range(6):
        [draft] = drafter.propose(context, Draft(), 100)
        rows, depths = drafter._rows, draft.depths()
        filled = min(step, level - 2)
        assert [len(row) for row in rows] == [window + level - 3 - filled] + [window + level - 2 - filled] * filled
        for i, end in enumerate(drafter._ends):
            path = draft.path(end)
            assert [draft.tokens[node] for node in path] == [*rows[0][:i], *(row[i] for row in rows[1:])]
            assert [depths[node] for node in path] == list(range(1, i + filled + 1))
        behind = [100 + 10 * step, *(200 + 10 * step + node for node in range(len(draft)))]
        drafter.observe(draft, Verdict((behind[0],), -1, rejected=True), behind)
        context = [*context, behind[0]]


def test_the_pool_holds_what_the_target_said() -> None:
    """A target that counts makes every n-gram one of consecutive numbers, and soon five tokens a pass."""
    drafter = Lookahead()
    rounds = decoded(drafter, 120)
    ngrams = [(token, *ngram) for token, known in drafter._pool.items() for ngram in known]
    assert all((b - a) % 10 == 1 for ngram in ngrams for a, b in pairwise(ngram[1:]))
    assert max(len(known) for known in drafter._pool.values()) <= 7
    assert max(len(each.tokens) for each in rounds) >= 5
    assert all(each.verified <= 55 for each in rounds)


@pytest.mark.parametrize("budget", (1, 5, 20))
def test_a_window_that_does_not_fit_is_cut_and_not_refined(budget: int) -> None:
    drafter = Lookahead()
    rounds = decoded(drafter, 30, budget)
    assert 0 < max(each.verified for each in rounds) <= budget
    assert len(drafter._rows) <= 3 or not drafter._pool


def test_a_pool_can_begin_with_the_ngrams_of_the_prompt() -> None:
    drafter = Lookahead(level=3, window=2, pool_from_prompt=True)
    [draft] = drafter.propose([7, 1, 2, 7, 5, 6, 7], Draft(), 20)
    assert draft.child(-1, 5) == 0 and draft.child(0, 6) == 1, "the latest first"
    assert draft.find([1, 2]) is not None
    assert Lookahead().propose([7], Draft(), 9) is not None


def test_a_window_deeper_than_the_answer_is_cut_at_its_end() -> None:
    drafter = Lookahead(pool_from_prompt=True)
    for depth in range(9):
        for draft in drafter.propose([1, 2, 3, 4, 5, 1], Draft(), 55, depth):
            assert max(draft.depths()) <= depth


def authors(prompt: list[int], tokens: int, level: int = 5, window: int = 7, guess_set: int = 7) -> int:
    """Steps of the published algorithm (2402.02057, algorithm 2) at temperature 0, written down as it is described.

    Every guess is asked for by a path of its own, so that nothing is shared with the drafter but the target.
    """

    def said(context: list[int], paths: list[list[int]]) -> list[int]:
        draft, ends = Draft(), []
        for path in paths:
            node = -1
            for token in path:
                draft, node = draft.grow(node, [token]), len(draft)
            ends.append(node + 1)
        best: list[int] = target_of().logits(context, draft).argmax(-1).tolist()
        return [best[end] for end in ends]

    rows = [random.Random(0).choices(prompt, k=window + level - 3)]
    pool: dict[int, list[list[int]]] = {}
    context, steps = [*prompt, *said(prompt, [[]])], 1
    while len(context) < len(prompt) + tokens:
        last, columns = context[-1], range(len(rows[0]) + 1)
        guesses = pool.get(last, []) if len(rows) == level - 1 else []
        paths = [rows[0][:i] + [row[i] for row in rows[1:]] for i in columns]
        checks = [guess[:length] for guess in guesses for length in range(level)]
        first, *answers = said(context, [[], *paths, *checks])
        new, verified = answers[: len(paths)], answers[len(paths) :]
        if len(rows) < level - 1:
            rows = [row[1:] for row in [*rows, new]]
        else:
            for i in columns:
                known = pool.setdefault(last if i == 0 else rows[0][i - 1], [])
                ngram = [row[i] for row in rows[1:]] + [new[i]]
                if ngram in known:
                    known.remove(ngram)
                elif len(known) == guess_set:
                    known.pop(0)
                known.append(ngram)
            rows = [rows[1][1:], *rows[2:], new]
        hits = [first]
        for number, guess in enumerate([check for check in checks if len(check) == level - 1]):
            own = verified[number * level : (number + 1) * level]
            right = next((i for i, token in enumerate(guess) if token != own[i]), level - 1)
            hits = max(hits, own[: right + 1], key=len)
        context, steps = context + hits, steps + 1
    return steps


def test_tau_is_that_of_the_authors_algorithm() -> None:
    prompts, tokens = [ECHO_PROMPT, *(prompt_of(16, seed) for seed in range(3))], 150
    ours = [engine(limit=tokens).decode(inline("draft=lookahead"), prompt) for prompt in prompts]
    theirs = sum(authors(prompt, tokens) for prompt in prompts)
    assert block_efficiency(ours) == pytest.approx(len(prompts) * tokens / theirs, rel=0.1)
