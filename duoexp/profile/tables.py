"""Measured times of one set-up: a line each, the costs that budgets are derived from, and the file that keeps them."""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from duoexp import machine
from duoexp.hardware import Hardware
from duoexp.lm import disk_cache
from duoexp.lm.load import Model

PASSES = ("target", "draft")  # sides with a time for each width; "message" has one alone
PREFILLS = ("target_prefill", "draft_prefill")


@dataclass(frozen=True)
class Timing:
    """Seconds of one pass, over `samples` of them. `width`: tokens of a target pass, sequences of a draft pass."""

    side: str  # target, draft, message (a question and its answer), target_prefill, draft_prefill
    beside: bool  # while the other side was at work
    context: int  # tokens before the pass
    width: int
    median_s: float
    low_s: float  # the tenth and the ninetieth percentile
    high_s: float
    samples: int

    @property
    def place(self) -> tuple[str, bool, int, int]:
        return self.side, self.beside, self.context, self.width

    @classmethod
    def of(cls, side: str, beside: bool, context: int, width: int, seconds: Sequence[float]) -> "Timing":
        low, median, high = (float(value) for value in np.percentile(seconds, [10, 50, 90]))
        return cls(side, beside, context, width, median, low, high, len(seconds))


@dataclass(frozen=True)
class Costs:
    """Seconds, for any width: linear between the measured ones, and beyond the last one at its slope."""

    target: Mapping[int, float]  # by tokens of the pass
    draft: Mapping[int, float]  # by sequences
    message_s: float = 0.0  # a question and its answer

    def target_s(self, width: int) -> float:
        return _line(self.target, width)

    def draft_s(self, passes: Sequence[int]) -> float:
        """Of a draft: a pass for each entry, over so many sequences, and the message that brings it."""
        return self.message_s + sum(_line(self.draft, rows) for rows in passes)


@dataclass
class Profile:
    """The times of the set-up that `key` describes."""

    key: dict[str, Any]
    timings: dict[tuple[str, bool, int, int], Timing] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        """Where the cache keeps it: a name that no other key has."""
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:16]
        return disk_cache.root() / "profiles" / f"{digest}.json"

    def add(self, timing: Timing) -> None:
        self.timings[timing.place] = timing

    def of(self, side: str, beside: bool, context: int) -> dict[int, float]:
        """Width to seconds; of the passes alone where none was measured beside the other side.

        A pass takes no less than a narrower one does: where it was measured so, the narrower one was disturbed.
        """
        for mode in dict.fromkeys((beside, False)):
            found = [each for each in self.timings.values() if each.place[:3] == (side, mode, context)]
            if found:
                times, least = dict[int, float](), inf
                for each in sorted(found, key=lambda each: -each.width):
                    times[each.width] = least = min(least, each.median_s)
                return times
        return {}

    def costs(self, beside: bool, context: int) -> Costs:
        target, draft, message = (self.of(side, beside, context) for side in (*PASSES, "message"))
        return Costs(target, draft, message.get(1, 0.0))

    def as_json(self) -> dict[str, Any]:
        return {"key": self.key, "timings": [asdict(self.timings[place]) for place in sorted(self.timings)]}

    def save(self) -> None:
        """Into the cache, whole or not at all. Raises InputError when the cache cannot be written."""
        file = self.file
        with disk_cache.writing(file.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{file}.lock"):
                draft = file.with_suffix(".tmp")
                draft.write_text(json.dumps(self.as_json(), indent=1) + "\n")
                draft.rename(file)

    @classmethod
    def kept(cls, key: dict[str, Any]) -> "Profile":
        """What the cache holds for exactly this key; else an empty one. Another machine's has another key."""
        profile = cls(key)
        try:
            found = json.loads(profile.file.read_text())
            if found["key"] == json.loads(json.dumps(key)):
                for each in found["timings"]:
                    profile.add(Timing(**each))
            return profile
        except (OSError, ValueError, TypeError, KeyError):  # none there, or a file of another version: measured anew
            return cls(key)


def key_of(hardware: Hardware, engine: str, target: Model, draft: Model | None) -> dict[str, Any]:
    """All that times depend on: the machine, the places of both models, their files, the engine, the versions."""
    facts = machine.describe()
    cpu = {name: value for name, value in facts["cpu"].items() if name not in ("load", "governors")}
    gpus = [{name: value for name, value in gpu.items() if name != "used_bytes"} for gpu in facts["gpus"]]
    node = hashlib.sha256(platform.node().encode()).hexdigest()[:12]  # tells machines apart, and does not name them
    return {
        "machine": {"node": node, "cpu": cpu, "memory_bytes": facts["memory"]["total_bytes"], "gpus": gpus},
        "versions": facts["versions"],
        "places": {"target": asdict(hardware.target), "draft": asdict(hardware.draft), "worker": hardware.worker},
        "engine": engine,
        "target": _files(target),
        "draft": _files(draft) if draft else None,
    }


def _files(model: Model) -> dict[str, Any]:
    """The checkpoint, and of a local one the size and the time of each file."""
    folder = Path(model.checkpoint.path)
    files = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return {"source": model.source, "checkpoint": asdict(model.checkpoint), "files": stats}


def _line(times: Mapping[int, float], width: int) -> float:
    if width in times:
        return times[width]
    widths = sorted(times)
    if width > widths[-1] and len(widths) > 1:
        first, last = widths[-2:]
        return times[last] + max(0.0, (times[last] - times[first]) / (last - first)) * (width - last)
    return float(np.interp(width, widths, [times[each] for each in widths]))
