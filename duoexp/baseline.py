"""The autoregressive decodings of a target, kept so that the runs of a sweep need not each make them anew."""

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from filelock import FileLock

from duoexp import decodings
from duoexp.metrics import Decoding
from duoexp.record import digest, lines, writing

Key = tuple[str, int, int]  # prompt, turn, repeat


class Baseline(Protocol):
    def get(self, key: Key, prompt: list[int]) -> Decoding | None:
        """What is kept for a turn of a prompt with these ids."""

    def put(self, key: Key, prompt: list[int], decoding: Decoding) -> None: ...


class Paired:
    """Keeps nothing: each run decodes both ways, in turn, so that both see the same state of the machine."""

    def get(self, key: Key, prompt: list[int]) -> Decoding | None:
        return None

    def put(self, key: Key, prompt: list[int], decoding: Decoding) -> None:
        pass


class Cached:
    """A file of decodings for all that their times depend on. Several runs may write to it at once."""

    def __init__(self, folder: Path, depends: Mapping[str, Any]) -> None:
        """depends: on what, as JSON; the machine is added."""
        self.file = folder / f"{digest([depends, platform.node(), platform.platform()])}.jsonl"
        self._kept = {_key(row): row for row in reversed(lines(self.file))}  # of two, the first counts

    def get(self, key: Key, prompt: list[int]) -> Decoding | None:
        row = self._kept.get(key)
        return decodings.decoding(row["side"], row["rows"]) if row is not None and row["prompt_ids"] == prompt else None

    def put(self, key: Key, prompt: list[int], decoding: Decoding) -> None:
        names = dict(zip(("prompt", "turn", "repeat"), key, strict=True))
        row = names | {
            "prompt_ids": prompt,
            "side": decodings.side(decoding, ""),
            "rows": list(decodings.rows(decoding)),
        }
        with writing(self.file):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.file}.lock"), self.file.open("ab+") as file:
                file.write(_end_of_line(file) + json.dumps(row).encode() + b"\n")


def _end_of_line(file: BinaryIO) -> bytes:
    """What ends the last line, if a process was killed while it wrote it."""
    if not file.tell():
        return b""
    file.seek(-1, os.SEEK_END)
    return b"" if file.read(1) == b"\n" else b"\n"


def _key(row: Mapping[str, Any]) -> Key:
    return row["prompt"], row["turn"], row["repeat"]
