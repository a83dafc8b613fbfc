"""Facts of the machine: that each is what it says, and that none is made up."""

import json
import os
import socket
import subprocess
import time

import pytest
import torch

from duoexp import machine
from duoexp.machine import describe, peak_memory, reset_peak_memory
from duoexp.meters import Setup


def test_description_is_strict_json_without_the_host_name():
    got = describe()
    text = json.dumps(got, allow_nan=False)
    assert json.loads(text) == got
    assert socket.gethostname() not in {word.strip('",') for word in text.split()}
    assert got["threads"]["torch"] == torch.get_num_threads()
    assert got["versions"]["torch"] == torch.__version__
    if hasattr(os, "sched_getaffinity"):
        assert got["cpu"]["cores"] == sorted(os.sched_getaffinity(0))


def test_description_holds_what_a_gpu_is(monkeypatch):
    class Properties:
        name, total_memory, major, minor = "NVIDIA H200", 150 * 10**9, 9, 0

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(machine, "gpus", lambda: 1)
    monkeypatch.setattr(machine, "_nvidia", lambda device: {"driver": "1", "used_bytes": 0})
    (gpu,) = describe()["gpus"]
    assert (gpu["device"], gpu["name"], gpu["capability"], gpu["driver"]) == ("cuda:0", "NVIDIA H200", "9.0", "1")


def test_driver_is_that_of_the_gpu_of_the_same_uuid(monkeypatch):
    class Properties:
        uuid = "bbb"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(machine, "_output", lambda *command: "GPU-aaa, 570.1, 100\nGPU-bbb, 570.1, 2048")
    assert machine._nvidia("cuda:0") == {"driver": "570.1", "used_bytes": 2 * 2**30}
    assert machine.in_use_bytes("cuda:0") == 2 * 2**30
    monkeypatch.setattr(machine, "_output", lambda *command: None)
    assert machine._nvidia("cuda:0") == {"driver": None, "used_bytes": None}


def test_tf32_is_read_under_either_of_its_names():
    class Mixed:
        fp32_precision = "tf32"

        @property
        def allow_tf32(self):
            raise RuntimeError("mix of the legacy and new APIs")

    assert machine._tf32(Mixed())
    assert not machine._tf32(type("Old", (), {"allow_tf32": False}))


def test_git_tells_commit_and_dirt_of_the_package_alone(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert machine._git(package)["commit"] is None and machine._git(package)["reason"]

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)

    git("init", "-q")
    git("add", ".")
    assert "no commit" in machine._git(package)["reason"]
    git("commit", "-qm", "first")
    stranger = tmp_path / "stranger"  # inside a repository that does not hold it: an environment in a user's project
    stranger.mkdir()
    (stranger / "__init__.py").write_text("")
    assert machine._git(stranger)["commit"] is None
    assert len(machine._git(package)["commit"]) == 40 and machine._git(package)["dirty"] is False
    (tmp_path / "notes.txt").write_text("not of the package")
    assert machine._git(package)["dirty"] is False
    (package / "__init__.py").write_text("x = 1")
    assert machine._git(package) == {**machine._git(package), "dirty": True, "reason": None}


@pytest.mark.skipif(not machine._peak_resets(), reason="this system does not reset a process's peak")
def test_peak_memory_is_each_jobs_own():  # E7
    reset_peak_memory()
    before = peak_memory()["rss_bytes"]
    torch.ones(50_000_000).sum()  # 200 MB, given back to the system at once
    peak = peak_memory()["rss_bytes"]
    reset_peak_memory()
    after = peak_memory()
    assert peak - before > 180e6 and after["rss_bytes"] < peak - 100e6 and after["note"] is None


def test_peak_memory_says_when_it_is_the_whole_lifes(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "CLEAR_REFS", tmp_path / "none")
    reset_peak_memory()
    got = peak_memory()
    assert got["rss_bytes"] > 50e6 and "whole life" in got["note"]


def test_peak_gpu_memory_is_reset_on_every_gpu(monkeypatch):
    peaks = {0: 5, 1: 7}
    monkeypatch.setattr(machine, "gpus", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peaks.get)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks.update({device: 0}))
    assert peak_memory()["gpu_bytes"] == {"cuda:0": 5, "cuda:1": 7}
    reset_peak_memory()
    assert peak_memory()["gpu_bytes"] == {"cuda:0": 0, "cuda:1": 0}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert peak_memory()["gpu_bytes"] == {}


@pytest.mark.parametrize(("text", "cores"), [("150000 100000", 1.5), ("max 100000", None), (None, None)])
def test_quota_is_read_as_cores(monkeypatch, text, cores):
    monkeypatch.setattr(machine, "read", lambda path: text)
    assert machine.quota() == cores


def test_a_core_that_is_taken_away_and_a_clock_that_is_set_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(os.getpid())
    assert setup.changes() == []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5} if process else {7})
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    told = " ".join(setup.changes())
    assert "cores of the target" in told and "[7]" in told
    assert "cores of the draft" in told and "[5]" in told
    assert "set by -3600" in told
