"""From rounds to rates. Facts are counted where they happen; every rate is derived here."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from duoexp.rounds import Round, tests
from duoexp.worker import Span


@dataclass(frozen=True)
class Decoding:
    """One answer. Times in seconds on the clock of `perf_counter`, read after the tokens were on the host."""

    ids: tuple[int, ...]  # verified, up to and including EOS
    reason: str  # why it ended: eos, length, stop
    rounds: tuple[Round, ...]
    start_s: float
    first_s: float  # when the first verified token was out
    end_s: float
    spans: tuple[Span, ...]  # every draft step, used or not
    draft_tokens: int  # drafted, used or not
    cpu_j: float | None = None  # energy that all processors drew meanwhile
    gpu_j: float | None = None

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.start_s

    def token_times_s(self) -> list[float]:
        """The time of each token after the first; the tokens of a round share its time evenly."""
        ends = [round.start_s + round.verify_s for round in self.rounds]
        return [
            (end - before) / len(round.tokens)
            for round, before, end in zip(self.rounds[1:], ends, ends[1:], strict=False)
            for _ in round.tokens
        ]


@dataclass(frozen=True)
class Pair:
    """One turn of a prompt, decoded autoregressively and with the method on the same target."""

    prompt: str  # its id
    kind: str
    baseline: Decoding
    method: Decoding


def tokens_per_s(decodings: Sequence[Decoding]) -> float:
    return sum(len(each.ids) for each in decodings) / sum(each.duration_s for each in decodings)


def speedup(pairs: Sequence[Pair]) -> float:
    """Walltime speedup: tokens per second over those of autoregressive decoding."""
    return tokens_per_s([pair.method for pair in pairs]) / tokens_per_s([pair.baseline for pair in pairs])


FEW = 5  # prompts: an interval over fewer says more about the prompts than about the method


def interval(pairs: Sequence[Pair]) -> tuple[float, float] | None:
    """95% interval of the speedup: a paired bootstrap over prompts (percentiles). None for fewer than two prompts."""
    facts = np.array(list(facts_by_prompt(pairs).values()))
    if len(facts) < 2:
        return None
    tokens, seconds, base_tokens, base_seconds = facts[resampled(len(facts))].sum(axis=1).T
    low, high = np.percentile(tokens / seconds * base_seconds / base_tokens, [2.5, 97.5])
    return float(low), float(high)


def facts_by_prompt(pairs: Iterable[Pair]) -> dict[str, np.ndarray]:
    """What a bootstrap draws: tokens and seconds of the method, then of its baseline.

    The turns of a prompt depend on each other, so they are drawn together.
    """
    facts: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(4))
    for pair in pairs:
        ours, baseline = pair.method, pair.baseline
        facts[pair.prompt] += (len(ours.ids), ours.duration_s, len(baseline.ids), baseline.duration_s)
    return facts


def resampled(prompts: int, resamples: int = 10_000) -> np.ndarray:
    """Indices of prompts drawn with replacement, [resamples, prompts]: always the same, so that figures repeat."""
    return np.random.default_rng(0).integers(prompts, size=(resamples, prompts))


def geometric_mean(pairs: Sequence[Pair]) -> float:
    """The geometric mean of the speedups of the prompts, which weighs each alike, long or short."""
    tokens, seconds, base_tokens, base_seconds = np.array(list(facts_by_prompt(pairs).values())).T
    return float(np.exp(np.mean(np.log(tokens / seconds * base_seconds / base_tokens))))


def in_words(speedup: float, between: tuple[float, float] | None) -> str:
    """The speedup, unless its interval includes 1."""
    return "no difference" if between is not None and between[0] <= 1 <= between[1] else f"{speedup:.2f}"


def joules_per_token(decodings: Sequence[Decoding], of: str) -> float | None:
    """of: cpu_j or gpu_j. None where the machine did not tell of every answer."""
    drawn = [getattr(each, of) for each in decodings]
    return None if None in drawn else sum(drawn) / sum(len(each.ids) for each in decodings)


def speedup_by_kind(pairs: Iterable[Pair]) -> dict[str, float]:
    by_kind = defaultdict(list)
    for pair in pairs:
        by_kind[pair.kind].append(pair)
    return {kind: speedup(group) for kind, group in by_kind.items()}


def acceptance_rate(rounds: Iterable[Round]) -> float | None:
    """alpha: the chance that a verified draft token is accepted."""
    return _mean([accepted for _, accepted in tests(rounds)])


def acceptance_by_position(rounds: Iterable[Round]) -> list[float]:
    """alpha at position 1, 2, ... of a sequence, given that all before it were accepted."""
    return [accepted / tested for accepted, tested in tests_by_position(rounds).values()]


def tests_by_position(rounds: Iterable[Round]) -> dict[int, tuple[int, int]]:
    """Position in a sequence, from 1 -> how many draft tokens were accepted there, of how many that were verified."""
    verified = tests(rounds)
    tested = Counter(position for position, _ in verified)
    accepted = Counter(position for position, kept in verified if kept)
    return {position: (accepted[position], tested[position]) for position in sorted(tested)}


def accepted_run(decodings: Iterable[Decoding]) -> float | None:
    """M: accepted draft tokens between two rejections, over several rounds; None without a rejection."""
    runs = []
    for decoding in decodings:
        run = 0
        for _, accepted in tests(decoding.rounds):
            run += accepted
            if not accepted:
                runs.append(run)
                run = 0
    return _mean(runs)


def draft_efficiency(decodings: Sequence[Decoding]) -> float | None:
    """Accepted over drafted, with all that was drafted in vain."""
    drafted = sum(each.draft_tokens for each in decodings)
    accepted = sum(accepted for each in decodings for _, accepted in tests(each.rounds))
    return accepted / drafted if drafted else None


def block_efficiency(decodings: Sequence[Decoding]) -> float:
    """tau: new tokens per target pass."""
    return sum(len(each.ids) for each in decodings) / sum(len(each.rounds) for each in decodings)


def round_cost(pairs: Sequence[Pair]) -> dict[str, float] | None:
    """What a round behind the first brings and takes: tokens; the time to verify and to wait for the draft, in target
    passes over one token; and the speedup that these predict, as in Leviathan et al. 2211.17192, theorem 3.8.
    """
    rounds = [each for pair in pairs for each in pair.method.rounds[1:]]
    passes = [each.verify_s for pair in pairs for each in pair.baseline.rounds[1:]]
    if not rounds or not passes:
        return None
    tokens, verify_s, wait_s = np.mean([(len(each.tokens), each.verify_s, each.wait_s) for each in rounds], axis=0)
    verify, wait = float(verify_s / np.mean(passes)), float(wait_s / np.mean(passes))
    return {
        "tokens": float(tokens),
        "verify": verify,
        "wait": wait,
        "predicted_speedup": float(tokens) / (verify + wait),
    }


def target_idle(decodings: Sequence[Decoding]) -> float:
    """The share of the time in which the target waited for the draft."""
    waited = sum(round.wait_s for each in decodings for round in each.rounds)
    return waited / sum(each.duration_s for each in decodings)


def draft_idle(decodings: Sequence[Decoding]) -> float:
    """The share of the time in which the drafter drafted nothing."""
    busy = sum(
        max(0.0, min(end, each.end_s) - max(start, each.start_s)) for each in decodings for start, end in each.spans
    )
    return 1 - busy / sum(each.duration_s for each in decodings)


def sequences(decodings: Iterable[Decoding]) -> dict[str, int]:
    """How many target passes had so many draft sequences; 0 counts the passes without a draft."""
    counts = Counter(round.sequences for each in decodings for round in each.rounds)
    return {str(count): counts[count] for count in sorted(counts)}


def median_p95(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    median, p95 = np.percentile(values, [50, 95])
    return {"median": float(median), "p95": float(p95)}


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
