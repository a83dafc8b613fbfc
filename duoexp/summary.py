"""A run in one dictionary: what was measured, and for what was not, why."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from duoexp import metrics
from duoexp.identity import Comparison
from duoexp.meters import Conditions, disturbances
from duoexp.metrics import Decoding, Pair
from duoexp.profile import Profile
from duoexp.rounds import Round
from duoexp.tasks import Prompt
from duoexp.worker import Continuing, Worker


@dataclass(frozen=True)
class Answer:
    """One turn of one prompt, decoded both ways. `comparison` is None where equality is not to be expected."""

    prompt: Prompt
    turn: int
    repeat: int
    ids: list[int]  # of the prompt
    text: str  # of the baseline, which the next turn is built on
    pair: Pair
    comparison: Comparison | None
    conditions: Conditions
    reused: bool = False  # the baseline is an earlier run's


@dataclass
class Results:
    """What a run has so far. `failed`: prompts that could not be run, with the reason."""

    answers: list[Answer] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    kernel: str | None = None  # what ran the target, for the method and its baseline alike
    peak_memory: dict[str, Any] | None = None
    budget: dict[str, Any] | None = None
    profile: Profile | None = None  # what the budget was derived from
    draft_failure: dict[str, Any] | None = None  # where and why the drafter failed, when the run went on without it
    changes: list[str] = field(default_factory=list)  # of what should have stayed as it was
    error: str | None = None  # what ended the run
    no_energy: dict[str, str] = field(default_factory=dict)  # for cpu and gpu, why it was not measured

    def note_failure(self, answer: Answer, worker: Worker) -> None:
        """Remembers the first answer after which the drafter was found dead."""
        if self.draft_failure is None and isinstance(worker, Continuing) and worker.failure is not None:
            self.draft_failure = {"prompt": answer.prompt.id, "turn": answer.turn, "reason": worker.failure}

    def pairs(self) -> list[Pair]:
        return [answer.pair for answer in self.answers]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The comparisons of a kind, each with the prompt that it is about."""
        return [
            {"prompt": answer.prompt.id, "turn": answer.turn, "repeat": answer.repeat} | asdict(answer.comparison)
            for answer in self.answers
            if answer.comparison is not None and answer.comparison.kind == kind
        ]


Pairs = Sequence[Pair]

_ALONE = "an interval over prompts needs two of them"
_SHORT = "no answer has a second token"
_UNDRAFTED = "nothing was drafted"

# Every figure: how it comes from the answers, and what it means when it doesn't.
FIGURES: dict[str, tuple[Callable[[Pairs], Any], str]] = {
    "speedup": (metrics.speedup, ""),
    "speedup_low": (lambda pairs: (metrics.interval(pairs) or (None, None))[0], _ALONE),
    "speedup_high": (lambda pairs: (metrics.interval(pairs) or (None, None))[1], _ALONE),
    "speedup_geometric_mean": (metrics.geometric_mean, ""),
    "speedup_by_task": (metrics.speedup_by_kind, ""),
    "tokens": (lambda pairs: sum(len(each.ids) for each in _ours(pairs)), ""),
    "baseline_tokens": (lambda pairs: sum(len(each.ids) for each in _baseline(pairs)), ""),
    "tokens_per_s": (lambda pairs: metrics.tokens_per_s(_ours(pairs)), ""),
    "baseline_tokens_per_s": (lambda pairs: metrics.tokens_per_s(_baseline(pairs)), ""),
    "ttft_s": (lambda pairs: metrics.median_p95([each.ttft_s for each in _ours(pairs)]), ""),
    "baseline_ttft_s": (lambda pairs: metrics.median_p95([each.ttft_s for each in _baseline(pairs)]), ""),
    "tpot_s": (lambda pairs: _per_token(_ours(pairs)), _SHORT),
    "baseline_tpot_s": (lambda pairs: _per_token(_baseline(pairs)), _SHORT),
    "tau": (lambda pairs: metrics.block_efficiency(_ours(pairs)), ""),
    "alpha": (lambda pairs: metrics.acceptance_rate(_rounds(_ours(pairs))), _UNDRAFTED),
    "alpha_by_position": (lambda pairs: metrics.acceptance_by_position(_rounds(_ours(pairs))) or None, _UNDRAFTED),
    "accepted_run": (lambda pairs: metrics.accepted_run(_ours(pairs)), "no draft token was rejected"),
    "draft_efficiency": (lambda pairs: metrics.draft_efficiency(_ours(pairs)), _UNDRAFTED),
    "draft_idle": (lambda pairs: metrics.draft_idle(_ours(pairs)) if _steps(pairs) else None, _UNDRAFTED),
    "target_idle": (lambda pairs: metrics.target_idle(_ours(pairs)) if _steps(pairs) else None, _UNDRAFTED),
    "round_cost": (metrics.round_cost, _SHORT),
    "sequences": (lambda pairs: metrics.sequences(_ours(pairs)), ""),
    "draft_steps": (lambda pairs: len(_steps(pairs)), ""),
    "draft_s": (lambda pairs: metrics.median_p95(_steps(pairs)), _UNDRAFTED),
    "target_s": (lambda pairs: metrics.median_p95(_single_passes(pairs)), _SHORT),
}


def summarize(about: dict[str, Any], results: Results, status: str) -> dict[str, Any]:
    """summary.json. A figure that is missing is null, and `reasons` says why. Times in seconds.

    draft_s is a step of the drafter, target_s a pass of the target over one token, in the autoregressive decodings.
    """
    pairs = results.pairs()
    values = _identity(results) | _by_repeat(results) | _energy(results)
    values["peak_memory_bytes"] = (results.peak_memory, "the run ended before it was read")
    for name, (figure, why) in FIGURES.items():
        values[name] = (figure(pairs), why) if pairs else (None, "no prompt was decoded")
    return about | {
        "status": status,
        "kernel": results.kernel,
        "budget": results.budget,
        "prompts": len({pair.prompt for pair in pairs}),
        "answers": len(pairs),
        "failed": results.failed,
        "draft_failure": results.draft_failure,
        "error": results.error,
        "reused_baselines": sum(answer.reused for answer in results.answers),
        "disturbed": [*disturbances([answer.conditions for answer in results.answers]), *results.changes],
        "parted": results.of("tie") + results.of("different"),
        **{name: value for name, (value, _) in values.items()},
        "reasons": {name: why for name, (value, why) in values.items() if value is None},
    }


def _identity(results: Results) -> dict[str, tuple[Any, str]]:
    compared = [answer for answer in results.answers if answer.comparison is not None]
    why = "no prompt was compared"
    if results.answers and not compared:
        why = "rule=rejection samples the target's distribution, not its autoregressive output"
    return {
        "identical": (not results.of("different") if compared else None, why),
        "ties": (len(results.of("tie")) if compared else None, why),
    }


def _by_repeat(results: Results) -> dict[str, tuple[Any, str]]:
    """The speedup of each repeat by itself, which shows how far the machine and the seed move it."""
    groups: dict[int, list[Pair]] = defaultdict(list)
    for answer in results.answers:
        groups[answer.repeat].append(answer.pair)
    found = [metrics.speedup(groups[repeat]) for repeat in sorted(groups)]
    return {"speedup_by_repeat": (found or None, "no prompt was decoded")}


def _energy(results: Results) -> dict[str, tuple[Any, str]]:
    """Joules a token of all processors and of the GPUs, method and baseline."""
    found: dict[str, tuple[Any, str]] = {}
    for part in ("cpu", "gpu"):
        why = results.no_energy.get(part, "no prompt was decoded")
        for side, decodings in (("", _ours(results.pairs())), ("baseline_", _baseline(results.pairs()))):
            value = metrics.joules_per_token(decodings, f"{part}_j") if decodings else None
            found[f"{side}{part}_joules_per_token"] = (value, why)
    return found


def _ours(pairs: Pairs) -> list[Decoding]:
    return [pair.method for pair in pairs]


def _baseline(pairs: Pairs) -> list[Decoding]:
    return [pair.baseline for pair in pairs]


def _rounds(decodings: Sequence[Decoding]) -> list[Round]:
    return [each for decoding in decodings for each in decoding.rounds]


def _per_token(decodings: Sequence[Decoding]) -> dict[str, float] | None:
    return metrics.median_p95([time for decoding in decodings for time in decoding.token_times_s()])


def _steps(pairs: Pairs) -> list[float]:
    return [end - start for decoding in _ours(pairs) for start, end in decoding.spans]


def _single_passes(pairs: Pairs) -> list[float]:
    return [each.verify_s for decoding in _baseline(pairs) for each in decoding.rounds[1:]]
