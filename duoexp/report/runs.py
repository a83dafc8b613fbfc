"""Run folders, read back: what a run recorded becomes the decodings that it measured."""

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from duoexp.config import InputError
from duoexp.decodings import decoding
from duoexp.metrics import Pair

READ = (
    "status",
    "identical",
    "ties",
    "answers",
    "failed",
    "hardware",
    "notes",
    "target_idle",
    "draft_idle",
)  # of a summary


@dataclass(frozen=True)
class Answer:
    """One turn of a prompt. `pieces`: the text that each id of the method's answer adds; none in runs of old."""

    turn: int
    prompt_tokens: int
    text: str
    pieces: tuple[str, ...]
    pair: Pair

    @property
    def drafted(self) -> list[bool]:
        """For each id of the answer whether the draft model wrote it; if not, it is the target's own."""
        rounds = self.pair.method.rounds
        return [place < each.accepted for each in rounds for place in range(len(each.tokens))]


@dataclass(frozen=True)
class Run:
    folder: Path
    config: Mapping[str, Any]
    machine: Mapping[str, Any]
    summary: Mapping[str, Any]
    answers: tuple[Answer, ...]

    @property
    def pairs(self) -> list[Pair]:
        return [answer.pair for answer in self.answers]


@dataclass(frozen=True)
class LeftOut:
    """A run whose figures do not stand, and why."""

    folder: Path
    reason: str


def collect(folders: Sequence[Path]) -> tuple[list[Run], list[LeftOut]]:
    """Every run at or below `folders`, the oldest first. Raises InputError where there is none."""
    runs: list[Run] = []
    left_out: list[LeftOut] = []
    for folder in dict.fromkeys(each for given in folders for each in _below(given)):
        try:
            run = read(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            left_out.append(LeftOut(folder, f"cannot be read: {type(error).__name__}: {error}"))
            continue
        if reason := _fault(run):
            left_out.append(LeftOut(folder, reason))
        else:
            runs.append(run)
    if not runs and not left_out:
        raise InputError(f"{', '.join(map(str, folders))} holds no run; give the folder of a run, or one above it")
    return sorted(runs, key=lambda run: (run.folder / "config.yaml").stat().st_mtime_ns), left_out


def read(folder: Path) -> Run:
    """The run of a folder. Its summary is empty when the run was killed before it wrote one."""
    rounds = defaultdict(list)
    for row in _lines(folder / "rounds.jsonl"):
        rounds[_key(row)].append(row)
    return Run(
        folder,
        OmegaConf.to_container(OmegaConf.load(folder / "config.yaml")),  # type: ignore[arg-type]
        _json(folder / "machine.json"),
        _json(folder / "summary.json"),
        tuple(_answer(row, rounds[_key(row)]) for row in _lines(folder / "prompts.jsonl")),
    )


def _below(given: Path) -> Iterator[Path]:
    if not given.is_dir():
        raise InputError(f"{given} is not a folder; give the folder of a run, or one above it")
    for folder, inside, files in os.walk(given):
        if "config.yaml" in files and {"summary.json", "prompts.jsonl", "run.log"} & set(files):
            inside.clear()  # what a tracker keeps below a run is no run
            if "answers.jsonl" not in files:  # of a comparison, which is a table by itself
                yield Path(folder).resolve()
        inside.sort()


def _fault(run: Run) -> str | None:
    summary = run.summary
    if not summary:
        return f"did not come to its end; {len(run.answers)} answers are on disk"
    if lacking := [key for key in READ if key not in summary]:
        return f"was recorded by another version of the program: its summary has no {', '.join(lacking)}"
    if summary["status"] != "finished":
        why = f": {summary['error']}" if summary.get("error") else f" after {len(run.answers)} answers"
        return f"{summary['status']}{why}"
    if summary["identical"] is False and not summary.get("peer"):
        return "an answer was not the target's own"
    return None if run.answers else "none of its prompts could be run"


def _key(row: Mapping[str, Any]) -> tuple[str, int, int]:
    return row["prompt"], row["turn"], row.get("repeat", 0)  # a run of old has one


def _answer(row: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> Answer:
    method = row["method"]
    pair = Pair(row["prompt"], row["kind"], decoding(row["baseline"], ()), decoding(method, rounds))
    return Answer(row["turn"], row["prompt_tokens"], method["text"], tuple(method.get("pieces", ())), pair)


def _json(file: Path) -> dict[str, Any]:
    """Empty where the file is not there."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file.read_text().splitlines() if file.exists() else (), start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} of {file.name} is no JSON") from error
