"""Long runs with the tiny pair: memory stays flat, acceptance does not drift, and prompts do not influence each other.

    python benchmarks/long_run.py [--prompts 500] [--jobs 20] [--folder FOLDER]

One run over many prompts, the same in another order, and one sweep of many jobs. Every prompt has the same tokens and
the same accepted counts in both orders, so acceptance depends on the prompt alone and not on when its turn came. After
its first tenth, the draft process grows no more; the run's own process grows by what it records of each answer. After
its third job, a sweep grows no more. It takes about ten minutes.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from duoexp.record import lines

ROOT = Path(__file__).parent.parent
MIB = 2**20
SETTINGS = (
    *("model=tiny", "hardware=cpu", "hardware.worker=process", "hardware.target.threads=1", "draft=dynamic"),
    *("hardware.target.dtype=float32", "hardware.draft.dtype=float32", "draft.budget=6", "tracker=none"),
    *("task=prompt", "task.text=null", "task.limit=null", "sampling.max_new_tokens=24", "sampling.temperature=0.8"),
)
RECORD_MIB = 30 / 1024  # of an answer, which is kept to the end: some 40 passes, of half a KiB each
SLACK_MIB = 8  # of pages that the allocator takes and gives back as it likes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = given.folder or Path(made)
        prompts(folder, given.prompts)
        jobs(folder, given.jobs)


def prompts(folder: Path, count: int) -> None:
    """Two runs over the same prompts, the second in another order."""
    rows = [{"question_id": number, "category": "prompt", "turns": [text(number)]} for number in range(count)]
    accepted = {}
    for name in ("in_order", "shuffled"):
        if name == "shuffled":
            random.Random(0).shuffle(rows)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        memory = watched(
            folder, [*SETTINGS, f"task.path={name}.jsonl", f"name={name}"], lambda name=name: answers(folder, name)
        )
        [run] = folder.glob(f"outputs/runs/{name}/*")
        accepted[name] = facts(run)
        tell(name, memory, run, count)
    assert len(accepted["in_order"]) == count and accepted["in_order"] == accepted["shuffled"], "the order matters"
    print(f"{count} prompts have the same tokens and accepted counts in both orders", flush=True)


def text(number: int) -> str:
    dice = random.Random(number)
    return "".join(dice.choices("abcdef ", k=dice.randint(3, 120)))


def facts(run: Path) -> dict[str, Any]:
    """Of each prompt: the tokens of both sides, and what each pass accepted."""
    found: dict[str, Any] = {
        row["prompt"]: [row["baseline"]["ids"], row["method"]["ids"]] for row in lines(run / "prompts.jsonl")
    }
    for row in lines(run / "rounds.jsonl"):
        found[row["prompt"]].append([row["tokens"], row["accepted"], row["rejected"], row["verified"]])
    return found


def tell(name: str, memory: dict[int, tuple[float, float]], run: Path, count: int) -> None:
    """Prints memory and acceptance in tenths of the run, and checks the first."""
    rounds = lines(run / "rounds.jsonl")
    places = {row["prompt"]: place for place, row in enumerate(lines(run / "prompts.jsonl"))}
    for tenth in range(10):
        part = [row for row in rounds if places[row["prompt"]] * 10 // count == tenth]
        tau = sum(len(row["tokens"]) for row in part) / len(part)
        own, draft = memory[max(done for done in memory if done <= (tenth + 1) * count // 10)]
        print(f"{name}, tenth {tenth + 1}: run {own:.0f} MiB, draft process {draft:.0f} MiB, tau {tau:.3f}", flush=True)
    first, last = (memory[max(done for done in memory if done <= part * count // 10)] for part in (1, 10))
    assert last[1] - first[1] <= SLACK_MIB, "the draft process grew"
    assert last[0] - first[0] <= SLACK_MIB + RECORD_MIB * count, "the run grew by more than it records"


def jobs(folder: Path, count: int) -> None:
    seeds = ",".join(map(str, range(count)))
    arguments = ["-m", *SETTINGS, "task.path=few.jsonl", "name=sweep", "sweep.report=false", f"sampling.seed={seeds}"]
    (folder / "few.jsonl").write_text(json.dumps({"question_id": 0, "category": "prompt", "turns": ["a"]}) + "\n")
    memory = watched(folder, arguments, lambda: len(list(folder.glob("outputs/sweeps/sweep/*/[0-9]*.json"))))
    print("the sweep's process after each job, in MiB:", [round(own) for own, _ in memory.values()], flush=True)
    ended = [json.loads(file.read_text())["status"] for file in folder.glob("outputs/sweeps/sweep/*/[0-9]*.json")]
    assert ended == ["done"] * count, ended
    third, last = memory[min(3, count)][0], max(own for own, _ in memory.values())
    assert last - third <= SLACK_MIB, "the sweep grew"


def answers(folder: Path, name: str) -> int:
    return sum(len(file.read_bytes().splitlines()) for file in folder.glob(f"outputs/runs/{name}/*/prompts.jsonl"))


def watched(folder: Path, arguments: Sequence[str], done: Callable[[], int]) -> dict[int, tuple[float, float]]:
    """Runs it to its end; for each count that `done` had, the memory of its process and of its children in MiB.

    As it was when the count was reached: at the last one the run ends.
    """
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    memory: dict[int, tuple[float, float]] = {}
    with (folder / "out.txt").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "duoexp", *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths},
            stdout=out,
            stderr=out,
        )
        run = psutil.Process(process.pid)
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):  # it has just ended
                now = (resident(run), sum(resident(each) for each in run.children(recursive=True)))
                memory.setdefault(done(), now)
            time.sleep(0.2)
    assert process.returncode == 0, (folder / "out.txt").read_text()
    return memory


def resident(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / MIB


if __name__ == "__main__":
    main()
