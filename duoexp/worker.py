"""Where a drafter runs: in this process, or in one of its own beside the target."""

import contextlib
import logging
import multiprocessing
import selectors
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar

import psutil
from torch import Tensor

from duoexp.config import InputError
from duoexp.drafters.base import Drafter
from duoexp.sampling import argmax
from duoexp.tree import Draft
from duoexp.verify import Verdict

T = TypeVar("T")
log = logging.getLogger(__name__)

LOOK_S = 1.0  # after so long a child that is waited for is looked at
QUIET_LOOKS = 60  # of a child that has neither worked nor spoken meanwhile, before it is given up

Span = tuple[float, float]  # start and end of one draft step, on the clock that all processes share


class DraftFailed(RuntimeError):
    """The drafter raised, proposed what is no draft of the size asked for, or its process died, hangs or talks
    nonsense; the text says which, with the traceback or the exit code.
    """


@dataclass
class Work:
    """What a drafter did since it was last asked: its steps, and the tokens that they brought, used or not."""

    spans: list[Span] = field(default_factory=list)
    tokens: int = 0
    message_s: float = 0.0  # how long the answers that were waited for were on their way


class Worker(Protocol):
    @property
    def pid(self) -> int | None:
        """Of the process that the drafter has for itself, if it has one."""
        ...

    def ready(self) -> None:
        """Waits until the drafter can be asked."""
        ...

    def ask(
        self,
        context: Sequence[int],
        pending: Draft,
        budget: int,
        depth: int | None = None,
        sequences: int | None = None,
    ) -> None:
        """Puts a question, in the terms of `Drafter.propose` and `shape`, which supersedes the one under way; returns
        at once.
        """
        ...

    def observe(self, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        """Tells the drafter, before the next question, what the target's pass over `draft` brought, if it wants that.

        logits [nodes + 1, vocabulary]: row 0 behind the context, row i + 1 behind node i.
        """
        ...

    def enough(self) -> None:
        """Makes the draft whole with the step under way; before its first step is done, with nothing."""
        ...

    def answer(self, at_least: int | None = None) -> Draft:
        """`pending` with what was drafted. Waits for the whole budget (None) or for so many tokens; 0 never waits."""
        ...

    def work(self) -> Work:
        """What was done since the last call."""
        ...

    def rest(self) -> Work:
        """Stops drafting, forgets the prompt, and returns the rest of the work. The drafter is idle afterwards."""
        ...

    def close(self) -> None: ...


class Inline:
    """Drafts in this process, when the answer is asked for: never at the same time as the target."""

    pid: int | None = None

    def __init__(self, drafter: Drafter, vocabulary: int) -> None:
        self.drafter, self._vocabulary = drafter, vocabulary
        self._work = Work()

    def ready(self) -> None:
        pass

    def ask(
        self,
        context: Sequence[int],
        pending: Draft,
        budget: int,
        depth: int | None = None,
        sequences: int | None = None,
    ) -> None:
        self._question = (list(context), pending, budget, depth, sequences)

    def observe(self, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        if self.drafter.observes:
            self.drafter.observe(draft, verdict, argmax(logits))

    def enough(self) -> None:
        context, pending, _, depth, sequences = self._question
        self._question = (context, pending, 0, depth, sequences)  # no step is ever under way

    def answer(self, at_least: int | None = None) -> Draft:
        context, pending, budget, depth, sequences = self._question
        draft, begun = pending, time.perf_counter()
        self.drafter.shape(sequences)
        steps = self.drafter.propose(context, pending, budget, depth)
        while at_least is None or len(draft) < len(pending) + at_least:
            try:
                step = next(steps, None)
            except Exception as error:
                raise DraftFailed(f"the drafter raised:\n{traceback.format_exc()}") from error
            if step is None:
                break
            self._work.spans.append((begun, begun := time.perf_counter()))
            draft = step
        _check(draft, pending, budget, self._vocabulary)
        self._work.tokens += len(draft) - len(pending)
        return draft

    def work(self) -> Work:
        work, self._work = self._work, Work()
        return work

    def rest(self) -> Work:
        self.drafter.clear()
        return self.work()

    def close(self) -> None:
        pass


class Continuing:
    """A worker whose failure ends the drafting, not the answer: from then on there is no draft."""

    def __init__(self, worker: Worker) -> None:
        self.worker: Worker | None = worker
        self.failure: str | None = None
        self._pending = Draft()

    @property
    def pid(self) -> int | None:
        return None if self.worker is None else self.worker.pid

    def ready(self) -> None:
        self._try(lambda worker: worker.ready(), None)

    def ask(
        self,
        context: Sequence[int],
        pending: Draft,
        budget: int,
        depth: int | None = None,
        sequences: int | None = None,
    ) -> None:
        self._pending = pending
        self._try(lambda worker: worker.ask(context, pending, budget, depth, sequences), None)

    def observe(self, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        self._try(lambda worker: worker.observe(draft, verdict, logits), None)

    def enough(self) -> None:
        self._try(lambda worker: worker.enough(), None)

    def answer(self, at_least: int | None = None) -> Draft:
        return self._try(lambda worker: worker.answer(at_least), self._pending)

    def work(self) -> Work:
        return self._try(lambda worker: worker.work(), Work())

    def rest(self) -> Work:
        return self._try(lambda worker: worker.rest(), Work())

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()

    def _try(self, call: Callable[[Worker], T], otherwise: T) -> T:
        if self.worker is None:
            return otherwise
        try:
            return call(self.worker)
        except DraftFailed as failure:
            self.failure = str(failure)
            log.warning("going on without a draft: %s", failure)
            self.close()
            self.worker = None
            return otherwise


_Observed = tuple[Draft, Verdict, list[int]] | None  # the arguments of `Drafter.observe`
_ENOUGH = "enough"  # the message that ends a draft with the step under way


@dataclass(frozen=True)
class _Answer:
    """News of a question: the steps since the last news, the nodes that they added, and whether these were the last.

    Nodes with q come when the draft is whole: its rows, of vocabulary size, would fill the pipe and stop the drafter.
    """

    question: int
    part: Draft
    spans: tuple[Span, ...]
    last: bool
    sent: float


class Process:
    """Drafts in a spawned process, while the target verifies.

    build: makes the started drafter in the child; placed: pins the child, before anything is loaded; observes: of the
    drafter. What it is to observe travels with the next question.
    Every step's news is sent as it happens, so taking what is there costs no round trip. The pipe blocks; nobody spins.
    """

    def __init__(
        self,
        build: Callable[[], Drafter],
        placed: Callable[[], AbstractContextManager[None]],
        vocabulary: int,
        observes: bool = False,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, build, placed), name="duoexp-draft", daemon=True)
        start_process(self._process)
        child.close()  # so that a dead child reads as the end of the pipe
        self._readable = _ready_for(self._pipe, selectors.EVENT_READ)
        self._writable = _ready_for(self._pipe, selectors.EVENT_WRITE)
        self._vocabulary, self._observes = vocabulary, observes
        self._observed: _Observed = None
        self._question, self._sent = 0, list[int]()
        self._pending, self._draft = Draft(), Draft()
        self._asked, self._begun, self._whole = False, False, True
        self._work = Work()

    @property
    def pid(self) -> int | None:
        """Of the child, while it lives."""
        return self._process.pid if self._process.is_alive() else None

    def ready(self) -> None:
        self._receive()

    def observe(self, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        if self._observes:
            self._observed = (_bare(draft), verdict, argmax(logits))

    def ask(
        self,
        context: Sequence[int],
        pending: Draft,
        budget: int,
        depth: int | None = None,
        sequences: int | None = None,
    ) -> None:
        self._drain()  # so that the child is never stuck in sending while it should read
        self._question += 1
        known = len(self._sent) if list(context[: len(self._sent)]) == self._sent else 0
        self._sent = list(context)
        self._pending = self._draft = pending
        self._budget = budget
        self._asked, self._begun, self._whole = budget > 0 and depth != 0, False, False
        observed, self._observed = self._observed, None
        asked = (_bare(pending), budget, depth)
        self._send((self._question, known, self._sent[known:], observed, sequences, asked))

    def enough(self) -> None:
        self._drain()
        if not self._begun:
            self._asked = False
        elif not self._whole:
            self._send(_ENOUGH)

    def answer(self, at_least: int | None = None) -> Draft:
        if self._asked:  # else there is nothing to wait for
            self._wait(at_least)
        return self._draft

    def _wait(self, at_least: int | None) -> None:
        waited = time.perf_counter()  # an answer that lies ready was on its way before anyone waited for it
        while not self._whole and (at_least is None or len(self._draft) < len(self._pending) + at_least):
            message = self._receive()
            since, waited = max(waited, message.sent), time.perf_counter()
            if self._take(message):
                self._work.message_s += waited - since
        self._drain()

    def work(self) -> Work:
        work, self._work = self._work, Work()
        return work

    def rest(self) -> Work:
        self.ask([], Draft(), 0)
        self._wait(None)
        return self.work()

    def close(self) -> None:
        """Ends the child, at the latest after ten seconds."""
        if self._process.is_alive():
            with contextlib.suppress(OSError):  # it has just died by itself, which is what is wanted
                self._pipe.send(None)
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        for each in (self._readable, self._writable, self._pipe):
            each.close()

    def _drain(self) -> None:
        while self._pipe.poll():
            self._take(self._receive())

    def _take(self, message: _Answer) -> bool:
        """Books the work; adds the news if they answer the question under way."""
        self._work.tokens += len(message.part)
        self._work.spans += message.spans
        if message.question != self._question:
            return False
        draft = self._draft.join(message.part)
        _check(draft, self._pending, self._budget, self._vocabulary)
        self._draft, self._begun, self._whole = draft, True, message.last
        return True

    def _send(self, message: object) -> None:
        self._await(self._writable)
        try:
            self._pipe.send(message)
        except OSError as error:
            raise self._death() from error

    def _receive(self) -> _Answer:
        self._await(self._readable)
        try:
            message = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise self._death() from error
        except Exception as error:  # bytes that are no message trip the reader up anywhere
            raise DraftFailed(f"the draft process sent what is no answer ({type(error).__name__}: {error})") from error
        if isinstance(message, InputError):
            raise message
        if isinstance(message, str):
            raise DraftFailed(f"the drafter raised in its process:\n{message}")
        if not isinstance(message, _Answer):
            raise DraftFailed(f"the draft process sent what is no answer ({message!r})")
        return message

    def _await(self, pipe: selectors.BaseSelector) -> None:
        """Sleeps until the pipe can be used. Kills a child that is stopped or hangs, and raises DraftFailed.

        Looks are counted, not seconds: while a whole terminal or machine is suspended, nobody looks. Loading a model,
        compiling it and a slow step take processor time, so none of them is cut short.
        """
        used, quiet = -1.0, 0
        while not pipe.select(LOOK_S):
            if not self._process.is_alive():  # and another process holds its end of the pipe
                raise self._death()
            child = psutil.Process(self._process.pid)
            before, used = used, _processor_s(child)
            quiet = quiet + 1 if used == before else 0
            if quiet >= QUIET_LOOKS:
                state = child.status()
                self._process.kill()
                seconds = quiet * LOOK_S
                raise DraftFailed(f"the draft process did nothing for {seconds:g} s and was ended; it was {state}")

    def _death(self) -> DraftFailed:
        self._process.join(10)
        return DraftFailed(f"the draft process ended by itself with exit code {self._process.exitcode}")


def _ready_for(pipe: Connection, event: int) -> selectors.BaseSelector:
    """Made once: `Connection.poll` makes one at each call, which takes longer than the call itself."""
    selector = selectors.DefaultSelector()
    selector.register(pipe, event)
    return selector


def _processor_s(process: psutil.Process) -> float:
    """What it and those that it started have used so far."""
    used = 0.0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended, and differs from before in that
            used += sum(each.cpu_times()[:2])
    return used


def _bare(draft: Draft) -> Draft:
    """Without q, for which a drafter has no use."""
    return Draft(draft.tokens, draft.parents)


def _check(draft: Draft, pending: Draft, budget: int, vocabulary: int) -> None:
    """Raises DraftFailed for a draft that would stop the target in the middle of a pass."""
    if not isinstance(draft, Draft):
        raise DraftFailed(f"the drafter proposed what is no draft ({draft!r})")
    known = len(pending)
    tokens, parents = draft.tokens[known:], draft.parents[known:]
    strange = [token for token in tokens if not 0 <= token < vocabulary]
    if strange:
        raise DraftFailed(f"the drafter proposed id {strange[0]}, but the vocabulary has {vocabulary} ids")
    if len(tokens) > budget:
        raise DraftFailed(f"the drafter proposed {len(tokens)} tokens, but {budget} were asked for")
    if len(tokens) != len(parents) or not all(-1 <= parent < known + i for i, parent in enumerate(parents)):
        raise DraftFailed(f"the drafter proposed what is no tree: tokens {tokens} behind nodes {parents}")


def start_process(process: BaseProcess) -> None:
    """Starts a spawned process, from within any launcher, and deaf to interrupts from its first moment."""
    method = multiprocessing.get_start_method(allow_none=True)
    main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None  # what is ignored stays so in a child
    # The child is told the parent's method, and does not know those that launchers bring, such as loky's.
    multiprocessing.set_start_method("spawn", force=True)
    try:
        process.start()
    finally:
        multiprocessing.set_start_method(method, force=True)
        if main:
            signal.signal(signal.SIGINT, handler)


def _serve(pipe: Connection, build: Callable[[], Drafter], placed: Callable[[], AbstractContextManager[None]]) -> None:
    """The child: answers questions until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle; the pipe then closes
    try:
        with placed():
            drafter = build()
            pipe.send(_Answer(0, Draft(), (), last=True, sent=time.perf_counter()))
            _answer_all(pipe, drafter)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone
    except InputError as error:
        pipe.send(error)
    except BaseException:
        pipe.send(traceback.format_exc())


def _answer_all(pipe: Connection, drafter: Drafter) -> None:
    context: list[int] = []
    message = pipe.recv()
    while message is not None:
        if message == _ENOUGH:  # of a draft that was whole by itself
            message = pipe.recv()
            continue
        number, known, news, observed, sequences, asked = message
        context = context[:known] + news
        if observed:
            drafter.observe(*observed)
        drafter.shape(sequences)
        if context:
            message = _answer(pipe, number, drafter.propose(context, *asked), asked[0])
        else:
            drafter.clear()
            message = _answer(pipe, number, iter(()), asked[0])


def _answer(pipe: Connection, number: int, steps: Iterator[Draft], pending: Draft) -> Any:
    """Sends what each step adds, and stops between two steps when there is a message; returns the next question."""
    draft, sent = pending, len(pending)
    spans: list[Span] = []
    begun = time.perf_counter()

    def send(part: Draft, last: bool) -> None:
        pipe.send(_Answer(number, part, tuple(spans), last, time.perf_counter()))
        spans.clear()

    for draft in steps:
        spans.append((begun, time.perf_counter()))
        if pipe.poll():
            if (message := pipe.recv()) == _ENOUGH:
                break
            send(_bare(draft).since(sent), last=False)
            return message
        if draft.probs is None:
            send(draft.since(sent), last=False)
            sent = len(draft)
        else:
            send(Draft(), last=False)
        begun = time.perf_counter()
    send(draft.since(sent), last=True)
    return pipe.recv()
