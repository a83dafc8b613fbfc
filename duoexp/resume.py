"""What an earlier process of the same run left, read back, so that the run goes on with its next prompt."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from duoexp import decodings
from duoexp.identity import Comparison
from duoexp.metrics import Pair
from duoexp.record import Record, lines
from duoexp.summary import Answer
from duoexp.tasks import Prompt

Key = tuple[str, int, int]  # prompt, turn, repeat


def resumed(record: Record, prompts: Sequence[Prompt], repeats: int) -> list[Answer]:
    """The answers to the prompts that have all of theirs; the lines of any other are dropped from the files."""
    by_id = {prompt.id: prompt for prompt in prompts}
    answers = lines(record.folder / "prompts.jsonl")
    rounds = {name: _by_answer(record.folder / f"{name}.jsonl") for name in ("rounds", "baseline")}
    counts: dict[tuple[str, int], int] = defaultdict(int)
    for row in answers:
        counts[row["prompt"], row["repeat"]] += 1
    whole = {(name, repeat) for (name, repeat), count in counts.items() if count == len(by_id[name].turns)}
    record.keep(lambda row: (row["prompt"], row["repeat"]) in whole)
    return [_answer(row, by_id[row["prompt"]], rounds) for row in answers if (row["prompt"], row["repeat"]) in whole]


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
    )
