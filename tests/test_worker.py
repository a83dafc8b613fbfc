"""The drafter's process: its answers, their order, its failures, and what it costs the parent.

No order of events is left to a clock: a drafter stops at gates, which are files.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from duoexp.budget import Fixed
from duoexp.drafters import Drafter
from duoexp.sampling import Sampler
from duoexp.schedule import SCHEDULES, Stop
from duoexp.tree import Draft
from duoexp.verify import Verdict, match
from duoexp.worker import Continuing, DraftFailed, Inline, Process, Work, Worker

PATIENCE_S = 60  # far beyond what any step takes; a test that needs it fails

EXITS, RAISES, STRANGE, SAMPLED = 900, 901, 902, 903  # a context that begins so makes the drafter behave so


class Gated(Drafter):
    """Says what it has read: each token is the sum of the context, plus the step. Waits at each step's gate."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def propose(self, context: Sequence[int], pending: Draft, budget: int, depth: int | None = None) -> Iterator[Draft]:
        if context[0] == EXITS:
            os._exit(3)
        if context[0] == RAISES:
            raise ValueError("the drafter's own fault")
        draft, tip = pending, pending.tip()
        for step in range(budget):
            self.pass_gate(context[0], step)
            q = torch.eye(1000)[step] if context[0] == SAMPLED else None
            token = 1000 if context[0] == STRANGE else said(context, step)
            draft, tip = draft.grow(tip, [token], q), len(draft)
            yield draft

    def pass_gate(self, question: int, step: int) -> None:
        (self.folder / f"reached-{question}-{step}").touch()
        gates = [self.folder / f"shut-{question}", self.folder / f"shut-{question}-{step}"]
        wait_for(lambda: not any(gate.exists() for gate in gates))

    def clear(self) -> None:
        (self.folder / "cleared").touch()


def said(context: Sequence[int], step: int) -> int:
    return (sum(context) + step) % 1000


def wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, Path]]:
    folder = tmp_path_factory.mktemp("gates")
    worker = Process(partial(Gated, folder), contextlib.nullcontext, 1000)
    worker.ready()
    yield worker, folder
    for gate in folder.glob("shut-*"):
        gate.unlink()
    worker.close()


@pytest.fixture
def gates(shared: tuple[Process, Path]) -> Path:
    for file in shared[1].iterdir():
        file.unlink()
    return shared[1]


@pytest.fixture
def worker(shared: tuple[Process, Path], gates: Path) -> Iterator[Process]:
    yield shared[0]
    for gate in gates.glob("shut-*"):
        gate.unlink()
    shared[0].rest()


def fresh(tmp_path: Path) -> Process:
    return Process(partial(Gated, tmp_path), contextlib.nullcontext, 1000)


class Counting:
    """A target whose text goes 1, 2, 3 ..., which the drafter never guesses."""

    vocabulary, context_size = 1000, 10**6

    def logits(self, context: Sequence[int], draft: Draft = Draft(), rows: Sequence[int] | None = None) -> torch.Tensor:
        return torch.eye(1000)[[(token + 1) % 1000 for token in (context[-1], *draft.tokens)]]

    def clear(self) -> None:
        pass


def test_it_answers_what_an_inline_drafter_answers(worker: Process, gates: Path) -> None:
    """Over questions that go on, begin anew, share a beginning, and come with a draft under way."""
    inline = Inline(Gated(gates), 1000)
    pending = Draft((5, 6, 7), (-1, 0, -1))
    for context in ([1, 2], [1, 2, 3, 4], [1, 2, 9], [1], [8, 8, 8], [1, 2, 3, 4]):
        for draft in (Draft(), pending):
            for each in (worker, inline):
                each.ask(context, draft, 3)
            answers = [each.answer() for each in (worker, inline)]
            assert answers[0] == answers[1] and len(answers[0]) == len(draft) + 3
            assert worker.work().tokens == inline.work().tokens == 3


def test_an_answer_has_as_much_as_was_asked_for(worker: Process, gates: Path) -> None:
    (gates / "shut-1-2").touch()
    worker.ask([1], Draft(), 4)
    assert worker.answer(at_least=2).tokens == (1, 2)
    (gates / "shut-1-2").unlink()
    assert worker.answer().tokens == (1, 2, 3, 4)
    worker.ask([1], Draft(), 0)
    assert worker.answer() == Draft()


@pytest.mark.parametrize("question", (1, SAMPLED))
def test_what_is_enough_ends_with_the_step_under_way(question: int, worker: Process, gates: Path) -> None:
    (gates / f"shut-{question}-2").touch()
    worker.ask([question], Draft(), 5)
    wait_for(lambda: (gates / f"reached-{question}-2").exists())
    worker.enough()
    (gates / f"shut-{question}-2").unlink()
    draft = worker.answer()
    assert draft.tokens == tuple(said([question], step) for step in range(3))
    assert (draft.probs is not None) == (question == SAMPLED)
    work = worker.work()
    assert (work.tokens, len(work.spans)) == (3, 3)
    assert not (gates / f"reached-{question}-3").exists()


def test_the_first_step_of_a_draft_is_not_waited_for_once_it_is_enough(worker: Process, gates: Path) -> None:
    (gates / "shut-1-0").touch()
    worker.ask([1], Draft((5,), (-1,)), 5)
    wait_for(lambda: (gates / "reached-1-0").exists())
    worker.enough()
    assert worker.answer().tokens == (5,)


def test_enough_of_a_draft_that_is_whole_changes_nothing(worker: Process, gates: Path) -> None:
    (gates / "shut-1-1").touch()
    worker.ask([1], Draft(), 2)
    wait_for(lambda: (gates / "reached-1-1").exists())
    (gates / "shut-1-1").unlink()
    wait_for(lambda: worker._pipe.poll())
    worker.enough()
    assert worker.answer().tokens == (1, 2)
    worker.enough()
    worker.ask([2], Draft(), 2)
    assert worker.answer().tokens == (2, 3)


def test_q_arrives_with_a_sampled_draft(worker: Process) -> None:
    worker.ask([SAMPLED], Draft((1,), (-1,), torch.full((1, 1000), 0.001)), 3)
    draft = worker.answer()
    assert draft.tokens == (1, 903, 904, 905)
    assert draft.probs is not None
    torch.testing.assert_close(draft.probs, torch.cat([torch.full((1, 1000), 0.001), torch.eye(1000)[:3]]))


def test_it_has_read_what_the_target_has_whatever_was_taken_back(worker: Process) -> None:  # A4
    for length in (16, 20, 3, 5, 30, 1):
        context = [length, *range(length)]
        worker.ask(context, Draft(), 1)
        assert worker.answer().tokens == (said(context, 0),)


def test_it_talks_over_a_pipe_that_it_inherits_and_has_no_port(worker: Process) -> None:
    for pid in (worker.pid, os.getpid()):
        assert not [each for each in psutil.Process(pid).net_connections("inet") if each.status == psutil.CONN_LISTEN]
    with socket.socket(fileno=os.dup(worker._pipe.fileno())) as pipe:
        assert pipe.family == socket.AF_UNIX and not pipe.getsockname(), "it has no name that others could connect to"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_first_token_comes_before_the_drafts_answer(schedule: str, worker: Process, gates: Path) -> None:
    (gates / "shut-1").touch()
    rounds = SCHEDULES[schedule](Counting(), worker, match, Sampler(), [1], Fixed(4), Stop(frozenset(), 9))
    first = next(rounds)
    assert first.tokens == (2,) and not worker.work().spans
    (gates / "shut-1").unlink()
    assert [token for each in rounds for token in each.tokens] == list(range(3, 11))


def test_a_question_supersedes_the_one_before_between_two_steps(worker: Process, gates: Path) -> None:
    (gates / "shut-1-1").touch()
    worker.ask([1], Draft(), 5)
    wait_for((gates / "reached-1-1").exists)
    worker.ask([2], Draft(), 2)
    (gates / "shut-1-1").unlink()
    assert worker.answer().tokens == (2, 3)
    assert not (gates / "reached-1-2").exists()
    assert worker.work().tokens == 4, "work that was superseded is counted"


def test_a_stale_answer_is_never_used(worker: Process, gates: Path) -> None:
    """Even when it comes after the new question was put, and when nobody took the old one's."""
    for first in range(1, 20):
        worker.ask([first], Draft(), 3)
        if first % 2:
            wait_for((gates / f"reached-{first}-2").exists)
        worker.ask([first, first], Draft(), 1)
        assert set(worker.answer(at_least=0).tokens) <= {said([first, first], 0)}
        assert worker.answer().tokens == (said([first, first], 0),)


def test_the_parent_sleeps_while_it_waits(worker: Process, gates: Path) -> None:
    (gates / "shut-1").touch()
    worker.ask([1], Draft(), 1)
    opened = threading.Timer(0.5, (gates / "shut-1").unlink)
    opened.start()
    begun, busy = time.perf_counter(), time.process_time()
    worker.answer()
    waited, busy = time.perf_counter() - begun, time.process_time() - busy
    assert waited > 0.4 and busy < waited / 4


def test_at_rest_it_is_idle_and_has_forgotten_the_prompt(worker: Process, gates: Path) -> None:  # E6
    worker.ask([1], Draft(), 3)
    work = worker.rest()
    assert (gates / "cleared").exists()
    assert work.tokens == len([file for file in gates.glob("reached-1-*")]) == len(work.spans)
    child = psutil.Process(worker._process.pid)
    before = child.cpu_times()
    time.sleep(0.3)
    after = child.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.05


def test_the_spans_lie_in_the_parents_time(worker: Process) -> None:
    begun = time.perf_counter()
    worker.ask([1], Draft(), 3)
    worker.answer()
    spans, end = worker.rest().spans, time.perf_counter()
    times = [begun, *(moment for span in spans for moment in span), end]
    assert len(spans) == 3 and times == sorted(times)


def test_an_interrupt_is_the_parents_to_handle(worker: Process) -> None:
    assert worker._process.pid is not None
    os.kill(worker._process.pid, signal.SIGINT)
    worker.ask([1], Draft(), 2)
    assert worker.answer().tokens == (1, 2)


# Failures


def test_a_child_that_dies_raises_in_the_parent_with_its_exit_code(tmp_path: Path) -> None:
    worker = fresh(tmp_path)
    worker.ready()
    worker.ask([EXITS], Draft(), 2)
    with pytest.raises(DraftFailed, match="exit code 3"):
        worker.answer()
    with pytest.raises(DraftFailed, match="exit code 3"):
        worker.ask([1], Draft(), 2)
    worker.close()


def test_a_child_that_raises_raises_in_the_parent_with_its_traceback(tmp_path: Path) -> None:
    worker = fresh(tmp_path)
    worker.ready()
    worker.ask([RAISES], Draft(), 2)
    with pytest.raises(DraftFailed, match=r"(?s)test_worker\.py.*in propose.*ValueError: the drafter's own fault"):
        worker.answer()
    worker.close()
    assert worker._process.exitcode is not None


def unbuilt() -> Drafter:
    raise MemoryError("no room for the weights")


def test_a_child_that_cannot_load_raises_in_the_parent(tmp_path: Path) -> None:
    worker = Process(unbuilt, contextlib.nullcontext, 1000)
    with pytest.raises(DraftFailed, match="MemoryError: no room for the weights"):
        worker.ready()
    worker.close()
    assert worker._process.exitcode is not None


@pytest.mark.parametrize("kind", ("raises", "strange id"))
def test_an_inline_drafter_fails_in_the_same_way(kind: str, tmp_path: Path) -> None:
    worker = Inline(Gated(tmp_path), 1000)
    worker.ask([RAISES if kind == "raises" else STRANGE], Draft(), 2)
    with pytest.raises(DraftFailed, match="the drafter's own fault" if kind == "raises" else "id 1000"):
        worker.answer()


def test_an_id_beyond_the_vocabulary_is_refused_and_the_process_ends(tmp_path: Path) -> None:  # B6
    worker = fresh(tmp_path)
    worker.ready()
    worker.ask([STRANGE], Draft(), 2)
    with pytest.raises(DraftFailed, match="id 1000, but the vocabulary has 1000 ids"):
        worker.answer()
    worker.close()
    assert worker._process.exitcode == 0, "it was asked to end, and did"


class Failing:
    """A worker that fails at the n-th call of a verb."""

    def __init__(self, worker: Worker, verb: str, count: int) -> None:
        self.worker, self.verb, self.count, self.closed = worker, verb, count, False

    def call(self, verb: str) -> None:
        self.count -= verb == self.verb
        if self.count < 0:
            raise DraftFailed("as planned")

    def ready(self) -> None:
        self.call("ready")

    def ask(
        self,
        context: Sequence[int],
        pending: Draft,
        budget: int,
        depth: int | None = None,
        sequences: int | None = None,
    ) -> None:
        self.call("ask")
        self.worker.ask(context, pending, budget, depth, sequences)

    def observe(self, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        self.call("observe")
        self.worker.observe(draft, verdict, logits)

    def enough(self) -> None:
        self.call("enough")
        self.worker.enough()

    def answer(self, at_least: int | None = None) -> Draft:
        self.call("answer")
        return self.worker.answer(at_least)

    def work(self) -> Work:
        self.call("work")
        return self.worker.work()

    def rest(self) -> Work:
        self.call("rest")
        return self.worker.rest()

    def close(self) -> None:
        self.closed = True


class Guessing(Drafter):
    """Guesses the counting target's text, but for every fifth token."""

    def propose(self, context: Sequence[int], pending: Draft, budget: int, depth: int | None = None) -> Iterator[Draft]:
        draft, tip = pending, pending.tip()
        last = draft.tokens[tip] if tip >= 0 else context[-1]
        for step in range(1, budget + 1):
            token = last + step if (last + step) % 5 else 0
            draft, tip = draft.grow(tip, [token]), len(draft)
            yield draft


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", (0, 1))
@pytest.mark.parametrize("verb", ("ready", "ask", "observe", "answer", "work", "rest"))
def test_without_its_drafter_an_answer_goes_on_autoregressively(verb: str, count: int, schedule: str) -> None:
    failing = Failing(Inline(Guessing(), 1000), verb, count)
    worker = Continuing(failing)
    worker.ready()
    failures = []
    for _ in range(3):  # prompts
        rounds = list(SCHEDULES[schedule](Counting(), worker, match, Sampler(), [1], Fixed(4), Stop(frozenset(), 20)))
        worker.rest()
        failures.append(worker.failure)
        assert [token for each in rounds for token in each.tokens] == list(range(2, 22))
    if (verb, count) != ("ready", 1):
        assert failures[-1] == "as planned" and failing.closed
        assert all(len(each.tokens) == 1 and not each.drafted for each in rounds), "the last prompt had no draft"


def test_a_process_that_dies_in_an_answer_does_not_end_it(tmp_path: Path) -> None:
    worker = Continuing(fresh(tmp_path))
    worker.ready()
    rounds = SCHEDULES["overlapped"](Counting(), worker, match, Sampler(), [EXITS], Fixed(4), Stop(frozenset(), 5))
    assert [token for each in rounds for token in each.tokens] == [901, 902, 903, 904, 905]
    assert worker.failure is not None and "exit code 3" in worker.failure
    assert worker.rest() == Work()
    worker.close()


def test_a_message_takes_no_longer_than_it_is_waited_for(shared: tuple[Process, Path]) -> None:
    """What lies ready was sent before anyone waited."""
    worker, folder = shared
    worker.work()
    worker.ask([71], Draft(), 4)
    wait_for(lambda: (folder / "reached-71-3").exists())
    begun = time.perf_counter()
    worker.answer()
    assert worker.work().message_s <= time.perf_counter() - begun


def test_close_ends_the_process(tmp_path: Path) -> None:
    worker = fresh(tmp_path)
    worker.ask([1], Draft(), 3)  # even before it is ready, which takes a busy machine longer than it is given
    worker.close()
    assert worker._process.exitcode in (0, -signal.SIGKILL)
    worker.close()


class Learning(Drafter):
    """Proposes what the target said behind the nodes of its draft before."""

    observes = True

    def __init__(self) -> None:
        self.seen: list[int] = []

    def propose(self, context: Sequence[int], pending: Draft, budget: int, depth: int | None = None) -> Iterator[Draft]:
        yield pending.grow(pending.tip(), self.seen[:budget])

    def observe(self, draft: Draft, verdict: Verdict, behind: Sequence[int]) -> None:
        self.seen = [*behind, len(draft), len(verdict.tokens)]


@pytest.mark.parametrize("place", ("inline", "process"))
def test_a_drafter_that_asks_for_it_is_told_what_the_target_said(place: str) -> None:
    worker = Inline(Learning(), 1000) if place == "inline" else Process(Learning, contextlib.nullcontext, 1000, True)
    try:
        worker.ready()
        worker.observe(Draft((4,), (-1,)), Verdict((8,), -1, rejected=True), torch.eye(1000)[[8, 300]])
        worker.ask([1], Draft(), 9)
        assert worker.answer().tokens == (8, 300, 1, 1)
    finally:
        worker.close()


@pytest.mark.parametrize("place", ("inline", "process"))
def test_a_drafter_is_told_how_deep_a_draft_is_of_use(place: str) -> None:
    worker = Inline(Deep(), 1000) if place == "inline" else Process(Deep, contextlib.nullcontext, 1000)
    try:
        worker.ready()
        worker.ask([1], Draft(), 9, 5)
        assert worker.answer().tokens == (5,)
    finally:
        worker.close()


class Deep(Drafter):
    """Proposes the depth."""

    def propose(self, context: Sequence[int], pending: Draft, budget: int, depth: int | None = None) -> Iterator[Draft]:
        yield Draft((depth or 0,), (-1,))
