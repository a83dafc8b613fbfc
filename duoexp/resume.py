"""What an earlier process of the same run left, read back, so that the run goes on with its next prompt."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from duoexp import decodings
from duoexp.identity import Comparison
from duoexp.meters import Conditions
from duoexp.metrics import Pair
from duoexp.record import Record, lines
from duoexp.summary import Answer
from duoexp.tasks import Prompt

Key = tuple[str, int, int]  # prompt, turn, repeat


def resumed(record: Record, prompts: Sequence[Prompt], machine: Mapping[str, Any]) -> list[Answer]:
    """The answers to the prompts that have all of theirs; the lines of any other are dropped from the files.

    Nothing is taken over from a run that came to its end, since its result did not stand, or from a machine of another
    kind. machine: the description of this one.
    """
    by_id = {prompt.id: prompt for prompt in prompts}
    answers = lines(record.folder / "prompts.jsonl")
    counts = Counter((row["prompt"], row["repeat"]) for row in answers)
    whole = {(name, repeat) for (name, repeat), count in counts.items() if count == len(by_id[name].turns)}
    if _ended(record.folder) or not _alike(record.folder, machine):
        whole = set()
    rounds = {name: _by_answer(record.folder / f"{name}.jsonl") for name in ("rounds", "baseline")}
    record.keep(lambda row: (row["prompt"], row["repeat"]) in whole)
    return [_answer(row, by_id[row["prompt"]], rounds) for row in answers if (row["prompt"], row["repeat"]) in whole]


def _ended(folder: Path) -> bool:
    return (folder / "summary.json").is_file() and _json(folder / "summary.json")["status"] == "finished"


def _alike(folder: Path, machine: Mapping[str, Any]) -> bool:
    """Whether this machine has the processor and the GPUs of the one that was here before."""
    if not (folder / "machine.json").is_file():
        return True
    before = _json(folder / "machine.json")
    kinds = [(each["cpu"]["model"], [gpu["name"] for gpu in each["gpus"]]) for each in (before, machine)]
    return kinds[0] == kinds[1]


def _json(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def _by_answer(file: Path) -> dict[Key, list[dict[str, Any]]]:
    found: dict[Key, list[dict[str, Any]]] = defaultdict(list)
    for row in lines(file):
        found[_key(row)].append(row)
    return found


def _key(row: dict[str, Any]) -> Key:
    return row["prompt"], row["turn"], row["repeat"]


def _answer(row: dict[str, Any], prompt: Prompt, rounds: dict[str, dict[Key, list[dict[str, Any]]]]) -> Answer:
    sides = {
        name: decodings.decoding(row[name], rounds[file][_key(row)])
        for name, file in (("baseline", "baseline"), ("method", "rounds"))
    }
    pair = Pair(prompt.id, prompt.kind, sides["baseline"], sides["method"])
    compared = row["comparison"]
    return Answer(
        prompt,
        row["turn"],
        row["repeat"],
        row["prompt_ids"],
        row["baseline"]["text"],
        pair,
        None if compared is None else Comparison(**compared),
        Conditions(**row["conditions"] | {"throttled": tuple(row["conditions"]["throttled"])}),
        row["reused"],
    )
