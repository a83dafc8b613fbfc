"""A draft process that dies, hangs, dawdles or talks nonsense never changes what is said, and is told of.

Each is tried on both schedules. More on a worker's failures is in test_worker.py.
"""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from duoexp import worker as workers
from duoexp.budget import Deadline, Fixed
from duoexp.drafters import Drafter
from duoexp.sampling import Sampler
from duoexp.schedule import SCHEDULES, Stop
from duoexp.tree import Draft
from duoexp.verify import match
from duoexp.worker import Continuing, Inline, Process, Worker

IDS = 1000
BUDGET = 4

# What the drafter does at its first question of a prompt, and what is said of it; None: that is no failure.
PROPOSALS = {
    "none": None,
    "slow": None,
    "an id beyond the vocabulary": "id 1000, but the vocabulary has 1000 ids",
    "a negative id": "id -1, but the vocabulary has 1000 ids",
    "too many": "6 tokens, but 4 were asked for",
    "a node behind none": "no tree: tokens (7,) behind nodes",
    "a node behind itself": "no tree: tokens (7,) behind nodes",
    "a node without a parent": "no tree: tokens (7,) behind nodes ()",
}
MESSAGES = {
    "an answer to an older question": None,
    "an answer to a question not yet asked": None,
    "no answer": "sent what is no answer (42)",
    "no pickle": "sent what is no answer (",
}
FATAL = {
    "no draft at all": "the drafter raised in its process",
    "killed": "ended by itself with exit code -9",
    "stopped": "did nothing for 0.2 s and was ended; it was stopped",
    "asleep": "did nothing for 0.2 s and was ended; it was sleeping",
}
KINDS = [*PROPOSALS, *MESSAGES, *FATAL]
FIRST = 100  # of the ids that tell a drafter how to behave


class Counting:
    """A target whose text goes on by one, and where a drafter can be right."""

    vocabulary, context_size = IDS, 10**6

    def logits(self, context: Sequence[int], draft: Draft = Draft(), rows: Sequence[int] | None = None) -> Tensor:
        return torch.eye(IDS)[[(token + 1) % IDS for token in (context[-1], *draft.tokens)]]

    def clear(self) -> None:
        pass


class Unruly(Drafter):
    """Drafts as the target speaks, and at its third question as the prompt's first id says."""

    questions = 0
    pipe: Any = None  # to the target's process, if this is another

    def propose(self, context: Sequence[int], pending: Draft, budget: int, depth: int | None = None) -> Iterator[Draft]:
        self.questions += 1
        kind = KINDS[context[0] - FIRST] if self.questions >= 3 else "well"
        if self.pipe is not None:
            misbehave(kind, self.pipe)
        if (kind in PROPOSALS and kind != "slow") or kind == "no draft at all":
            yield from proposed(kind, pending, budget)
            return
        last = (context[-1], *pending.tokens)[pending.tip() + 1]
        draft, tip = pending, pending.tip()
        for step in range(min(budget, (depth or budget) - pending.depth(tip))):
            if kind == "slow":
                time.sleep(0.01)
            draft, tip = draft.grow(tip, [(last + step + 1) % IDS]), len(draft)
            yield draft

    def clear(self) -> None:
        self.questions = 0


def proposed(kind: str, pending: Draft, budget: int) -> Iterator[Any]:
    tip, count = pending.tip(), len(pending)
    if kind.endswith(("vocabulary", "negative id")):
        yield pending.grow(tip, [IDS if kind.endswith("vocabulary") else -1])
    if kind == "too many":
        yield pending.grow(tip, range(7, 7 + budget + 2))
    if kind.startswith("a node"):
        parents = {"a node behind none": (count + 9,), "a node behind itself": (count,)}.get(kind, ())
        yield replace(pending, tokens=(*pending.tokens, 7), parents=(*pending.parents, *parents))
    if kind == "no draft at all":
        yield "garbage"


def misbehave(kind: str, pipe: Connection) -> None:
    """Sends what its worker does not know of, or ends it."""
    if kind.startswith("an answer"):
        question = 1 if "older" in kind else 10**6
        pipe.send(workers._Answer(question, Draft((9, 9), (-1, 0)), (), last=True, sent=time.perf_counter()))
    elif kind == "no answer":
        pipe.send(42)
    elif kind == "no pickle":
        pipe.send_bytes(b"this is no pickle")
    elif kind in ("killed", "stopped"):
        os.kill(os.getpid(), signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
    elif kind == "asleep":
        time.sleep(3600)


class Kept:
    """A worker that outlives its failures, so that the next test need not start another process."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)

    def ready(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, Process]]:
    """One for all that it survives, and one for each that it does not. Forked: a spawned one takes seconds to start."""
    with pytest.MonkeyPatch.context() as patch:
        context, answer_all = multiprocessing.get_context("fork"), workers._answer_all

        def with_pipe(pipe: Connection, drafter: Any) -> None:
            drafter.pipe = pipe
            answer_all(pipe, drafter)

        patch.setattr(workers.multiprocessing, "get_context", lambda _: context)
        patch.setattr(workers, "_answer_all", with_pipe)
        found = {kind: Process(Unruly, contextlib.nullcontext, IDS) for kind in ("", *FATAL)}
        found["busy"] = Process(busy, contextlib.nullcontext, IDS)
    found[""].ready()
    yield found
    for each in found.values():
        each.close()


def busy() -> Drafter:
    end = time.process_time() + 1.5
    while time.process_time() < end:
        pass
    return Drafter()


def answered(worker: Worker, kind: str, schedule: str, budget: Fixed | Deadline) -> tuple[list[int], Continuing]:
    """What was said after a prompt that asks for this kind of fault."""
    continuing = Continuing(worker)
    continuing.ready()
    prompt, stop = [FIRST + KINDS.index(kind), 1], Stop(frozenset(), 30)
    rounds = SCHEDULES[schedule](Counting(), continuing, match, Sampler(), prompt, budget, stop)
    text = [token for each in rounds for token in each.tokens]
    continuing.rest()
    return text, continuing


def check(continuing: Continuing, told: str | None) -> None:
    if told is None:
        assert continuing.failure is None
    else:
        assert continuing.failure is not None and told in continuing.failure


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", PROPOSALS)
def test_a_wrong_proposal_is_told_and_not_used(kind: str, schedule: str, processes: dict[str, Process]) -> None:
    for worker in (Inline(Unruly(), IDS), Kept(processes[""])):
        text, continuing = answered(worker, kind, schedule, Fixed(BUDGET))  # type: ignore[arg-type]
        assert text == list(range(2, 32))
        check(continuing, PROPOSALS[kind])
        worker.rest()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", MESSAGES)
def test_a_wrong_message_is_told_and_not_used(kind: str, schedule: str, processes: dict[str, Process]) -> None:
    text, continuing = answered(Kept(processes[""]), kind, schedule, Fixed(BUDGET))  # type: ignore[arg-type]
    assert text == list(range(2, 32))
    check(continuing, MESSAGES[kind])
    processes[""].rest()


@pytest.mark.parametrize("kind", FATAL)
def test_a_process_that_is_lost_is_told_and_leaves_nothing(
    kind: str, processes: dict[str, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "LOOK_S", 0.05)
    monkeypatch.setattr(workers, "QUIET_LOOKS", 4)
    pid = processes[kind].pid
    text, continuing = answered(processes[kind], kind, "overlapped", Fixed(BUDGET))
    assert text == list(range(2, 32))
    check(continuing, FATAL[kind])
    assert pid is not None and not psutil.pid_exists(pid)


def test_a_slow_draft_holds_no_target_up_that_need_not_wait(processes: dict[str, Process]) -> None:
    text, continuing = answered(Kept(processes[""]), "slow", "overlapped", Deadline(BUDGET))  # type: ignore[arg-type]
    assert text == list(range(2, 32))
    check(continuing, None)


def test_a_busy_process_is_not_taken_for_one_that_hangs(
    processes: dict[str, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "LOOK_S", 0.01)
    monkeypatch.setattr(workers, "QUIET_LOOKS", 40)
    processes["busy"].ready()
