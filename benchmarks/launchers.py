"""Runs a small sweep under every launcher, and under the search for the best speedup, and checks what comes of it.

    pip install -e ".[joblib,slurm,ray,optuna]" && python benchmarks/launchers.py [joblib submitit_local ray optuna]

One of its jobs fails on purpose. The cluster of Ray has two nodes, both of this machine. It takes some minutes, so it
is not among the tests.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SMALL = (
    *("model=tiny", "hardware=cpu_split", "task.limit=1", "sampling.max_new_tokens=8", "tracker=offline"),
    "sweep.report=false",
)
# -1 is refused, so that one job fails.
GRID = ("-m", "draft=vanilla", "draft.budget=2,4,-1", *SMALL)


def main(names: Sequence[str]) -> None:
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            LAUNCHERS[name](Path(folder))
        print(f"{name}: as it should be", flush=True)


def joblib(folder: Path) -> None:
    """Two jobs at once, each on cores of its own."""
    code, out = duoexp(folder, *GRID, "hydra/launcher=joblib", "sweep.slots=2", "hardware=cpu")
    check_grid(folder, code, out)
    cores = [set(machine["cpu"]["cores"]) for machine in read(folder, "machine.json")]
    assert all(len(each) == len(os.sched_getaffinity(0)) // 2 for each in cores), cores


def submitit_local(folder: Path) -> None:
    check_grid(folder, *duoexp(folder, *GRID, "hydra/launcher=submitit_local"))


def ray(folder: Path) -> None:
    """An existing cluster of two nodes."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    try:
        address = f"hydra.launcher.ray.init.address='{cluster.address}'"
        check_grid(folder, *duoexp(folder, *GRID, "hydra/launcher=ray", address))
    finally:
        cluster.shutdown()


def optuna(folder: Path) -> None:
    """Three trials; the best is the one with the largest speedup."""
    space = "hydra.sweeper.params={draft.budget: 'range(1,9)'}"
    settings = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.sampler.seed=1", space)
    code, out = duoexp(folder, "-m", "draft=vanilla", *SMALL, *settings)
    assert code == 0, out
    [result] = folder.glob("outputs/sweeps/*/*/optimization_results.yaml")
    speedups = [job["speedup"] for job in jobs(folder)]
    assert f"best_value: {max(speedups)}" in result.read_text(), (result.read_text(), speedups)


LAUNCHERS = {"joblib": joblib, "submitit_local": submitit_local, "ray": ray, "optuna": optuna}


def duoexp(folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit code, and all that was printed."""
    paths = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "duoexp", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    return done.returncode, done.stdout


def check_grid(folder: Path, code: int, out: str) -> None:
    """Two jobs done, each with a run and a W&B run of its own; the third failed, which is told."""
    assert code == 1 and "draft.budget=-1 is out of range" in out, out
    assert [job["status"] for job in jobs(folder)] == ["done", "done", "failed"], out
    runs = sorted(folder.glob("outputs/runs/default/*"))
    assert len(runs) == 2 and all(summary["identical"] for summary in read(folder, "summary.json")), out
    assert [len(list(run.glob("wandb/offline-run-*"))) for run in runs] == [1, 1], out
    assert "UserWarning" not in out, out


def jobs(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("outputs/sweeps/*/*/0*.json"))]


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob(f"outputs/runs/*/*/{name}"))]


if __name__ == "__main__":
    main(sys.argv[1:] or list(LAUNCHERS))
