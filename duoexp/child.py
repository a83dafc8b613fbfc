"""A child process: started, followed, timed out, and its end put into words."""

import codecs
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO

GRACE_S = 20.0  # for a child that was told to stop: it writes its summary and closes its tracker


@dataclass(frozen=True)
class End:
    """How a process ended: `reason` is None when it succeeded, else a line. `code`: as `subprocess` has it."""

    code: int
    reason: str | None
    seconds: float


def run(
    command: Sequence[str],
    said: str,
    log: Path,
    timeout: float | None = None,
    shown: bool = False,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> End:
    """Runs `command` with `said` on its standard input, which stays open as long as this process lives.

    Its output goes into `log`, and is repeated on this process's own when `shown`. After `timeout` seconds it is told
    to stop. It has a process group of its own, of which nothing is left behind when it ends by a signal.
    """
    begun = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(environment),
            start_new_session=True,
        )
    assert process.stdin is not None
    _say(process.stdin, said)
    try:
        code, late = _followed(process, log, timeout, shown), False
    except subprocess.TimeoutExpired:
        code, late = _stopped(process), True
    except BaseException:  # an interrupt of this process is one of the child
        _stopped(process)
        raise
    finally:
        process.stdin.close()
    if code < 0:
        _kill_group(process.pid)
    reason = f"stopped after sweep.timeout={timeout:g} s" if late else _reason(code, log)
    return End(code, reason, time.monotonic() - begun)


def die_with_parent() -> str:
    """For the child: the line that it was sent. It is interrupted when its parent ends, in whatever way that is."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born deaf to it
    line = sys.stdin.readline()

    def watch() -> None:
        while os.read(0, 1):  # the system's own call: a reader of sys.stdin would hold a lock at exit
            pass
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, name="duoexp-parent", daemon=True).start()
    return line


def _say(pipe: IO[bytes], text: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # it has died already, which its exit code tells
        pipe.write(text.encode() + b"\n")
        pipe.flush()


def _followed(process: "subprocess.Popen[bytes]", log: Path, timeout: float | None, shown: bool) -> int:
    """The exit code; raises TimeoutExpired. A file is followed, not a pipe: a grandchild may keep a pipe open."""
    deadline = None if timeout is None else time.monotonic() + timeout
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with log.open("rb") as output:
        while True:
            left = 1.0 if deadline is None else min(1.0, deadline - time.monotonic())
            try:
                return process.wait(max(0.0, left))
            except subprocess.TimeoutExpired:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
            finally:
                if shown:
                    sys.stdout.write(decoder.decode(output.read()))
                    sys.stdout.flush()


def _stopped(process: "subprocess.Popen[bytes]") -> int:
    """Interrupts it, so that its files are closed; kills all of its group when that takes too long."""
    process.send_signal(signal.SIGINT)
    try:
        return process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        _kill_group(process.pid)
        return process.wait()


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left
        os.killpg(group, signal.SIGKILL)


def _reason(code: int, log: Path) -> str | None:
    """The line that the child told its error in; the signal or the exit code of one that told nothing."""
    if code == 0:
        return None
    told = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("error: ")]
    if told:
        return told[-1].removeprefix("error: ")
    if code == -signal.SIGKILL:
        return "killed by signal 9 (SIGKILL), as the system does when memory runs out"
    if code < 0:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with exit code {code}, without a word"
