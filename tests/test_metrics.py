"""Rates, from rounds that are counted by hand, on a clock that is made up; and the verdict on identity."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from duoexp import metrics
from duoexp.budget import Deadline, Fixed
from duoexp.identity import Comparison, compare
from duoexp.metrics import Decoding, Pair
from duoexp.rounds import Round
from duoexp.sampling import Sampler, gumbel
from duoexp.schedule import SCHEDULES, Stop
from duoexp.terminal import why_slower
from duoexp.tree import Draft
from duoexp.verify import Verdict, match
from duoexp.worker import Work


def round_of(tokens: int, start_s: float = 0.0, verify_s: float = 0.04, **facts: object) -> Round:
    """A round that brought so many tokens."""
    plain = {"accepted": tokens - 1, "rejected": False, "head": None, "verified": 0, "drafted": 0, "sequences": 0}
    times = {"start_s": start_s, "verify_s": verify_s, "wait_s": 0.0, "message_s": 0.0, "spans": ()}
    return Round(tokens=(7,) * tokens, **(plain | times | facts))  # type: ignore[arg-type]


def decoding_of(rounds: Sequence[Round], start_s: float = 0.0, drafted: int = 0, spans: object = ()) -> Decoding:
    ends = [each.start_s + each.verify_s for each in rounds]
    ids = tuple(token for each in rounds for token in each.tokens)
    return Decoding(ids, "length", tuple(rounds), start_s, ends[0], ends[-1], spans, drafted)  # type: ignore[arg-type]


# By hand: a draft of 4, of which 2 are accepted; one of 3, all accepted; the head of the next is not the target's; the
# head of the one after is, and so are both behind it; then nothing was drafted; then a head that is, and 1 of 3 behind.
ROUNDS = [
    round_of(3, accepted=2, rejected=True),
    round_of(4, accepted=3),
    round_of(1, head=False),
    round_of(3, head=True, accepted=2),
    round_of(1),
    round_of(2, head=True, accepted=1, rejected=True),
]
TESTS = [*(True, True, False), *(True, True, True), False, *(True, True, True), *(True, True, False)]
RUNS = [2, 3, 5]  # the second goes over two rounds, the third over three


def test_every_verified_draft_token_is_counted_once() -> None:
    assert [accepted for _, accepted in metrics.tests(ROUNDS)] == TESTS
    positions = [1, 2, 3, 1, 2, 3, 1, 1, 2, 3, 1, 2, 3]
    assert [position for position, _ in metrics.tests(ROUNDS)] == positions


def test_alpha_is_accepted_over_verified() -> None:
    assert metrics.acceptance_rate(ROUNDS) == pytest.approx(10 / 13)
    assert metrics.acceptance_rate([round_of(1)]) is None


def test_alpha_by_position_is_given_that_all_before_were_accepted() -> None:
    assert metrics.acceptance_by_position(ROUNDS) == pytest.approx([4 / 5, 4 / 4, 2 / 4])


def test_tau_is_tokens_per_pass() -> None:
    assert metrics.block_efficiency([decoding_of(ROUNDS), decoding_of([round_of(2)])]) == 16 / 7


def test_an_accepted_run_goes_over_rounds_but_not_over_answers() -> None:
    assert metrics.accepted_run([decoding_of(ROUNDS)]) == pytest.approx(sum(RUNS) / 3)
    open_end = decoding_of([round_of(4, accepted=3)])
    assert metrics.accepted_run([open_end, decoding_of(ROUNDS)]) == pytest.approx(sum(RUNS) / 3)
    assert metrics.accepted_run([open_end]) is None


def test_draft_efficiency_counts_what_was_drafted_in_vain() -> None:  # E3
    assert metrics.draft_efficiency([decoding_of(ROUNDS, drafted=40)]) == 10 / 40
    assert metrics.draft_efficiency([decoding_of([round_of(1)])]) is None


def test_sequences_are_a_histogram_over_passes() -> None:  # E3
    rounds = [round_of(1, sequences=count) for count in (0, 3, 3, 10)]
    assert metrics.sequences([decoding_of(rounds), decoding_of(rounds[:1])]) == {"0": 2, "3": 2, "10": 1}


def test_a_round_of_four_tokens_in_40_ms_is_10_ms_a_token() -> None:  # E2
    rounds = [round_of(4, start_s=1 + 0.04 * i) for i in range(10)]
    decoding = decoding_of(rounds, start_s=1)
    times = decoding.token_times_s()
    assert times == pytest.approx([0.01] * 36)
    assert metrics.median_p95(times) == pytest.approx({"median": 0.01, "p95": 0.01})
    assert metrics.tokens_per_s([decoding]) == pytest.approx(100)


def test_token_times_and_ttft_add_up_to_the_whole_time() -> None:  # E2
    sizes, starts = (1, 4, 2, 1, 3), (1.0, 1.2, 1.3, 1.5, 1.9)  # with waits between the passes
    rounds = [round_of(size, start_s=start) for size, start in zip(sizes, starts, strict=True)]
    decoding = decoding_of(rounds, start_s=0.9)
    times = decoding.token_times_s()
    assert len(times) == len(decoding.ids) - 1
    assert sum(times) + decoding.ttft_s == pytest.approx(decoding.duration_s)


def timed(seconds: float, tokens: int) -> Decoding:
    """So many tokens in so many seconds, whatever the rounds."""
    return Decoding((7,) * tokens, "length", (), 0.0, 0.0, seconds, (), 0)


def pairs_of(ratios: Sequence[float]) -> list[Pair]:
    """Prompts of different length and kind; on each the method takes 1 / ratio of the baseline's time."""
    lengths = [20 + 7 * (i % 5) for i in range(len(ratios))]
    return [
        Pair(f"p{i}", "even" if i % 2 == 0 else "odd", timed(length / 10, length), timed(length / 10 / ratio, length))
        for i, (length, ratio) in enumerate(zip(lengths, ratios, strict=True))
    ]


def test_speedup_of_autoregressive_over_itself_is_1() -> None:  # E1
    pairs = pairs_of([1.0] * 10)
    assert metrics.speedup(pairs) == 1
    assert metrics.interval(pairs) == (1, 1)


def test_speedup_is_a_ratio_of_sums_and_each_kind_has_its_own() -> None:
    pairs = pairs_of([2.0, 1.0, 2.0, 1.0])
    assert metrics.speedup_by_kind(pairs) == pytest.approx({"even": 2, "odd": 1})
    seconds = [(pair.baseline.duration_s, pair.method.duration_s) for pair in pairs]
    assert metrics.speedup(pairs) == pytest.approx(sum(a for a, _ in seconds) / sum(b for _, b in seconds))


def test_the_interval_holds_the_true_ratio_and_narrows_with_more_prompts() -> None:
    """95 % of such intervals hold it, this one among them: the seed is fixed."""
    noise = torch.randn(160, generator=torch.Generator().manual_seed(0)) * 0.3
    widths = []
    for count in (10, 40, 160):
        low, high = metrics.interval(pairs_of((1.5 * noise[:count].exp()).tolist())) or (0, 0)
        assert low < 1.5 < high
        widths.append(high - low)
    assert widths[0] > widths[1] > widths[2]
    assert widths[2] == pytest.approx(widths[0] / 4, rel=0.6)  # with the root of the count


def test_the_turns_of_a_prompt_are_one_draw() -> None:
    pairs = pairs_of([1.5, 0.9, 1.2, 1.1] * 5)
    twice = [replace(pair, prompt=pair.prompt) for pair in pairs for _ in range(2)]
    assert metrics.interval(twice) == pytest.approx(metrics.interval(pairs))
    assert metrics.interval([pairs[0], pairs[0]]) is None


def test_a_slowdown_is_explained_by_what_a_round_brings_and_takes() -> None:
    """A pass twice as long, and a wait as long as the pass of autoregressive decoding, for two tokens."""
    baseline = decoding_of([round_of(1, verify_s=9.0), *[round_of(1, start_s=9.0 + i, verify_s=1.0) for i in range(4)]])
    ours = [round_of(1, verify_s=9.0), *[round_of(2, start_s=10.0 + 3 * i, verify_s=2.0, wait_s=1.0) for i in (0, 1)]]
    pairs = [Pair("a", "kind", baseline, decoding_of(ours))]
    cost = metrics.round_cost(pairs)
    assert cost == pytest.approx({"tokens": 2, "verify": 2, "wait": 1, "predicted_speedup": 2 / 3})
    assert metrics.round_cost(pairs_of([1.0])) is None
    facts = {"round_cost": cost, "alpha": 0.5, "draft_s": {"median": 0.5}, "target_s": {"median": 1.0}, "prompts": 9}
    said = why_slower(facts | {"speedup_high": 0.9})
    assert said is not None and "2.00 tokens (alpha 0.50)" in said and "3.00 target passes" in said and "0.67" in said
    assert why_slower(facts | {"speedup_high": 1.1}) is None
    assert why_slower(facts | {"speedup_high": 0.9, "alpha": None}) is None


def test_idle_shares_are_of_the_time_of_the_answers() -> None:
    """Draft steps that reach out of an answer count only inside it."""
    rounds = [round_of(1, start_s=10.0, verify_s=1.0), round_of(1, start_s=13.0, verify_s=1.0, wait_s=2.0)]
    decoding = decoding_of(rounds, start_s=10, spans=((9.0, 10.5), (11.0, 12.0), (13.5, 20.0), (30.0, 31.0)))
    assert metrics.target_idle([decoding]) == pytest.approx(2 / 4)
    assert metrics.draft_idle([decoding]) == pytest.approx(1 - (0.5 + 1 + 0.5) / 4)


class Ticking:
    """A target whose passes take a second, a worker whose answers take two, and the clock that shows it."""

    vocabulary, context_size, now, ended = 9, 10**6, 100.0, 0

    def perf_counter(self) -> float:
        return self.now

    def logits(self, context: Sequence[int], draft: Draft = Draft(), rows: Sequence[int] | None = None) -> Tensor:
        self.now += 1
        return torch.eye(9)[[3] * (len(draft) + 1)]

    def clear(self) -> None: ...

    def ready(self) -> None: ...

    def ask(
        self,
        context: Sequence[int],
        pending: Draft,
        budget: int,
        depth: int | None = None,
        sequences: int | None = None,
    ) -> None:
        assert depth is not None
        self.question = (pending, min(budget, depth - len(pending)))

    def observe(self, draft: Draft, verdict: Verdict, logits: Tensor) -> None: ...

    def enough(self) -> None:
        self.ended += 1

    def answer(self, at_least: int | None = None) -> Draft:
        if at_least is None:
            self.now += 2
        pending, budget = self.question
        return pending.hang(pending.tip(), Draft((3,) * budget, tuple(range(-1, budget - 1))))

    def work(self) -> Work:
        return Work(tokens=5)

    def rest(self) -> Work:
        return Work()

    def close(self) -> None: ...


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rounds_book_passes_and_waits_where_they_were(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both = Ticking()
    monkeypatch.setattr("duoexp.schedule.time", both)
    rounds = list(SCHEDULES[schedule](both, both, match, Sampler(), [1], Fixed(3), Stop(frozenset(), 9)))
    # Serial: the pass tests all 3. Overlapped: the target's own token is the head, which leaves 2 for the pass.
    count, heads = (3, [None] * 3) if schedule == "serial" else (4, [None, True, True, True])
    assert [each.head for each in rounds] == heads
    assert [each.verified for each in rounds] == ([0, 3, 3] if schedule == "serial" else [0, 2, 2, 1])
    assert [each.start_s for each in rounds] == [100.0 + 3 * i for i in range(count)]
    assert [each.verify_s for each in rounds] == [1.0] * count
    assert [each.wait_s for each in rounds] == [0.0, *[2.0] * (count - 1)]
    assert [each.drafted for each in rounds] == [5] * count
    assert metrics.acceptance_rate(rounds) == 1


def test_after_a_rejection_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was drafted behind a rejected token is of no use."""
    both = Ticking()
    monkeypatch.setattr("duoexp.schedule.time", both)

    def rejected(*_: object) -> Verdict:
        return Verdict((3,), -1, rejected=True)

    rounds = list(SCHEDULES["overlapped"](both, both, rejected, Sampler(), [1], Fixed(3), Stop(frozenset(), 5)))
    assert [each.wait_s for each in rounds] == [0.0] * 5
    assert [each.head for each in rounds] == [None] * 5, "nor compared with anything"


def test_a_draft_that_ends_with_the_pass_is_ended_where_it_can_be_of_use() -> None:
    def rejected(*_: object) -> Verdict:
        return Verdict((3,), -1, rejected=True)

    for rule, ended in ((match, True), (rejected, False)):
        both = Ticking()
        list(SCHEDULES["overlapped"](both, both, rule, Sampler(), [1], Deadline(3), Stop(frozenset(), 9)))
        assert (both.ended > 0) == ended


# Identity


class Constant:
    """A target that says the same everywhere."""

    vocabulary, context_size = 4, 10**6

    def __init__(self, logits: Sequence[float], dtype: torch.dtype = torch.float32) -> None:
        self.row = torch.tensor(logits, dtype=dtype)

    def logits(self, context: Sequence[int], draft: Draft = Draft(), rows: Sequence[int] | None = None) -> Tensor:
        return self.row[None]

    def clear(self) -> None: ...


def test_equal_answers_are_equal_and_cost_no_pass() -> None:
    assert compare(None, Sampler(), [1], [2, 3], [2, 3]) == Comparison("equal")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "rival", "kind"),
    [
        ("bfloat16", 8.0, "tie"),  # exactly
        ("bfloat16", 7.96875, "tie"),  # the next number below 8
        ("bfloat16", 7.5, "different"),
        ("float32", 8.0, "tie"),
        ("float32", 7.999999, "tie"),
        ("float32", 7.96875, "different"),  # what bfloat16 cannot tell, float32 can
    ],
)
def test_answers_that_part_within_the_dtypes_rounding_part_at_a_tie(dtype: str, rival: float, kind: str) -> None:  # A8
    target = Constant([0.0, 8.0, rival, 7.0], getattr(torch, dtype))
    found = compare(target, Sampler(), [0], [1, 1, 1], [1, 2, 3])
    assert (found.kind, found.position, found.tokens) == (kind, 1, (1, 2))
    assert found.gap == pytest.approx(8 - rival, abs=1e-6)
    assert found.tolerance is not None and (found.gap <= found.tolerance) == (kind == "tie")


def test_a_third_token_is_no_side_of_a_tie() -> None:
    """Two tokens tie, but the answer holds another one."""
    assert compare(Constant([0.0, 8.0, 8.0, 7.0], torch.bfloat16), Sampler(), [0], [1], [3]).kind == "different"


def test_two_tokens_that_neither_can_win_are_no_tie() -> None:
    assert compare(Constant([9.0, 2.0, 2.0, 0.0], torch.bfloat16), Sampler(), [0], [1], [2]).kind == "different"


@pytest.mark.parametrize(("ours", "theirs"), [([1], [1, 1]), ([1, 1], [1])])
def test_an_answer_that_goes_on_where_the_other_ended_is_different(ours: list[int], theirs: list[int]) -> None:
    found = compare(Constant([0.0, 8.0, 8.0, 0.0]), Sampler(), [0], ours, theirs)
    assert (found.kind, found.position) == ("different", 1)
    assert found.tokens == ((None, 1) if len(ours) == 1 else (1, None))


@pytest.mark.parametrize(("shift", "kind"), [(0.0, "tie"), (0.01, "tie"), (0.5, "different"), (-0.5, "different")])
def test_at_a_temperature_the_tie_is_between_scores_with_their_noise(shift: float, kind: str) -> None:
    """Logits that the noise brings to the same score, and then one moved from there."""
    noise = gumbel(4, 0, 0, 1, torch.device("cpu"))
    logits = (-noise * 0.5).float()
    logits[[0, 3]] -= 9
    logits[2] += shift
    target = Constant(logits.tolist(), torch.bfloat16)
    best = Sampler(0.5).token(target.row, 1)
    found = compare(target, Sampler(0.5), [0], [best], [3 - best])
    assert found.kind == kind
    assert found.gap == pytest.approx(abs(shift), abs=0.04)


@pytest.mark.parametrize(("top_p", "kind"), [(0.766, "tie"), (0.745, "tie"), (0.7, "different"), (0.85, "different")])
def test_a_token_at_the_edge_of_top_p_may_come_and_go(top_p: float, kind: str) -> None:
    """Two likelier tokens hold 0.766 of the mass, so at a top_p like that rounding alone can let the third one in."""
    target, sampler = Constant([0.5, 0.5, 0.0, -5.0], torch.bfloat16), Sampler(1.0, top_p=top_p)
    for seed in range(999):
        scores = Sampler(1.0, seed=seed).scores(target.row, 1)
        if scores[2] - scores[:2].max() > 1:  # far from a tie of scores
            break
    best = int(scores[:2].argmax())
    found = compare(target, replace(sampler, seed=seed), [0], [best], [2])
    assert found.kind == kind
    assert found.gap is not None and found.tolerance is not None and found.gap > found.tolerance
