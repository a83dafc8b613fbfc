"""Schedules: how drafting and verifying take turns. Each yields a round as soon as its tokens are verified."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from duoexp.lm.causal_lm import CausalLM
from duoexp.sampling import Sampler
from duoexp.tree import Draft
from duoexp.verify import Rule, Verdict
from duoexp.worker import Span, Work, Worker


@dataclass(frozen=True)
class Round:
    """What one target pass brought, and where the time went. Times in seconds, starts on the clock of `perf_counter`.

    A draft position is tested in one of two places. The first of a sequence that was drafted behind an unverified block
    is compared with the target's token as soon as the block stands (`head`); all others are tested by the pass.
    """

    tokens: tuple[int, ...]  # accepted draft tokens and one of the target's own, as far as the answer goes
    accepted: int  # draft tokens that the pass accepted
    rejected: bool  # it rejected one behind them
    head: bool | None  # whether a first token was the target's; None where none was compared
    verified: int  # nodes of the draft that the pass verified
    drafted: int  # nodes that were drafted since the last pass began, used or not
    sequences: int  # draft sequences that arrived for this pass; 0: none
    start_s: float  # of the pass
    verify_s: float
    wait_s: float  # how long the target waited for the draft before the pass
    message_s: float  # the part of the wait that an answer was on its way
    spans: tuple[Span, ...]  # the draft steps that became known before the pass


class Stop:
    """When an answer ends: at an EOS, at a length, or where `ends` finds a stop string in the new ids."""

    def __init__(self, eos: frozenset[int], length: int, ends: Callable[[list[int]], bool] | None = None) -> None:
        self.eos, self.left, self.ends = eos, length, ends
        self.reason: str | None = None
        self._answer: list[int] = []

    def keep(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The tokens up to and including the one that ends the answer."""
        for count, token in enumerate(tokens, start=1):
            self._answer.append(token)
            self.left -= 1
            self.reason = self._why(token)
            if self.reason:
                return tuple(tokens[:count])
        return tuple(tokens)

    def _why(self, token: int) -> str | None:
        if token in self.eos:
            return "eos"
        if self.ends is not None and self.ends(self._answer):
            return "stop"
        return None if self.left > 0 else "length"


Schedule = Callable[[CausalLM, Worker, Rule, Sampler, Sequence[int], int, Stop], Iterator[Round]]


def serial(
    target: CausalLM, worker: Worker, rule: Rule, sampler: Sampler, prompt: Sequence[int], budget: int, stop: Stop
) -> Iterator[Round]:
    """Draft, then verify, in turn (Leviathan et al. 2211.17192). The first token comes from the prompt alone."""
    context, pending, wait_s = list(prompt), Draft(), 0.0
    while True:
        start = time.perf_counter()
        logits = target.logits(context, pending)
        verdict = rule(pending, logits, sampler, len(context))
        yield _round(stop, verdict, pending, _Arrival(None, len(pending.leaves()), wait_s), start, worker.work())
        if stop.reason:
            return
        context += verdict.tokens
        start = time.perf_counter()
        worker.observe(pending, verdict, logits)
        worker.ask(context, Draft(), budget, stop.left - 1)
        pending = worker.answer()
        wait_s = time.perf_counter() - start


def overlapped(
    target: CausalLM, worker: Worker, rule: Rule, sampler: Sampler, prompt: Sequence[int], budget: int, stop: Stop
) -> Iterator[Round]:
    """Draft and verify at the same time (PEARL 2408.11850; DuoDecoding 2503.00784).

    While the target verifies `pending`, the drafter runs ahead of it; the target's own token then selects the sequence
    that begins with it. After a rejection nothing that was drafted ahead can be of use, so nothing is waited for.
    """
    context, pending, arrival = list(prompt), Draft(), _Arrival()
    while True:
        worker.ask(context, pending, budget, stop.left - 1)
        start = time.perf_counter()
        logits = target.logits(context, pending)
        verdict = rule(pending, logits, sampler, len(context))
        yield _round(stop, verdict, pending, arrival, start, worker.work())
        if stop.reason:
            return
        context += verdict.tokens
        start = time.perf_counter()
        ahead = worker.answer(at_least=0 if verdict.rejected else None)
        arrival = _arrival(ahead, len(pending), verdict, time.perf_counter() - start)
        worker.observe(pending, verdict, logits)
        pending = ahead.after(verdict.tokens)


SCHEDULES: dict[str, Schedule] = {"serial": serial, "overlapped": overlapped}


@dataclass(frozen=True)
class _Arrival:
    """How a draft came to a pass: see `Round`."""

    head: bool | None = None
    sequences: int = 0
    wait_s: float = 0.0


def _arrival(ahead: Draft, pending: int, verdict: Verdict, wait_s: float) -> _Arrival:
    """After a rejection nothing that was drafted ahead is compared with anything."""
    sequences = 0 if verdict.rejected else sum(leaf >= pending for leaf in ahead.leaves())
    return _Arrival(ahead.find(verdict.tokens) is not None if sequences else None, sequences, wait_s)


def _round(stop: Stop, verdict: Verdict, pending: Draft, arrival: _Arrival, start: float, work: Work) -> Round:
    verify_s = time.perf_counter() - start
    tokens = stop.keep(verdict.tokens)
    whole = len(tokens) == len(verdict.tokens)
    return Round(
        tokens=tokens,
        accepted=min(verdict.accepted, len(tokens)),
        rejected=verdict.rejected and whole,
        head=arrival.head,
        verified=len(pending),
        drafted=work.tokens,
        sequences=arrival.sequences,
        start_s=start,
        verify_s=verify_s,
        wait_s=arrival.wait_s,
        message_s=work.message_s,
        spans=tuple(work.spans),
    )
