"""A run that is interrupted, ended or killed at any moment; `benchmarks/interrupts.py` tries many more moments."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_run import ROOT, SHORT, main

from duoexp import runner
from duoexp.sweep import jobs


def test_a_run_stopped_at_any_moment_leaves_what_can_be_gone_on_with_and_nobody_alive(tmp_path: Path) -> None:
    """And ends, gone on with, as if it had never been stopped."""
    command = [sys.executable, "benchmarks/interrupts.py", "--warm", "--count", "3", "--folder", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 3, (done.stdout, done.stderr)


def caught(*_: Any) -> Any:
    """As a library does that is interrupted in the middle of something, and trips over it while it cleans up."""
    try:
        raise KeyboardInterrupt
    finally:
        raise AttributeError("half done")


@pytest.mark.parametrize("place", ("prepare", "_repeat"))
def test_an_interrupt_that_a_library_makes_an_error_of_stays_one(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, place, caught)
    assert main(monkeypatch, *SHORT) == 130
    assert "half done" not in capsys.readouterr().err
    folders = list(tmp_path.glob("outputs/runs/default/*"))
    assert [runner.summary_of(folder)["status"] for folder in folders] == ["interrupted"] * (place == "_repeat")


def test_such_an_interrupt_ends_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "prepare", caught)
    assert main(monkeypatch, "-m", *SHORT, "draft.budget=1,2") == 130
    [folder] = tmp_path.glob("outputs/sweeps/default/*")
    assert [job.status for job in jobs(folder)] == ["interrupted"]
