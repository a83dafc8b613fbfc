"""The files of a run: the truth, of which a tracker holds a copy. What is written is on disk before the next prompt."""

import contextlib
import hashlib
import json
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from duoexp.config import InputError
from duoexp.masking import masked

log = logging.getLogger(__name__)

LINES = ("prompts.jsonl", "rounds.jsonl", "baseline.jsonl")  # answers; the target passes of each, of both sides


class Record:
    """The folder of one run. shared: others may come to it, and wait until this record is closed.

    Raises InputError wherever the folder cannot be written.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], shared: bool = False) -> None:
        self.folder = folder
        self._open: dict[str, TextIO] = {}
        with writing(folder), contextlib.ExitStack() as stack:
            if shared:
                stack.callback(_locked(folder).release)
            (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(masked(dict(config)))))
            self._log = _Log(folder / "run.log")
            self._end = stack.pop_all()  # of what has to be ended, the last first
        self._end.callback(self._log.close)
        self._end.callback(logging.getLogger().removeHandler, self._log)
        self._log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(self._log)

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """A whole JSON file, there or not there, never half."""
        self._replace(name, json.dumps(value, indent=2, allow_nan=False) + "\n")

    def append(self, name: str, value: Mapping[str, Any]) -> None:
        """A line of a JSON lines file."""
        line = json.dumps(value, allow_nan=False) + "\n"
        with writing(self.folder / name):
            if name not in self._open:
                self._open[name] = (self.folder / name).open("a")
            self._open[name].write(line)

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drops the other lines of the files that an earlier process left, before anything is appended."""
        for name in LINES:
            kept = [json.dumps(line) + "\n" for line in lines(self.folder / name) if wanted(line)]
            self._replace(name, "".join(kept))

    def log_traceback(self) -> None:
        """The traceback of the exception that is being handled, into the log alone: the console gets a sentence."""
        self._log.handle(logging.makeLogRecord({"name": "duoexp", "levelname": "ERROR", "msg": traceback.format_exc()}))

    def flush(self) -> None:
        for name, file in self._open.items():
            with writing(self.folder / name):
                file.flush()

    def close(self) -> None:
        """All of it, even where a file cannot take the rest of what it was given."""
        with writing(self.folder), self._end:
            for file in self._open.values():
                self._end.callback(file.close)

    def _replace(self, name: str, text: str) -> None:
        draft = self.folder / f".{name}"
        with writing(self.folder / name):
            draft.write_text(text)
            draft.rename(self.folder / name)


class _Log(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Says nothing: where the log cannot be written, the files beside it cannot either, and they end the run."""


@contextlib.contextmanager
def writing(place: Path) -> Iterator[None]:
    """Raises InputError where the disk is full, or the place is not ours to write to."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"output_dir: {place} cannot be written ({error.strerror or error}); "
            "make room or give rights there, or give another output_dir"
        ) from error


def lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a JSON lines file; none when it is not there. Passes over what killed processes left half."""
    found: list[dict[str, Any]] = []
    with contextlib.suppress(FileNotFoundError), file.open(errors="replace") as source:
        for line in source:
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found


def digest(value: object) -> str:
    """16 hex digits of what is JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def runs(output_dir: str, name: str) -> Path:
    """Where the runs of a group are: a folder each."""
    return Path(output_dir).expanduser() / "runs" / name


def new_folder(parent: Path, key: str) -> Path:
    """`<time>-<key>`. mkdir is what makes it ours: of two runs of the same second and key, the later takes the next."""
    stem = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{key[:8]}"
    for attempt in range(1, 1000):
        folder = parent / (stem if attempt == 1 else f"{stem}-{attempt}")
        with contextlib.suppress(FileExistsError):
            return _made(folder, exist_ok=False)
    raise InputError(f"output_dir: {parent} holds 1000 runs of this second; give another name")


def same_folder(folder: Path) -> Path:
    """The folder that every process with this key goes on in."""
    return _made(folder, exist_ok=True)


def _made(folder: Path, exist_ok: bool) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        if folder.parent.is_dir() and not exist_ok:
            raise
        raise InputError(f"output_dir: {folder.parent} is not a folder; give another output_dir") from None
    except OSError as error:
        raise InputError(f"output_dir: {folder} cannot be made ({error.strerror}); give another output_dir") from None
    return folder


def _locked(folder: Path) -> FileLock:
    """Waits for a process that is at the same run: of another sweep, or one that is about to be stopped."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.warning("another process is at this run, in %s; waiting for it", folder)
        lock.acquire()
    return lock
