"""Samples are the target's: of the keyed noise under `match`, and of the ratio test under `rejection`.

The target is a Markov chain over five tokens, so the distribution of its answers is known. What is tested is every
triple of neighbours in 4000 tokens, by a chi-square against the chain's transitions given the two tokens before: 100
degrees of freedom. Seeds are fixed, so a result never changes; had they been drawn, a right build would fail a test of
this kind one time in 10,000. A fault that moves 7 % of the probability from one token to another is found 99 times in
100; those planted below are found in 2000 tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from conftest import engine, loaded, planned, prompt_of, target_of
from scipy.stats import chi2
from torch import Tensor

from duoexp import metrics
from duoexp.budget import Fixed
from duoexp.drafters import Drafter, ModelDrafter
from duoexp.engine import Method
from duoexp.policy import Chain, Dynamic, FixedK, Policy
from duoexp.sampling import Sampler
from duoexp.schedule import SCHEDULES, Round, Stop
from duoexp.tree import Draft
from duoexp.verify import RULES, match, rejection
from duoexp.worker import Inline

ODDS = 1e-4
TOKENS = 4000
PROMPT = [0]


@dataclass(frozen=True)
class Markov:
    """A CausalLM whose next token depends on the last one alone: a row of logits for each."""

    table: Tensor
    vocabulary: int = 5
    context_size: int = 10**6

    def logits(self, context: Sequence[int], draft: Draft = Draft(), rows: Sequence[int] | None = None) -> Tensor:
        last = [context[-1], *draft.tokens]
        return self.table[last if rows is None else [last[row] for row in rows]]

    def clear(self) -> None:
        pass


def drawn(seed: int) -> Tensor:
    return torch.randn(5, 5, generator=torch.Generator().manual_seed(seed))


TARGET, OTHER = Markov(drawn(0)), Markov(drawn(0) + drawn(1))


def drafter_of(policy: Policy, sampler: Sampler, sampled: bool = True, lm: Markov = OTHER) -> ModelDrafter:
    drafter = ModelDrafter(policy)
    drafter.start(lambda: lm, sampler, sampled)
    return drafter


def sampled(
    drafter: Callable[[Sampler], Drafter], schedule: str, rule: str = "rejection", tokens: int = TOKENS, **sampling: Any
) -> list[int]:
    """TOKENS ids, from answers of 500 each with its own seed: a short context is copied in less time."""
    ids: list[int] = []
    for seed in range(tokens // 500):
        sampler = Sampler(**{"temperature": 1.0, "seed": seed, **sampling})
        worker = Inline(drafter(sampler), 5)
        rounds = SCHEDULES[schedule](TARGET, worker, RULES[rule], sampler, PROMPT, Fixed(6), Stop(frozenset(), 500))
        ids += ids_of(rounds)
    return ids


def ids_of(rounds: Iterable[Round]) -> list[int]:
    return [token for each in rounds for token in each.tokens]


def p_value(ids: Sequence[int], table: Tensor) -> float:
    """How likely a sample of the chain with these transitions is to lie as far from them; answers of 500 ids."""
    seen = torch.zeros(5, 5, 5, dtype=torch.float64)
    for start in range(0, len(ids), 500):
        answer = ids[start : start + 500]
        for a, b, c in zip(answer, answer[1:], answer[2:], strict=False):
            seen[a, b, c] += 1
    expected = seen.sum(-1, keepdim=True) * table.double()
    held = expected > 0
    assert not seen[~held].any(), "a token that cannot be"
    statistic = float(((seen - expected)[held] ** 2 / expected[held]).sum())
    freedom = int(held.sum()) - int(held.any(-1).sum())
    return float(chi2.sf(statistic, freedom))


# The noise


def test_the_keyed_noise_draws_an_exact_sample_of_the_targets_distribution() -> None:
    ids = sampled(lambda sampler: Drafter(), "serial", rule="match")
    assert p_value(ids, TARGET.table.softmax(-1)) > ODDS


@pytest.mark.parametrize(("top_k", "top_p"), ((3, 1.0), (0, 0.8), (4, 0.6)))
def test_filtered_samples_have_the_filtered_distribution(top_k: int, top_p: float) -> None:
    rows = (TARGET.table / 0.7).softmax(-1)
    ordered, tokens = rows.sort(descending=True)
    ranked = ordered.clone()
    ranked[:, top_k or 5 :] = 0
    ranked /= ranked.sum(-1, keepdim=True)
    ranked[ranked.cumsum(-1) - ranked >= top_p] = 0
    filtered = torch.zeros_like(rows).scatter(-1, tokens, ranked / ranked.sum(-1, keepdim=True))
    settings = {"temperature": 0.7, "top_k": top_k, "top_p": top_p}
    assert p_value(sampled(lambda sampler: Drafter(), "serial", "match", 2000, **settings), filtered) > ODDS
    chain = sampled(lambda sampler: drafter_of(FixedK(2), sampler), "serial", tokens=2000, **settings)
    assert p_value(chain, filtered) > ODDS


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("policy", (Chain(), FixedK(3), Dynamic()))
def test_match_gives_the_same_sample_with_a_draft(policy: Policy, schedule: str) -> None:
    sampler = Sampler(1.0, seed=5)
    drafter = drafter_of(policy, sampler, sampled=False)
    stops = [Stop(frozenset(), 500) for _ in range(2)]
    ours = SCHEDULES[schedule](TARGET, Inline(drafter, 5), match, sampler, PROMPT, Fixed(6), stops[0])
    alone = SCHEDULES["serial"](TARGET, Inline(Drafter(), 5), match, sampler, PROMPT, Fixed(0), stops[1])
    assert ids_of(ours) == ids_of(alone)


# The ratio test

POLICIES = {"chain": Chain(), "siblings": FixedK(3), "dynamic": Dynamic()}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("policy", POLICIES)
def test_rejection_keeps_the_targets_distribution(policy: str, schedule: str) -> None:  # A1
    ids = sampled(lambda sampler: drafter_of(POLICIES[policy], sampler), schedule)
    assert p_value(ids, TARGET.table.softmax(-1)) > ODDS


def test_rejection_keeps_the_targets_distribution_with_a_draft_that_is_no_sample() -> None:
    """q is a point mass then, as with prompt lookup."""
    ids = sampled(lambda sampler: drafter_of(FixedK(2), Sampler(), sampled=False), "serial")
    assert p_value(ids, TARGET.table.softmax(-1)) > ODDS


def test_a_sampled_draft_shares_no_noise_with_the_target() -> None:
    """Else what is drawn after a rejection leans on what was rejected, by too little for the tests above to see."""
    drafter = drafter_of(Chain(), Sampler(1.0), lm=TARGET)
    pairs = []
    for position in range(1, 400):
        [draft] = drafter.propose([0] * position, Draft(), 1)
        pairs.append((draft.tokens[0], Sampler(1.0).token(TARGET.table[0], position)))
    p = TARGET.table[0].softmax(-1)
    agreed, by_chance = sum(a == b for a, b in pairs) / len(pairs), float(p.square().sum())
    assert abs(agreed - by_chance) < 4 * (by_chance * (1 - by_chance) / len(pairs)) ** 0.5  # 1 in 16,000 beyond


@dataclass
class Broken(Drafter):
    """A drafter that lies about its draft."""

    inner: Drafter
    lie: Callable[[Draft], Draft]

    def propose(self, context: Sequence[int], pending: Draft, budget: int, depth: int | None = None) -> Iterator[Draft]:
        for draft in self.inner.propose(context, pending, budget, depth):
            yield self.lie(draft)

    def clear(self) -> None:
        self.inner.clear()


def flattened(draft: Draft) -> Draft:
    assert draft.probs is not None
    return replace(draft, probs=draft.probs.sqrt() / draft.probs.sqrt().sum(-1, keepdim=True))


def shifted(draft: Draft) -> Draft:
    assert draft.probs is not None
    return replace(draft, probs=draft.probs.roll(1, 0))


class Greedy(Drafter):
    """Its draft is the likeliest token, its q that of a sample (transformers#32867)."""

    def __init__(self, policy: Policy, sampler: Sampler) -> None:
        self.lm, self.inner = OTHER, drafter_of(policy, replace(sampler, temperature=0.0))

    def propose(self, context: Sequence[int], pending: Draft, budget: int, depth: int | None = None) -> Iterator[Draft]:
        for draft in self.inner.propose(context, pending, budget, depth):
            before = [context[-1] if parent < 0 else draft.tokens[parent] for parent in draft.parents]
            yield replace(draft, probs=self.lm.table.softmax(-1)[before])


LIES = {
    "q of another temperature": lambda policy, sampler: Broken(drafter_of(policy, sampler), flattened),
    "q of another position": lambda policy, sampler: Broken(drafter_of(policy, sampler), shifted),
    "q of a sample, tokens of none": Greedy,
}


@pytest.mark.parametrize("policy", ("chain", "siblings"))
@pytest.mark.parametrize("lie", LIES)
def test_a_wrong_q_is_found(lie: str, policy: str) -> None:  # A1
    ids = sampled(lambda sampler: LIES[lie](POLICIES[policy], sampler), "serial", tokens=2000)
    assert p_value(ids, TARGET.table.softmax(-1)) < 1e-6


# Where two distributions are one


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("temperature", (1.0, 1e-4))
def test_the_target_as_its_own_draft_leaves_no_residual(temperature: float, dtype: str, schedule: str) -> None:  # A2
    target = target_of(f"hardware.target.dtype={dtype}")
    drafter = ModelDrafter(Chain())
    sampler = Sampler(temperature)
    drafter.start(lambda: loaded(planned().target, dtype=dtype), sampler, sampled=True)
    method = Method(SCHEDULES[schedule], Inline(drafter, 259), rejection, Fixed(5))
    found = engine(target, limit=64, temperature=temperature).decode(method, prompt_of(16))
    # The pass's own tests: overlapped, the first token of a sequence is compared with one that the target drew alone.
    tests = [ok for position, ok in metrics.tests(found.rounds) if position > 1 or schedule == "serial"]
    assert len(found.ids) == 64 and len(tests) > 10
    # A float32 pass of another width moves a probability by 1e-6 or so, hence of some 50 tokens none is lost.
    assert all(tests) if dtype == "float32" else sum(tests) > len(tests) / 2


class Unlucky(Sampler):
    """Refuses what may be refused at all."""

    def uniform(self, position: int, trial: int) -> float:
        return 1.0


def test_an_empty_residual_draws_from_the_target() -> None:  # A2
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    draft = Draft((0,), (-1,), Sampler(1.0).probs(p.log())[:1])
    verdicts = [rejection(draft, p.log(), Unlucky(1.0, seed=seed), 0) for seed in range(50)]
    assert all(verdict.rejected for verdict in verdicts)
    assert {verdict.tokens for verdict in verdicts} == {(0,), (1,)}


# Temperature 0


@pytest.mark.parametrize("rule", RULES)
def test_at_temperature_0_a_draft_token_is_the_argmax_or_rejected(rule: str) -> None:  # A3
    logits = torch.tensor([[2.0, 1.9, 0.0]] * 2)
    for probs in (None, torch.tensor([[0.2, 0.3, 0.5]])):
        for token in range(3):
            verdict = RULES[rule](Draft((token,), (-1,), probs), logits, Sampler(), 7)
            assert verdict.tokens == ((0, 0) if token == 0 else (0,))
            assert verdict.rejected == (token != 0)


TIED = Markov(torch.tensor([[0, 2, 1, 2, 1.0], [1, 0, 1, 0, 0], [0, 0, 3, 3, 3], [2, 1, 2, 1, 2], [1, 1, 1, 1, 1]]))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", RULES)
def test_a_tie_at_temperature_0_has_one_winner_everywhere(rule: str, policy: str, schedule: str) -> None:  # A3
    for start in range(5):
        drafter = drafter_of(POLICIES[policy], Sampler(), sampled=False, lm=TIED)
        stops = [Stop(frozenset(), 30) for _ in range(2)]
        ours = SCHEDULES[schedule](TIED, Inline(drafter, 5), RULES[rule], Sampler(), [start], Fixed(6), stops[0])
        alone = SCHEDULES["serial"](TIED, Inline(Drafter(), 5), match, Sampler(), [start], Fixed(0), stops[1])
        assert ids_of(ours) == ids_of(alone)


@pytest.mark.parametrize("policy", (FixedK(3), Dynamic()))
def test_a_tie_in_the_draft_goes_to_the_token_that_the_target_would_take(policy: Policy) -> None:
    """A draft that ranks equal tokens otherwise than `Sampler.token` is rejected although both models agree."""
    wide = Markov(torch.zeros(400, 400), vocabulary=400)
    drafter = drafter_of(policy, Sampler(), sampled=False, lm=wide)
    *_, draft = drafter.propose([7], Draft(), 6)
    assert draft.tokens[0] == Sampler().token(wide.table[7], 1) == 0


@pytest.mark.parametrize("settings", ({}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 3, "top_p": 0.7}))
def test_all_rows_at_once_give_the_tokens_of_each_alone(settings: dict[str, Any]) -> None:
    """A GPU decides so, a processor row by row."""
    sampler = Sampler(seed=3, **settings)
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    places = [7 + row // 3 for row in range(64)]
    alone = [sampler.token(row, place) for row, place in zip(logits, places, strict=True)]
    assert sampler.tokens(logits, places) == alone
