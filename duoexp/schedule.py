"""Schedules: how drafting and verifying take turns. Each yields a round as soon as its tokens are verified."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from duoexp.budget import UNASKED, Budget, Size
from duoexp.lm.causal_lm import CausalLM
from duoexp.rounds import Round
from duoexp.sampling import Sampler
from duoexp.tree import Draft
from duoexp.verify import Rule, Verdict
from duoexp.worker import Work, Worker


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


Schedule = Callable[[CausalLM, Worker, Rule, Sampler, Sequence[int], Budget, Stop], Iterator[Round]]


def serial(
    target: CausalLM, worker: Worker, rule: Rule, sampler: Sampler, prompt: Sequence[int], budget: Budget, stop: Stop
) -> Iterator[Round]:
    """Draft, then verify, in turn (Leviathan et al. 2211.17192). The first token comes from the prompt alone."""
    context, pending, arrival = list(prompt), Draft(), _Arrival(size=Size(0, "the prompt"))
    while True:
        start = time.perf_counter()
        logits = target.logits(context, pending)
        verdict = rule(pending, logits, sampler, len(context))
        arrival = replace(arrival, rank=_rank(pending, -1, verdict))
        yield _round(stop, verdict, pending, arrival, start, worker.work())
        if stop.reason:
            return
        context += verdict.tokens
        start = time.perf_counter()
        worker.observe(pending, verdict, logits)
        size = budget.choose(0, stop.left - 1)
        worker.ask(context, Draft(), size.tokens, stop.left - 1, size.sequences)
        pending = worker.answer()
        arrival = _Arrival(size, sequences=len(pending.leaves()), wait_s=time.perf_counter() - start)


def overlapped(
    target: CausalLM,
    worker: Worker,
    rule: Rule,
    sampler: Sampler,
    prompt: Sequence[int],
    budget: Budget,
    stop: Stop,
    pre_verify: bool = True,
    post_verify: bool = True,
) -> Iterator[Round]:
    """Draft and verify at the same time (PEARL 2408.11850; DuoDecoding 2503.00784).

    While the target verifies `pending`, the drafter runs ahead of it; the target's own token then selects the sequence
    that begins with it. After a rejection nothing that was drafted ahead can be of use, so nothing is waited for.

    PEARL's two halves, each of which its ablation leaves out. pre_verify: where nothing is pending, the target decides
    the next token while a draft that begins with it is made; without it, the draft is made first and verified whole.
    post_verify: the drafter runs ahead of a draft under verification; without it, it waits for the verdict.
    """
    context, pending, arrival = list(prompt), Draft(), _Arrival()
    while True:
        ahead_now = post_verify if pending else pre_verify
        size = budget.choose(len(pending), stop.left - 1 - len(pending)) if ahead_now else Size(0, "ablated")
        worker.ask(context, pending, size.tokens, stop.left - 1, size.sequences)
        start = time.perf_counter()
        logits = target.logits(context, pending)
        verdict = rule(pending, logits, sampler, len(context))
        yield _round(stop, verdict, pending, replace(arrival, size=size), start, worker.work())
        if stop.reason:
            return
        context += verdict.tokens
        start = time.perf_counter()
        if not size.waits and not verdict.rejected:
            worker.enough()
        ahead = worker.answer(0 if verdict.rejected else None)
        arrival = _arrival(ahead, pending, verdict, time.perf_counter() - start)
        worker.observe(pending, verdict, logits)
        pending = ahead.after(verdict.tokens)
        if not pending and not pre_verify:
            size = budget.choose(0, stop.left - 1)
            worker.ask(context, pending, size.tokens, stop.left - 1, size.sequences)
            pending = worker.answer()
            arrival = _Arrival(sequences=len(pending.leaves()), wait_s=time.perf_counter() - start)


SCHEDULES: dict[str, Schedule] = {"serial": serial, "overlapped": overlapped}


@dataclass(frozen=True)
class _Arrival:
    """What a draft was asked for, and how it came to a pass: see `Round`."""

    size: Size = UNASKED
    head: bool | None = None
    rank: int | None = None
    sequences: int = 0
    wait_s: float = 0.0


def _arrival(ahead: Draft, pending: Draft, verdict: Verdict, wait_s: float) -> _Arrival:
    """After a rejection nothing that was drafted ahead is compared with anything."""
    sequences = 0 if verdict.rejected else sum(leaf >= len(pending) for leaf in ahead.leaves())
    if not sequences:
        return _Arrival(wait_s=wait_s)
    rank = _rank(ahead, verdict.node, verdict)
    return _Arrival(head=rank is not None, rank=rank, sequences=sequences, wait_s=wait_s)


def _rank(draft: Draft, node: int, verdict: Verdict) -> int | None:
    """Which child of `node` holds the token that the verdict has there."""
    children, token = draft.children(node), verdict.tokens[len(draft.path(node))]
    return next((rank for rank, child in enumerate(children) if draft.tokens[child] == token), None)


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
        rank=arrival.rank,
        budget=arrival.size.tokens,
        why=arrival.size.why,
    )
