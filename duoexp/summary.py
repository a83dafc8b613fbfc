"""A run in one dictionary: what was measured, and for what was not, why."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from duoexp import metrics
from duoexp.identity import Comparison
from duoexp.metrics import Pair
from duoexp.tasks import Prompt


@dataclass(frozen=True)
class Answer:
    """One turn of one prompt, decoded both ways. `comparison` is None where equality is not to be expected."""

    prompt: Prompt
    turn: int
    ids: list[int]  # of the prompt
    pair: Pair
    comparison: Comparison | None


@dataclass
class Results:
    """What a run has so far. `failed`: prompts that could not be run, with the reason."""

    answers: list[Answer] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)
    peak_memory: dict[str, Any] | None = None
    draft_failure: str | None = None

    def pairs(self) -> list[Pair]:
        return [answer.pair for answer in self.answers]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The comparisons of a kind, each with the prompt that it is about."""
        return [
            {"prompt": answer.prompt.id, "turn": answer.turn} | asdict(answer.comparison)
            for answer in self.answers
            if answer.comparison is not None and answer.comparison.kind == kind
        ]


def summarize(about: dict[str, Any], results: Results, status: str) -> dict[str, Any]:
    """summary.json. A figure that is missing is null, and `reasons` says why. Times in seconds."""
    reasons: dict[str, str] = {}

    def figure(name: str, value: Any, why: str) -> dict[str, Any]:
        if value is None:
            reasons[name] = why
        return {name: value}

    pairs = results.pairs()
    found = about | {
        "status": status,
        "prompts": len(pairs),
        "failed": results.failed,
        **_identity(results, figure),
        "draft_failure": results.draft_failure,
        **figure("peak_memory_bytes", results.peak_memory, "the run ended before it was read"),
    }
    figures = _figures(pairs) if pairs else dict.fromkeys(_NAMES)
    for name, value in figures.items():
        found |= figure(name, value, _why(name, pairs))
    return found | {"reasons": reasons}


def _identity(results: Results, figure: Callable[[str, Any, str], dict[str, Any]]) -> dict[str, Any]:
    compared = [answer for answer in results.answers if answer.comparison is not None]
    ties, different = results.of("tie"), results.of("different")
    why = "no prompt was compared"
    if results.answers and not compared:
        why = "rule=rejection samples the target's distribution, not its autoregressive output"
    return {
        **figure("identical", not different if compared else None, why),
        **figure("ties", len(ties) if compared else None, why),
        "parted": ties + different,
    }


_NAMES = (
    "speedup speedup_low speedup_high speedup_by_task tokens tokens_per_s baseline_tokens baseline_tokens_per_s ttft_s "
    "baseline_ttft_s tpot_s baseline_tpot_s tau alpha alpha_by_position accepted_run draft_efficiency draft_idle "
    "target_idle sequences draft_steps draft_s target_s"
).split()


def _figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    ours, baseline = [pair.method for pair in pairs], [pair.baseline for pair in pairs]
    rounds = [each for decoding in ours for each in decoding.rounds]
    low, high = metrics.interval(pairs) or (None, None)
    spans = [end - start for decoding in ours for start, end in decoding.spans]
    passes = [each.verify_s for decoding in baseline for each in decoding.rounds[1:]]
    values = (
        metrics.speedup(pairs),
        low,
        high,
        metrics.speedup_by_kind(pairs),
        sum(len(decoding.ids) for decoding in ours),
        metrics.tokens_per_s(ours),
        sum(len(decoding.ids) for decoding in baseline),
        metrics.tokens_per_s(baseline),
        metrics.median_p95([decoding.ttft_s for decoding in ours]),
        metrics.median_p95([decoding.ttft_s for decoding in baseline]),
        metrics.median_p95([time for decoding in ours for time in decoding.token_times_s()]),
        metrics.median_p95([time for decoding in baseline for time in decoding.token_times_s()]),
        metrics.block_efficiency(ours),
        metrics.acceptance_rate(rounds),
        metrics.acceptance_by_position(rounds) or None,
        metrics.accepted_run(ours),
        metrics.draft_efficiency(ours),
        metrics.draft_idle(ours) if spans else None,
        metrics.target_idle(ours) if spans else None,
        metrics.sequences(ours),
        len(spans),
        metrics.median_p95(spans),
        metrics.median_p95(passes),
    )
    return dict(zip(_NAMES, values, strict=True))


def _why(name: str, pairs: Sequence[Pair]) -> str:
    if not pairs:
        return "no prompt was decoded"
    if name in ("speedup_low", "speedup_high"):
        return "an interval over prompts needs two of them"
    if name in ("tpot_s", "baseline_tpot_s", "target_s"):
        return "no answer has a second token"
    if name == "accepted_run":
        return "no draft token was rejected"
    return "nothing was drafted"
