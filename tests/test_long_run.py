"""What a long run needs, in small; `benchmarks/long_run.py` is the long one."""

import gc
import json
import random
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import engine, inline, prompt_of
from test_run import ROOT, SHORT, main, module_of
from test_sweep import fake, here, records  # noqa: F401

from duoexp import sweep

long_run = module_of(ROOT / "benchmarks" / "long_run.py")


def test_the_order_of_prompts_changes_no_token_and_no_accepted_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question_id": number, "category": "prompt", "turns": [long_run.text(number)]} for number in range(12)]
    found = []
    for name in ("in_order", "shuffled"):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = ("task=prompt", f"task.path={name}.jsonl", "task.limit=null", "draft=dynamic", "draft.budget=6")
        assert main(monkeypatch, *SHORT, *settings, f"name={name}") == 0
        [run] = tmp_path.glob(f"outputs/runs/{name}/*")
        found.append(long_run.facts(run))
        random.Random(0).shuffle(rows)
    assert found[0] == found[1] and len(found[0]) == 12


@pytest.mark.parametrize("name", ("dynamic", "lookahead"))
def test_an_answer_leaves_nothing_behind(name: str) -> None:
    """After the third, no further tensor and no further byte of one is alive, however many answers follow."""
    method, sizes = inline(f"draft={name}"), []
    for number in range(6):
        engine().decode(method, prompt_of(40 + number % 2, seed=number))
        if number in (3, 5):  # after as long a prompt
            sizes.append(alive())
    assert sizes[0] == sizes[1]


def alive() -> tuple[int, int]:
    gc.collect()
    found = {id(each): each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)}
    return len(found), sum(each.numel() for each in found.values())


def test_a_job_leaves_no_file_and_no_thread_open(
    fake: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    left: list[Any] = []
    write, process = sweep._write, psutil.Process()

    def counted(*args: Any) -> None:
        write(*args)
        gc.collect()
        left.append((process.num_fds(), process.num_threads(), len(process.children(recursive=True))))

    monkeypatch.setattr(sweep, "_write", counted)
    assert main(monkeypatch, "-m", *SHORT, "draft.budget=1,6,7,8,9,10", "sweep.report=false") == 0
    assert len(left) == len(records(fake)) == 6
    assert len(set(left[2:])) == 1, left
