"""Budgets: what they ask for, what they rest on, and what is measured for them."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ECHO_PROMPT, engine, expected, inline, planned, target_of
from omegaconf import OmegaConf

from duoexp.budget import Budget, Deadline, Fixed, Size
from duoexp.config import BudgetConfig, InputError, budget_of
from duoexp.engine import Method
from duoexp.fit import Setting, pace
from duoexp.optimal import Optimal
from duoexp.policy import Chain, Dynamic, FixedK, Policy
from duoexp.profile import Costs, Profile, Timing, Want, key_of, measure
from duoexp.rounds import Round
from duoexp.schedule import SCHEDULES, overlapped
from duoexp.shape import Shape, most_sequences, shape
from duoexp.tree import Draft
from duoexp.verify import match

FLAT = {1: 0.040, 32: 0.040}  # seconds of a target pass, whatever its width


# The config


@pytest.mark.parametrize(
    ("given", "means"),
    [
        (7, BudgetConfig("fixed", tokens=7)),
        (0, BudgetConfig("fixed", tokens=0)),
        ("deadline", BudgetConfig("deadline")),
        ({"kind": "optimal", "most": 8}, BudgetConfig("optimal", most=8)),
        (OmegaConf.to_container(OmegaConf.create({"kind": "fixed", "tokens": 3})), BudgetConfig("fixed", tokens=3)),
    ],
)
def test_a_budget_is_a_number_a_kind_or_both(given: Any, means: BudgetConfig) -> None:
    assert budget_of(given) == means


@pytest.mark.parametrize(
    "given", [-1, 2.5, True, None, "most", {"kind": "fixed", "tokens": -1}, {"most": 33}, {"a": 1}]
)
def test_anything_else_is_refused(given: Any) -> None:
    with pytest.raises(InputError, match=r"draft\.budget"):
        budget_of(given)


# Shapes


@pytest.mark.parametrize(
    ("policy", "budget", "doubt", "means"),
    [
        (Chain(), 4, False, Shape((1, 1, 1, 1), 4, 1)),
        (FixedK(2), 8, False, Shape((1, 2, 2, 2), 4, 2)),
        (FixedK(2, growth="serial"), 6, False, Shape((1, 1, 1, 1, 1), 3, 2)),
        (FixedK(4), 1, False, Shape((1,), 1, 1)),
        (Dynamic(), 4, False, Shape((1, 1, 1, 1), 4, 1)),
        (Dynamic(4), 8, True, Shape((1, 1, 3), 2, 4)),
    ],
)
def test_a_shape_is_what_a_policy_grows(policy: Policy, budget: int, doubt: bool, means: Shape) -> None:
    assert shape(policy, budget, doubt) == means


def test_sequences_that_a_draft_can_have() -> None:
    assert [most_sequences(policy, 32) for policy in (Chain(), FixedK(3), Dynamic(8))] == [1, 3, 8]


# Measured


@pytest.mark.parametrize(
    ("draft_s", "budget"),
    [
        (0.010, 4),  # four fill a pass: a fifth would make the target wait
        (0.016, 3),  # two leave a fifth of the pass unused, three overrun it by as much, and bring half as much again
        (0.0195, 2),
        (0.080, 2),  # a drafter slower than the target: what is least, as a single token gains nothing
        (0.001, 32),  # more than `most` would fit
    ],
)
def test_a_measured_budget_fills_a_target_pass(draft_s: float, budget: int) -> None:
    assert pace(Chain(), Costs(FLAT, {1: draft_s}), 32, overlapped=True) == budget


def test_a_message_takes_its_part_of_the_pass() -> None:
    assert pace(Chain(), Costs(FLAT, {1: 0.010}, message_s=0.010), 8, overlapped=False) > 4 - 1


def test_sequences_that_grow_together_make_room_for_more_tokens() -> None:
    costs = Costs(FLAT, {1: 0.010, 2: 0.010})
    assert pace(FixedK(2), costs, 32, overlapped=True) == 2 * pace(Chain(), costs, 32, overlapped=True)
    assert pace(FixedK(2, growth="serial"), costs, 32, overlapped=True) < 2 * 4
    assert pace(Dynamic(), costs, 32, overlapped=True) == 4, "it may draft a single sequence"


def test_a_wider_pass_that_takes_longer_leaves_time_for_more() -> None:
    rising = Costs({1: 0.040, 32: 0.102}, {1: 0.010})
    assert pace(Chain(), rising, 32, overlapped=True) == 5


def test_costs_are_linear_between_what_was_measured_and_beyond() -> None:
    costs = Costs({1: 1.0, 3: 2.0}, {1: 0.1, 2: 0.2}, message_s=1.0)
    assert [costs.target_s(width) for width in (1, 2, 3, 5)] == [1.0, 1.5, 2.0, 3.0]
    assert costs.draft_s([1, 2, 2]) == pytest.approx(1.5)
    assert Costs({4: 2.0}, {1: 0.1}).target_s(9) == 2.0


# What is measured, and kept


@pytest.fixture(scope="module")
def key() -> dict[str, Any]:
    plan = planned("draft=fixed")
    return key_of(plan.hardware, "auto", plan.target, plan.draft)


WANT = Want(beside=False, contexts=[40], widths=[1, 4], sequences=[1, 2], prefill=True)


def measured(profile: Profile, want: Want = WANT) -> bool:
    return measure(target_of(), inline("draft=fixed").worker, 259, 1, want, profile)


def test_only_what_is_lacking_is_measured(key: dict[str, Any]) -> None:
    profile = Profile(key)
    assert measured(profile)
    assert set(profile.timings) == set(WANT.places(40))
    assert all(0 < each.low_s <= each.median_s <= each.high_s for each in profile.timings.values() if each.samples > 1)
    before = dict(profile.timings)
    assert not measured(profile)
    assert measured(profile, Want(False, [40], [1, 8], []))
    assert profile.timings == before | {("target", False, 40, 8): profile.timings["target", False, 40, 8]}


def timing(width: int, seconds: float, beside: bool = False) -> Timing:
    return Timing("target", beside, 40, width, seconds, seconds, seconds, 1)


def test_a_profile_is_used_where_it_was_made_and_nowhere_else(key: dict[str, Any]) -> None:
    profile = Profile(key)
    profile.add(timing(1, 0.5))
    profile.save()
    assert Profile.kept(key).timings == profile.timings
    other = json.loads(json.dumps(key))
    other["machine"]["node"] = "another"
    assert Profile.kept(other).timings == {}
    profile.file.rename(Profile(other).file)  # as if the files of the cache had been mixed up
    assert Profile.kept(other).timings == {}
    Profile(key).file.write_text("{")
    assert Profile.kept(key).timings == {}


def test_a_key_knows_the_weights(tmp_path: Path) -> None:
    plan = planned("draft=vanilla")
    keys = [key_of(plan.hardware, engine, plan.target, plan.draft) for engine in ("lean", "auto")]
    assert keys[0] != keys[1]
    assert any(name.endswith(".safetensors") for name, *_ in keys[0]["target"]["files"])
    assert "node" in keys[0]["machine"] and "load" not in keys[0]["machine"]["cpu"]


def test_a_narrow_pass_that_was_disturbed_costs_no_more_than_a_wider_one(key: dict[str, Any]) -> None:
    profile = Profile(key)
    for each in (timing(1, 2.0), timing(2, 9.0), timing(4, 3.0), timing(1, 7.0, beside=True)):
        profile.add(each)
    assert profile.of("target", False, 40) == {1: 2.0, 2: 3.0, 4: 3.0}
    assert profile.of("target", True, 40) == {1: 7.0}
    assert profile.of("draft", True, 40) == {}


def setting(kind: str, policy: Policy | None = Chain(), beside: bool = True) -> Setting:  # noqa: B008
    return Setting(BudgetConfig(kind, tokens=7), policy, overlapped=True, beside=beside, context_size=100)


def test_what_needs_no_times_measures_none() -> None:
    for kind, budget in (("fixed", Fixed(7)), ("deadline", Deadline(32))):
        assert setting(kind).want() is None
        assert setting(kind).budget(Profile({})) == budget
    want = setting("measured", Dynamic(6)).want()
    assert want is not None and (list(want.contexts), list(want.sequences)) == ([50], [1, 2, 4, 6])
    dead = setting("measured").budget(Profile({}))
    assert dead == Fixed(0, "no draft")


@pytest.mark.parametrize(
    "given", [setting("measured", None), setting("optimal", None), setting("deadline", beside=False)]
)
def test_a_kind_that_does_not_fit_the_method_is_refused(given: Setting) -> None:
    with pytest.raises(InputError, match=r"draft\.budget\.kind="):
        given.check()


# In a round


def test_nothing_is_asked_for_where_the_answer_ends() -> None:
    assert Fixed(5).choose(0, 9) == Size(5, "fixed")
    assert Fixed(5).choose(3, 0) == Size(0, "end of the answer")
    assert Fixed(5).choose(3, -1).tokens == Deadline(5).choose(3, -1).tokens == 0


def test_a_worker_drafts_as_many_sequences_as_it_is_asked_for() -> None:
    worker = inline("draft=vanilla").worker
    for sequences, leaves in ((3, 3), (None, 1), (2, 2)):
        worker.ask([1, 2, 3], Draft(), 6, sequences=sequences)
        draft = worker.answer()
        assert (len(draft), len(draft.leaves())) == (6, leaves)


class Peeking:
    """Asks for 6 tokens in 2 sequences, and remembers the rounds."""

    def __init__(self) -> None:
        self.rounds: list[Any] = []

    def choose(self, pending: int, room: int) -> Size:
        return Size(6, f"{pending} of {room}", sequences=2) if room > 2 else Size(0, "end")

    def observe(self, round: Any) -> None:
        self.rounds.append(round)


def test_a_round_says_what_was_asked_for_and_why() -> None:
    budget = Peeking()
    ours = engine()
    found = ours.decode(Method(overlapped, inline("draft=vanilla").worker, match, budget), ECHO_PROMPT)
    assert found.ids == expected(ours, ECHO_PROMPT).ids
    assert tuple(budget.rounds) == found.rounds
    assert {each.budget for each in found.rounds} == {0, 6}
    assert all(
        each.why == "end" if each.budget == 0 else each.why.startswith(f"{each.verified} of ") for each in found.rounds
    )
    arrived = [each for each in found.rounds if each.sequences]
    assert arrived and all(each.sequences == 2 for each in arrived)
    assert all((each.rank is not None) == bool(each.head) for each in arrived)
    assert {each.rank for each in arrived} <= {None, 0, 1}


# Optimal: against a simulation of rounds, in which constants are tried as well


def simulated(budget: Budget, costs: Costs, rates: Sequence[float], beside: bool, tokens: int, seed: int = 0) -> float:
    """Seconds of an answer. rates: the chance that a token at position 1, 2, ... is accepted; the last one goes on."""
    chance, seconds, left, pending, head = random.Random(seed), 0.0, tokens, 0, None
    while left > 0:
        if beside:
            size = budget.choose(pending, left - 1 - pending)
            verified, depth = pending, min(size.tokens, max(0, left - 1 - pending))
        else:
            size = budget.choose(0, left - 1)
            verified = depth = min(size.tokens, left - 1)
        draft_s = costs.draft_s([1] * depth) if depth else 0.0
        first = 2 if beside else 1
        accepted = 0
        while accepted < verified and chance.random() < rates[min(first + accepted, len(rates)) - 1]:
            accepted += 1
        rejected = accepted < verified
        target_s = costs.target_s(verified + 1)
        seconds += target_s + draft_s if not beside else target_s if rejected else max(target_s, draft_s)
        left -= accepted + 1
        arrived = depth > 0 if not beside else head is not None
        budget.observe(round_of(accepted, rejected, head, verified, arrived))
        head = (chance.random() < rates[0]) if beside and not rejected and depth else None
        pending = depth - 1 if head else 0
    return seconds


def round_of(accepted: int, rejected: bool, head: bool | None, verified: int, arrived: bool) -> Round:
    rank = 0 if (accepted if head is None else head) else None
    facts = {"drafted": 0, "start_s": 0.0, "verify_s": 0.0, "wait_s": 0.0, "message_s": 0.0, "spans": ()}
    return Round((1,) * (accepted + 1), accepted, rejected, head, verified, sequences=int(arrived), rank=rank, **facts)


RISING = {1: 0.044, 2: 0.0445, 8: 0.048, 32: 0.066}


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("step_s", [0.0025, 0.0176, 0.06])
@pytest.mark.parametrize("rates", [[0.97], [0.8, 0.7, 0.6, 0.5], [0.4]])
def test_optimal_is_no_slower_than_the_best_constant(beside: bool, step_s: float, rates: list[float]) -> None:
    costs = Costs(RISING, {1: step_s}, message_s=0.0003)
    optimal = Optimal(costs, 32, [1], beside)
    for seed in range(100, 104):  # what it learns from
        simulated(optimal, costs, rates, beside, 64, seed)
    constants = [Fixed(tokens) for tokens in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)]
    sums = [sum(simulated(each, costs, rates, beside, 64, i) for i in range(40)) for each in (optimal, *constants)]
    assert sums[0] <= 1.03 * min(sums[1:])


def test_a_measured_budget_is_close_to_the_best_constant_where_most_is_accepted() -> None:
    for step_s in (0.0025, 0.01, 0.0176, 0.03):
        costs = Costs(RISING, {1: step_s}, message_s=0.0003)
        chosen = pace(Chain(), costs, 32, overlapped=True)
        sums = {n: sum(simulated(Fixed(n), costs, [0.97], True, 64, seed) for seed in range(40)) for n in range(33)}
        assert sums[chosen] <= 1.03 * min(sums.values())


def test_sequences_are_worth_it_where_rivals_are_often_right() -> None:
    costs = Costs(FLAT, {1: 0.010, 2: 0.011})
    for ranks, sequences in (((0, 0, 0, 0, None), 1), ((0, 1, 0, 1, None), 2)):
        budget = Optimal(costs, 32, [1, 2], overlapped=True)
        for rank in ranks * 40:
            head = replace(round_of(0, False, rank is not None, 0, arrived=True), sequences=2, rank=rank)
            budget.observe(head)
            budget.observe(round_of(1, False, None, 1, arrived=False))
        size = budget.choose(0, 60)
        assert size.sequences == sequences and size.tokens % sequences == 0


def test_optimal_does_not_draft_what_an_answer_cannot_take() -> None:
    for overlapped_, rooms in ((True, (0, 1)), (False, (0,))):
        budget = Optimal(Costs(FLAT, {1: 0.001}), 32, [1], overlapped_)
        assert [budget.choose(0, room).tokens for room in rooms] == [0] * len(rooms)
        assert all(budget.choose(0, room).tokens <= room for room in range(40))


def test_a_draft_that_costs_more_than_it_saves_is_not_made() -> None:
    for overlapped_ in (True, False):
        assert Optimal(Costs(FLAT, {1: 0.2}), 32, [1], overlapped_).choose(0, 60).tokens == 0


@pytest.mark.parametrize("beside", [False, True])
def test_a_draft_that_gets_good_later_is_used_again(beside: bool) -> None:
    costs = Costs(RISING, {1: 0.03}, message_s=0.0003)
    optimal = Optimal(costs, 32, [1], beside)
    for seed in range(4):
        simulated(optimal, costs, [0.02], beside, 64, seed)
    simulated(optimal, costs, [0.97], beside, 512)
    after, none, *constants = (
        simulated(each, costs, [0.97], beside, 512, seed=1) for each in (optimal, *map(Fixed, (0, 2, 3, 4, 6)))
    )
    assert after <= 1.03 * min(constants) < 0.9 * none


@pytest.mark.parametrize("beside", [False, True])
def test_looking_again_costs_little(beside: bool) -> None:
    costs, tokens = Costs(RISING, {1: 0.03}, message_s=0.0003), 2**12
    none, optimal = (
        simulated(each, costs, [0.02], beside, tokens) for each in (Fixed(0), Optimal(costs, 32, [1], beside))
    )
    assert optimal <= 1.01 * none


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_optimal_equals_autoregressive(schedule: str) -> None:
    budget = Optimal(Costs(FLAT, {1: 0.001, 2: 0.001, 4: 0.002}, 0.0), 32, [1, 2, 4], schedule == "overlapped")
    ours = engine()
    found = ours.decode(Method(SCHEDULES[schedule], inline("draft=dynamic").worker, match, budget), ECHO_PROMPT)
    assert found.ids == expected(ours, ECHO_PROMPT).ids
    assert any(each.sequences for each in found.rounds)
    assert all(each.budget <= 32 and each.why for each in found.rounds)
