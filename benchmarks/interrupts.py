"""Interrupts, ends or kills a small run at random moments, and checks what is left and that it can be gone on with.

    python benchmarks/interrupts.py [--count 50] [--seed 0] [--warm] [--folder FOLDER]

Each run is `python -m duoexp` with a draft process, sent SIGINT, SIGTERM or SIGKILL at a moment between its start and
its end, alone or with all of its processes. Afterwards its files can be read, nothing that it started is alive, and the
same command with resume=true ends with the answers, rounds and figures of a run that nobody disturbed. It takes about
ten minutes; with --warm the runs are forked from a process that has imported everything, which leaves out interrupts
while modules are imported, and takes seconds.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import util
from pathlib import Path
from typing import Any

import psutil

from duoexp.record import lines

ROOT = Path(__file__).parent.parent
SETTINGS = (
    *("model=tiny", "hardware=cpu", "hardware.worker=process", "hardware.target.threads=1", "draft=dynamic"),
    *("hardware.target.dtype=float32", "hardware.draft.dtype=float32", "draft.budget=6", "task.limit=4"),
    *("sampling.max_new_tokens=24", "resume=true"),
)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
# Ended by itself before the signal came; interrupted; or by a signal that came before the program could see to it.
CODES = {0, 130, -signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL}
# What a run that was disturbed has to have in common with one that was not.
FIGURES = ("answers", "tokens", "baseline_tokens", "tau", "alpha", "alpha_by_position", "identical", "sequences")

_begun: list["subprocess.Popen[bytes]"] = []  # kept, since one that is let go is waited for by Python itself

Send = Callable[[int, int], None]  # os.kill or os.killpg
Begin = Callable[[Path, str], int]  # the folder and the name of a run -> the id of its process


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # to which a shell's background jobs are deaf
    with tempfile.TemporaryDirectory() as made:
        folder = given.folder or Path(made)
        os.environ.setdefault("DUOEXP_CACHE", str(folder / "cache"))
        trials(folder, given.count, random.Random(given.seed), forked if given.warm else started)


def trials(folder: Path, count: int, dice: random.Random, begin: Begin) -> None:
    ended(begin(folder, "first"))  # which makes the models
    start = time.monotonic()
    code = ended(begin(folder, "whole"))
    whole_s = time.monotonic() - start
    assert code == 0, said(folder, "whole")
    wanted = facts(folder, "whole")
    number = 0
    while number < count:
        name, moment = f"run{number}", dice.uniform(0, whole_s)
        sent, send = SIGNALS[number % 3], (os.kill, os.killpg)[number % 2]
        code = disturbed(begin(folder, name), sent, moment, send, lambda name=name: finished(folder, name))
        if code is None:
            whole_s = moment  # the machine has become faster
            shutil.rmtree(folder / "outputs" / "runs" / name)
            continue
        kept = check_files(folder, name, code)
        assert ended(begin(folder, name)) == 0, said(folder, name)
        assert facts(folder, name) == wanted, f"{name} ended otherwise"
        to = "all" if send is os.killpg else "one"
        print(f"{number}: {sent.name} to {to} after {moment:.2f} s, exit code {code}, {kept} answers kept", flush=True)
        number += 1


def disturbed(pid: int, sent: signal.Signals, moment: float, send: Send, over: Callable[[], bool]) -> int | None:
    """The exit code of a run that is sent this signal; everything that it had started is gone with it.

    To the run alone, as `kill` does, or to all of its processes, as a terminal and a scheduler do. None for a run that
    has ended before. over: whether its result is on disk, after which alone it may end as if it had heard nothing.
    """
    time.sleep(moment)
    run = psutil.Process(pid)
    if run.status() == psutil.STATUS_ZOMBIE:
        assert ended(pid) == 0
        return None
    family, late = run.children(recursive=True), over()
    send(pid, sent)
    code = ended(pid)
    assert code or late, f"{sent.name} after {moment:.2f} s was not heard"
    end = time.monotonic() + 30
    while left := [each for each in [*family, *session(pid)] if alive(each)]:
        assert time.monotonic() < end, f"{sent.name} after {moment:.2f} s left {left}"
        time.sleep(0.05)
    return code


def session(pid: int) -> list[psutil.Process]:
    """What a run started after it was last looked at; each run has a session of its own."""
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(each.pid) == pid:
                found.append(each)
    return found


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def check_files(folder: Path, name: str, code: int) -> int:
    """Whatever there is can be read; returns how many answers there are."""
    assert code in CODES, (code, said(folder, name))
    kept = 0
    for run in folder.glob(f"outputs/runs/{name}/*"):
        for file in run.glob("[!.]*.json"):
            json.loads(file.read_text())
        for file in run.glob("[!.]*.jsonl"):
            whole = file.read_text().split("\n")[:-1]  # behind the last end of a line a killed run may leave anything
            assert [json.loads(line) for line in whole] == lines(file)[: len(whole)], file
        kept += len(lines(run / "prompts.jsonl"))
        if code == 130 and (run / "summary.json").is_file():
            assert json.loads((run / "summary.json").read_text())["status"] in ("interrupted", "finished")
    return kept


def finished(folder: Path, name: str) -> bool:
    return any(folder.glob(f"outputs/runs/{name}/*/summary.json"))


def facts(folder: Path, name: str) -> Any:
    """All of a run that does not depend on the clock."""
    [run] = folder.glob(f"outputs/runs/{name}/*")
    summary = json.loads((run / "summary.json").read_text())
    answers = [
        [row[key] for key in ("prompt", "turn", "repeat", "prompt_ids", "comparison")]
        + [row[side][key] for side in ("baseline", "method") for key in ("ids", "text", "reason")]
        for row in lines(run / "prompts.jsonl")
    ]
    rounds = [
        [row[key] for key in ("prompt", "turn", "repeat", "round", "tokens", "accepted", "rejected", "verified")]
        for file in ("rounds.jsonl", "baseline.jsonl")
        for row in lines(run / file)
    ]
    return [summary["status"], *(summary[figure] for figure in FIGURES), answers, rounds]


def arguments(name: str) -> list[str]:
    return [*SETTINGS, f"name={name}"]


def said(folder: Path, name: str) -> str:
    return (folder / f"{name}.out").read_text()


@contextmanager
def output(folder: Path, name: str) -> Iterator[int]:
    file = os.open(folder / f"{name}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    yield file
    os.close(file)


def started(folder: Path, name: str) -> int:
    """As a user starts it."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "duoexp", *arguments(name), "tracker=offline"]
    with output(folder, name) as file:
        environment = os.environ | {"PYTHONPATH": paths}
        _begun.append(
            subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file, start_new_session=True)
        )
        return _begun[-1].pid


def forked(folder: Path, name: str) -> int:
    """From this process, which has imported what a run needs; its draft process is a fork as well."""
    from duoexp import __main__ as command
    from duoexp import runner, worker  # noqa: F401

    context, serve = multiprocessing.get_context("fork"), worker._serve
    worker.multiprocessing.get_context = lambda _: context  # type: ignore[assignment,attr-defined]

    def alone(pipe: Any, *rest: Any) -> None:
        for file in range(3, 256):  # a fork has the parent's end of the pipe too, and would not see it end
            if file != pipe.fileno():
                with contextlib.suppress(OSError):
                    os.close(file)
        serve(pipe, *rest)

    worker._serve = alone
    with output(folder, name) as file:
        if pid := os.fork():
            return pid
        code = 130
        try:
            os.setsid()
            os.chdir(folder)
            os.dup2(file, 1)
            os.dup2(file, 2)
            sys.argv = ["duoexp", *arguments(name), "tracker=none"]
            command.main()
        except SystemExit as end:
            code = int(end.code or 0)
        except KeyboardInterrupt:
            pass  # before the program could see to it
        util._exit_function()  # as at the end of any process: ends its children
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
