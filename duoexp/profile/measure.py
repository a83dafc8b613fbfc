"""The stopwatch: passes of both models, in the places and beside the work that a run has them."""

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from duoexp.lm.causal_lm import CausalLM
from duoexp.profile.tables import PASSES, PREFILLS, Profile, Timing
from duoexp.tree import Draft
from duoexp.worker import Worker

FEWEST, PATIENCE_S = 3, 5.0  # so many samples at least; no further ones after so many seconds
STEPS = 5  # draft passes of a question: the first has one row, whatever the number of sequences
LONG = 64  # passes of a question that outlasts any target pass


@dataclass(frozen=True)
class Want:
    """What is to be known. beside: with the other side at work, as in an overlapped schedule."""

    beside: bool
    contexts: Sequence[int]
    widths: Sequence[int]  # tokens of a target pass
    sequences: Sequence[int]  # of a draft pass; none: there is no draft model
    prefill: bool = False

    def places(self, context: int) -> Iterator[tuple[str, bool, int, int]]:
        drafts = bool(self.sequences)
        for side, widths in zip(PASSES, (self.widths, self.sequences), strict=True):
            yield from ((side, self.beside, context, width) for width in widths)
        if drafts:
            yield "message", False, context, 1
        if self.prefill:
            yield from ((side, False, context, 1) for side in PREFILLS[: 1 + drafts])


def measure(target: CausalLM, worker: Worker, vocabulary: int, repeats: int, want: Want, profile: Profile) -> bool:
    """Adds to `profile` what it lacks of `want`, and says whether that was anything.

    vocabulary: ids below it are known to both models. Widths take turns, so that a disturbance falls on all of them.
    """
    bench, measured = _Bench(target, worker, vocabulary, want.beside), False
    for context in want.contexts:
        lacking = [place for place in want.places(context) if place not in profile.timings]
        for place, seconds in _sampled(bench, lacking, repeats).items():
            if seconds:  # else the drafter has nothing to say
                profile.add(Timing.of(*place, seconds))
            measured = True
    target.clear()
    worker.rest()
    return measured


Place = tuple[str, bool, int, int]


def _sampled(bench: "_Bench", places: Iterable[Place], repeats: int) -> dict[Place, list[float]]:
    """Samples of each; those of the first turn are dropped, as caches and pools fill then."""
    found: dict[Place, list[float]] = {place: [] for place in places}
    begun = time.perf_counter()
    for turn in range(repeats + 1):
        for place, seconds in found.items():
            samples = bench.sample(*place)
            seconds += samples if turn else []
        if turn >= FEWEST and time.perf_counter() - begun > PATIENCE_S:
            break
    return found


class _Bench:
    def __init__(self, target: CausalLM, worker: Worker, vocabulary: int, beside: bool) -> None:
        self.target, self.worker, self.beside = target, worker, beside
        self._ids = random.Random(0)
        self._vocabulary, self._texts = vocabulary, dict[int, list[int]]()

    def sample(self, side: str, beside: bool, context: int, width: int) -> list[float]:
        text = self._texts.setdefault(context, [self._ids.randrange(self._vocabulary) for _ in range(context)])
        if side == "target":
            return [self._beside(text, width, 1)[0] if beside else self._pass(text, width)]
        if side == "draft":
            return (self._beside(text, 1, width)[1] if beside else []) or self._draft(text, width)
        if side == "message":
            return [self._message(text)]
        return [self._target_prefill(text) if side == "target_prefill" else self._draft_prefill(text)]

    def _pass(self, text: list[int], width: int) -> float:
        """The last token of the context and a chain behind it, until the target's own tokens are on the host."""
        chain = Draft(tuple(text[: width - 1]), tuple(range(-1, width - 2)))
        begun = time.perf_counter()
        self.target.logits(text, chain).float().argmax(-1).tolist()
        return time.perf_counter() - begun

    def _beside(self, text: list[int], width: int, sequences: int) -> tuple[float, list[float]]:
        """A target pass, and the draft passes that began while it ran, of those with so many sequences."""
        self.worker.work()
        self.worker.ask(text, Draft(), sequences * LONG, sequences=sequences)
        begun = time.perf_counter()
        seconds = self._pass(text, width)
        self.worker.ask(text, Draft(), 1)  # ends the long one
        self.worker.answer()
        spans = self.worker.work().spans[1:-1]
        return seconds, [end - start for start, end in spans if start < begun + seconds]

    def _draft(self, text: list[int], sequences: int) -> list[float]:
        self.worker.work()
        self.worker.ask(text, Draft(), sequences * STEPS, sequences=sequences)
        self.worker.answer()
        return [end - start for start, end in self.worker.work().spans[1:]]

    def _message(self, text: list[int]) -> float:
        """A question and its answer, but for the pass between them."""
        self.worker.work()
        begun = time.perf_counter()
        self.worker.ask(text, Draft(), 1)
        self.worker.answer()
        whole = time.perf_counter() - begun
        return max(0.0, whole - sum(end - start for start, end in self.worker.work().spans))

    def _target_prefill(self, text: list[int]) -> float:
        self.target.clear()
        return self._pass(text, 1)

    def _draft_prefill(self, text: list[int]) -> float:
        self.worker.rest()
        self.worker.ask(text, Draft(), 1)
        self.worker.answer()
        return sum(end - start for start, end in self.worker.work().spans)
