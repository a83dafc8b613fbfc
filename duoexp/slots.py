"""Jobs that measure never share cores: each takes a slot of this machine, and waits while all are taken."""

import contextlib
import json
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from duoexp import machine
from duoexp.lm import disk_cache
from duoexp.masking import masked_override


@dataclass(frozen=True)
class Slot:
    """A part of the machine. `cores`: None for all that this process may use; `gpu`: the one to be seen, None: all."""

    cores: tuple[int, ...] | None
    gpu: int | None


@contextmanager
def taken(slots: int) -> Iterator[Slot]:
    """The first free one of `slots` equal parts, until the context ends, whoever else asks on this machine."""
    folder = disk_cache.root() / "slots"
    with disk_cache.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    locks = [FileLock(folder / f"{platform.node()}-{number + 1}-of-{slots}.lock") for number in range(slots)]
    told = ""
    while True:
        for number, lock in enumerate(locks):
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            holder = _holder(lock)
            try:
                with disk_cache.writing(folder):
                    holder.write_text(json.dumps(_own()))
                yield part(number, slots)
            finally:
                holder.unlink(missing_ok=True)
                lock.release()
            return
        if (waiting := _waiting(locks)) != told:  # another holder, or it was stopped
            print(waiting, flush=True)
            told = waiting
        time.sleep(0.5)


def _holder(lock: FileLock) -> Path:
    return Path(lock.lock_file).with_suffix(".json")


def _own() -> dict[str, object]:
    """For those who wait: which process this is, and since when it holds its slot."""
    process = psutil.Process()
    command = " ".join(masked_override(argument) for argument in process.cmdline())
    since = datetime.now().isoformat(" ", "seconds")
    return {"pid": process.pid, "created": process.create_time(), "command": command, "since": since}


def _waiting(locks: Sequence[FileLock]) -> str:
    """For whom: each slot's holder in a part of the sentence, as far as it is known."""
    holders = [told for lock in locks if (told := _told(_holder(lock)))]
    return ": ".join(["waiting for another job of this machine", *(["; ".join(holders)] if holders else [])])


def _told(holder: Path) -> str | None:
    """None between two holders."""
    with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
        about = json.loads(holder.read_text())
        process = psutil.Process(about["pid"])
        if process.create_time() == about["created"]:
            said = f"process {about['pid']} ({about['command']}) since {about['since']}"
            still = [each.pid for each in (process, *process.children(True)) if each.status() == psutil.STATUS_STOPPED]
            resume = f"kill -CONT {' '.join(map(str, still))}"
            return f"{said}, which is stopped: `{resume}` lets it go on" if still else said
    return None


def part(number: int, slots: int) -> Slot:
    """Neighbouring cores, and a GPU of its own where there is one for each."""
    if slots == 1:
        return Slot(None, None)
    cores = machine.mask() or ()
    size = len(cores) // slots
    gpus = machine.gpus()
    own = cores[number * size : (number + 1) * size] or None
    return Slot(own, number % gpus if gpus > 1 else None)
