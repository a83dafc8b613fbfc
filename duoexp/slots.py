"""Jobs that measure never share cores: each takes a slot of this machine, and waits while all are taken."""

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from filelock import FileLock, Timeout

from duoexp import machine
from duoexp.lm import disk_cache


@dataclass(frozen=True)
class Slot:
    """A part of the machine. `cores`: None for all that this process may use; `gpu`: the one to be seen, None: all."""

    cores: tuple[int, ...] | None
    gpu: int | None


@contextmanager
def taken(slots: int) -> Iterator[Slot]:
    """The first free one of `slots` equal parts, until the context ends, whoever else asks on this machine."""
    folder = disk_cache.root() / "slots"
    folder.mkdir(parents=True, exist_ok=True)
    locks = [FileLock(folder / f"{platform.node()}-{number + 1}-of-{slots}.lock") for number in range(slots)]
    told = False
    while True:
        for number, lock in enumerate(locks):
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            try:
                yield part(number, slots)
            finally:
                lock.release()
            return
        if not told:
            print("waiting for another job of this machine", flush=True)
            told = True
        time.sleep(0.5)


def part(number: int, slots: int) -> Slot:
    """Neighbouring cores, and a GPU of its own where there is one for each."""
    if slots == 1:
        return Slot(None, None)
    cores = machine.mask() or ()
    size = len(cores) // slots
    gpus = machine.gpus()
    own = cores[number * size : (number + 1) * size] or None
    return Slot(own, number % gpus if gpus > 1 else None)
