"""What breaks a run from outside: a target that raises, a disk that fills up, folders that cannot be written.

Each time the run says why in a sentence, its files can be read, and gone on with it ends as if nothing had happened.
"""

import ctypes
import os
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import CONF
from hydra import compose, initialize_config_dir
from test_run import ROOT, SHORT, main, module_of

from duoexp import baseline, decodings, runner
from duoexp.config import register
from duoexp.lm.causal_lm import CachedLM
from duoexp.record import lines

interrupts = module_of(ROOT / "benchmarks" / "interrupts.py")

RUN = (*SHORT, "task.limit=4", "draft=fixed", "draft.budget=6", "resume=true", "tracker=none")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The facts of a run that nothing broke, and how many passes of a model it took."""
    folder, passes = tmp_path_factory.mktemp("whole"), 0
    logits = CachedLM.logits

    def counted(self: CachedLM, *args: Any, **kwargs: Any) -> Any:
        nonlocal passes
        passes += 1
        return logits(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(CachedLM, "logits", counted)
        assert main(patch, *RUN, "name=whole") == 0
    return interrupts.facts(folder, "whole"), passes


def goes_on(here: Path, whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a broken run left can be read, and the same command ends it."""
    interrupts.check_files(here, "broken", 0)
    assert main(monkeypatch, *RUN, "name=broken") == 0
    assert interrupts.facts(here, "broken") == whole[0]


def sentence(capsys: pytest.CaptureFixture[str], *words: str) -> None:
    [told] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert all(word in told for word in words), told


# The target


@pytest.mark.parametrize("seed", range(3))
def test_a_target_that_raises_at_any_pass(
    seed: int, here: Path, whole: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = random.Random(seed).randrange(whole[1])
    logits = CachedLM.logits

    def raising(self: CachedLM, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("out of memory")
        return logits(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(CachedLM, "logits", raising)
        assert main(patch, *RUN, "name=broken") == 1
    [folder] = (here / "outputs" / "runs" / "broken").iterdir()
    summary = runner.summary_of(folder)
    assert summary["status"] == "failed" and "out of memory" in summary["error"]
    assert "RuntimeError: out of memory" in (folder / "run.log").read_text(), "with its traceback"
    sentence(capsys, "out of memory")
    goes_on(here, whole, monkeypatch)


# The disk


@contextmanager
def smallest_files(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes, which a program meets as it meets a full disk: in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", (100, 4000, 12000))
def test_a_disk_that_fills_up(
    size: int, here: Path, whole: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with smallest_files(size):
        assert main(monkeypatch, *RUN, "name=broken") == 2
    sentence(capsys, "output_dir: ", "cannot be written (File too large)", "make room")
    goes_on(here, whole, monkeypatch)


# Rights


@pytest.fixture
def bound() -> Iterator[None]:
    """Takes from this thread the power to write where the mode of a file forbids it, if it has that: root has."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # linux/capability.h: version 3, this thread
    before, without = (ctypes.c_uint32 * 6)(), (ctypes.c_uint32 * 6)()
    if libc.capget(header, before) or libc.capget(header, without):
        pytest.skip("this system has no capabilities to take away")
    without[0] &= ~0b110  # the effective ones: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, without) == 0
    yield
    assert libc.capset(header, before) == 0


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    mode = folder.stat().st_mode
    folder.chmod(0o555)
    try:
        yield
    finally:
        folder.chmod(mode)


@pytest.mark.parametrize("place", (".", "outputs", "outputs/runs/broken", "the run"))
def test_a_folder_that_cannot_be_written(
    place: str,
    here: Path,
    whole: Any,
    bound: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        run = runner.prepare(compose("config", overrides=[*RUN, "name=broken"]), CONF / "hardware").folder
    folder = run if place == "the run" else here / place
    folder.mkdir(parents=True, exist_ok=True)
    with read_only(folder):
        assert main(monkeypatch, *RUN, "name=broken") == 2
    sentence(capsys, "output_dir: ", "Permission denied", "give another output_dir")
    goes_on(here, whole, monkeypatch)


def test_a_folder_that_becomes_read_only_during_the_run(
    here: Path, whole: Any, bound: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a file system does that meets an error of its disk."""
    turns = runner.Session.turns

    def closing(self: Any, *args: Any) -> Any:
        yield from turns(self, *args)
        [folder] = (here / "outputs" / "runs" / "broken").iterdir()
        folder.chmod(0o555)

    with monkeypatch.context() as patch:
        patch.setattr(runner.Session, "turns", closing)
        assert main(patch, *RUN, "name=broken") == 2
    sentence(capsys, "summary.json cannot be written (Permission denied)")
    [folder] = (here / "outputs" / "runs" / "broken").iterdir()
    assert len(lines(folder / "prompts.jsonl")) == whole[0][1], "what was open could be written"
    folder.chmod(0o755)
    goes_on(here, whole, monkeypatch)


def test_a_sweep_whose_folder_cannot_be_written(
    here: Path, bound: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "outputs").mkdir()
    with read_only(here / "outputs"):
        assert main(monkeypatch, "-m", *RUN, "draft.budget=1,2") == 2
    sentence(capsys, "outputs", "Permission denied", "output_dir")


def test_a_cache_that_cannot_be_written_when_times_were_measured(
    here: Path, bound: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = Path(os.environ["DUOEXP_CACHE"])
    (cache / "profiles").mkdir(exist_ok=True)
    with read_only(cache / "profiles"):
        settings = ("draft.budget=measured", "profile.fresh=true", "hardware.worker=inline")
        assert main(monkeypatch, *RUN, *settings, "name=broken") == 2
    sentence(capsys, str(cache / "profiles"), "Permission denied", "DUOEXP_CACHE")


# What processes that died left half


@pytest.mark.parametrize("half", ('{"prompt": "a", "tu', "\0\0\0", '{"prompt": "\N{GREEK SMALL LETTER ALPHA}'))
def test_half_a_line_of_a_kept_baseline_costs_that_line_alone(half: str, tmp_path: Path) -> None:
    kept = baseline.Cached(tmp_path, {})
    decoding = decodings.decoding(
        {"ids": [1, 2], "reason": "length", "ttft_s": 0.5, "duration_s": 1.0, "cpu_j": None, "gpu_j": None}, []
    )
    kept.put(("a", 0, 0), [1], decoding)
    with kept.file.open("ab") as file:
        file.write(half.encode()[:-1])
    baseline.Cached(tmp_path, {}).put(("b", 0, 0), [1], decoding)
    again = baseline.Cached(tmp_path, {})
    assert all(again.get((name, 0, 0), [1]) == decoding for name in ("a", "b"))
