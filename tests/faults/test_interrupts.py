"""A run that is interrupted, ended or killed at any moment; `benchmarks/interrupts.py` tries many more moments."""

import os
import subprocess
import sys
from pathlib import Path

from test_run import ROOT


def test_a_run_stopped_at_any_moment_leaves_what_can_be_gone_on_with_and_nobody_alive(tmp_path: Path) -> None:
    """And ends, gone on with, as if it had never been stopped."""
    command = [sys.executable, "benchmarks/interrupts.py", "--warm", "--count", "4", "--folder", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 4, (done.stdout, done.stderr)
