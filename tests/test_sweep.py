"""Sweeps: how their jobs end, what a failure does to the others, and how one goes on where another process ended."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import CONF, composed, planned
from hydra import compose, initialize_config_dir
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf
from test_run import ROOT, SHORT, Listening, lines, main, strict

from duoexp import child, estimate, runner, slots, sweep, templates
from duoexp.config import SWEEPS, Config, InputError, check, register

FILES = sorted(path.stem for path in SWEEPS.glob("*.yaml"))

# A job that takes no time: what it does depends on the budget that it is given.
FAKE = """
import json, os, signal, sys, time
budget = json.loads(sys.stdin.readline())["config"]["draft"]["budget"]
print("hello from", budget, flush=True)
if budget == 2:
    sys.exit("error: of its own")
if budget == 3:
    os._exit(7)
if budget == 4:
    os.kill(os.getpid(), signal.SIGKILL)
if budget == 5:
    time.sleep(60)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def fake(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (here / "fake.py").write_text(FAKE)
    monkeypatch.setattr(sweep, "COMMAND", (sys.executable, "-S", str(here / "fake.py")))
    monkeypatch.setattr(sweep, "_done", lambda job: replace(job, status="done"))
    return here


def records(here: Path) -> list[sweep.Job]:
    [folder] = (here / "outputs" / "sweeps").glob("*/*")
    return sweep.jobs(folder)


# How jobs end


def test_a_job_that_dies_leaves_the_others_and_the_sweep_alive(  # E8, F1, F11
    fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "-m", *SHORT, "draft.budget=-1,2,3,4,1,-3") == 1
    ended = records(fake)
    assert [job.status for job in ended] == ["failed"] * 4 + ["done", "failed"]
    assert [job.attempts for job in ended] == [0, 1, 1, 1, 1, 0], "wrong input starts no process"
    out, errors = capsys.readouterr()
    told = [line for line in errors.splitlines() if line.startswith("failed: ")]
    words = ["budget=-1 is out of range", "of its own", "exit code 7", "signal 9", "budget=-3 is out of range"]
    assert len(told) == 5 and all(word in line for word, line in zip(words, told, strict=True)), told
    assert all(f"draft.budget={value}" in line for value, line in zip((-1, 2, 3, 4, -3), told, strict=True))
    assert "hello from 2" in out and "hello from 2" in Path(str(ended[1].log)).read_text()
    assert "5 failed, 1 done" in out


def test_a_sweep_stops_at_a_failure_when_it_was_told_to(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # F1
    assert main(monkeypatch, "-m", *SHORT, "draft.budget=1,3,6", "sweep.on_error=stop") == 1
    assert [job.status for job in records(fake)] == ["done", "failed", "skipped"]


def test_a_failed_job_is_tried_again(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(monkeypatch, "-m", *SHORT, "draft.budget=3", "sweep.retries=2") == 1
    assert [(job.status, job.attempts) for job in records(fake)] == [("failed", 3)]


def test_a_job_that_takes_too_long_is_stopped(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(monkeypatch, "-m", *SHORT, "draft.budget=5,1", "sweep.timeout=2") == 1
    late, done = records(fake)
    assert late.reason == "stopped after sweep.timeout=2 s" and done.status == "done"


@pytest.mark.parametrize("setting", ("on_error=hope", "retries=-1", "timeout=0"))
def test_a_sweep_with_a_wrong_setting_starts_no_job(
    setting: str, fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "-m", *SHORT, "draft.budget=1,2", f"sweep.{setting}") == 2
    assert records(fake) == []
    assert "error: sweep." in capsys.readouterr().err


def test_an_interrupt_ends_the_job_and_is_told(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(child, "_followed", interrupted)
    assert main(monkeypatch, "-m", *SHORT, "draft.budget=5,1") == 130
    assert [job.status for job in records(fake)] == ["interrupted"]


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    """Even when the parent is killed, so that it can do nothing about it."""
    (tmp_path / "job.py").write_text(
        "import pathlib, os, time\n"
        "from duoexp.child import die_with_parent\n"
        "print(die_with_parent())\n"
        "pathlib.Path('pid').write_text(str(os.getpid()))\n"
        "try:\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    pathlib.Path('ended').touch()\n"
    )
    (tmp_path / "parent.py").write_text(
        "import sys, pathlib\n"
        "from duoexp.child import run\n"
        "run((sys.executable, 'job.py'), 'hi', pathlib.Path('log'))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "parent.py"], cwd=tmp_path, env=environment)
    until((tmp_path / "pid").exists)
    parent.kill()
    parent.wait()
    until((tmp_path / "ended").exists)


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never held"
        time.sleep(0.02)


# Going on


def test_a_killed_run_goes_on_with_its_next_prompt(  # G5
    here: Path, monkeypatch: pytest.MonkeyPatch, listening: None
) -> None:
    """Its summary is then as if it had never been stopped, but for the times."""
    settings = (*SHORT, "task.limit=4", "resume=true", "tracker.tracker._target_=test_run.Listening")
    with monkeypatch.context() as patch:
        patch.setattr(Listening, "interrupts_at", 3)
        assert main(patch, *settings) == 130
    [folder] = (here / "outputs" / "runs" / "default").iterdir()
    left = lines(folder / "prompts.jsonl")
    with (folder / "prompts.jsonl").open("a") as file:
        file.write(json.dumps(left[-1] | {"turn": 1, "prompt": "another"})[:70])  # half a line
    (folder / "rounds.jsonl").write_text((folder / "rounds.jsonl").read_text() + json.dumps({"prompt": "another"})[:9])
    assert main(monkeypatch, *settings) == 0
    assert len(list((here / "outputs" / "runs" / "default").iterdir())) == 1
    resumed = strict((folder / "summary.json").read_text())
    prompts, kept = lines(folder / "prompts.jsonl"), resumed["resumed_answers"]
    assert kept >= 2 and prompts[:kept] == left[:kept]
    assert main(monkeypatch, *settings, "name=whole", "resume=false") == 0
    [other] = (here / "outputs" / "runs" / "whole").iterdir()
    whole = strict((other / "summary.json").read_text())
    for name in ("answers", "tokens", "tau", "alpha", "alpha_by_position", "sequences", "draft_steps", "identical"):
        assert resumed[name] == whole[name], name
    keys = [(each["prompt"], each["turn"]) for each in prompts]
    assert keys == [(each["prompt"], each["turn"]) for each in lines(other / "prompts.jsonl")]
    for file in ("rounds.jsonl", "baseline.jsonl"):
        of = [[each["tokens"] for each in lines(place / file)] for place in (folder, other)]
        assert of[0] == of[1]


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Listening, "heard", [])
    yield


def test_the_same_command_again_runs_what_is_missing_or_failed_alone(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(monkeypatch, *SHORT, "resume=true", "draft.budget=1") == 0
    [folder] = (fake / "outputs" / "runs" / "default").iterdir()
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert main(monkeypatch, "-m", *SHORT, "draft.budget=1,3") == 1
    assert [(job.status, job.attempts) for job in records(fake)] == [("skipped", 0), ("failed", 1)]
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    summary = strict((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"identical": False}))
    assert not runner.stands(folder), "a result that does not stand is no result"


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ("draft.budget=3", False),
        ("sampling.seed=1", False),
        ("task.text=b", False),
        ("hardware.target.threads=null", False),
        ("repeats=2", False),
        ("output_dir=elsewhere", True),
        ("sweep.retries=3", True),
        ("tracker=offline", True),
    ],
)
def test_a_job_is_known_by_what_its_result_depends_on(change: str, same: bool) -> None:
    keys = [runner.prepare(composed(*given), CONF / "hardware").key for given in ((), (change,))]
    assert (keys[0] == keys[1]) == same


def test_a_job_is_known_by_its_code_and_by_the_words_of_its_file_of_prompts(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key() -> str:
        return runner.prepare(composed("task.text=null", "task.path=asked.txt"), CONF / "hardware").key

    (here / "asked.txt").write_text("one")
    first = key()
    (here / "asked.txt").write_text("two")
    assert key() != first
    (here / "asked.txt").write_text("one")
    assert key() == first
    monkeypatch.setattr(runner.machine, "code", lambda: "other")
    assert key() != first


# Numbers


def summary_of(here: Path, name: str) -> dict[str, Any]:
    [folder] = (here / "outputs" / "runs" / name).iterdir()
    found: dict[str, Any] = strict((folder / "summary.json").read_text())
    return found


def test_a_baseline_is_kept_for_the_same_target_on_the_same_prompts_alone(  # A9
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reused = {}
    for name, given in (
        ("first", ("draft=vanilla",)),
        ("other_method", ("draft=dynamic",)),
        ("other_prompts", ("draft=dynamic", "task.limit=1")),
        ("other_sampling", ("draft=dynamic", "sampling.max_new_tokens=11")),
        ("paired", ("draft=dynamic", "baseline=paired")),
    ):
        assert main(monkeypatch, *SHORT, "baseline=cached", f"name={name}", *given) == 0
        reused[name] = summary_of(here, name)["reused_baselines"]
    answers = summary_of(here, "first")["answers"]
    assert reused == {"first": 0, "other_method": answers, "other_prompts": 0, "other_sampling": 0, "paired": 0}
    first, other = (summary_of(here, name) for name in ("first", "other_method"))
    for figure in ("baseline_tokens_per_s", "baseline_ttft_s", "baseline_tpot_s", "target_s"):
        assert first[figure] == pytest.approx(other[figure]), figure
    assert other["identical"] is True


def test_repeats_have_seeds_of_their_own_and_are_pooled(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(monkeypatch, *SHORT, "repeats=2", "sampling.temperature=0.8", "sampling.seed=5", "draft=vanilla") == 0
    summary = summary_of(here, "default")
    [folder] = (here / "outputs" / "runs" / "default").iterdir()
    prompts = lines(folder / "prompts.jsonl")
    texts = [[each["method"]["ids"] for each in prompts if each["repeat"] == repeat] for repeat in (0, 1)]
    assert len(texts[0]) == len(texts[1]) > 0 and texts[0] != texts[1]
    assert summary["answers"] == len(prompts) and summary["prompts"] == 2 and summary["identical"] is True
    assert len(summary["speedup_by_repeat"]) == 2
    assert main(monkeypatch, *SHORT, "sampling.temperature=0.8", "sampling.seed=6", "draft=vanilla", "name=six") == 0
    [other] = (here / "outputs" / "runs" / "six").iterdir()
    assert [each["method"]["ids"] for each in lines(other / "prompts.jsonl")] == texts[1]


def test_a_summary_says_how_quiet_the_machine_was_and_what_it_drew(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(monkeypatch, *SHORT, "draft=vanilla") == 0
    summary = summary_of(here, "default")
    assert isinstance(summary["disturbed"], list) and len(summary["load_at_start"]) == 3
    assert summary["speedup_geometric_mean"] > 0
    for figure in ("cpu_joules_per_token", "gpu_joules_per_token", "baseline_cpu_joules_per_token"):
        assert summary[figure] is not None or summary["reasons"][figure]


# Before and after


def test_a_dry_run_says_what_each_job_takes_and_starts_none(
    fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ("-m", *SHORT, "draft.budget=-1,1", "model.target='random:context=101','random:layers=3,hidden=128'")
    assert main(monkeypatch, *grid, "sweep.dry_run=true") == 1, "one of them cannot be run"
    ended = records(fake)
    assert [job.status for job in ended] == ["failed", "failed", "planned", "planned"]
    assert all("memory cpu" in str(job.reason) and "at least" in str(job.reason) for job in ended[2:])
    assert "longer than the target's context" in str(ended[2].reason)
    assert not (fake / "outputs" / "runs").exists() and "hello" not in capsys.readouterr().out


def test_an_estimate_counts_the_weights_and_the_cache_of_both_models() -> None:  # C5
    plan = planned("model.target='random:layers=3,hidden=128'", "draft=vanilla", "sampling.max_new_tokens=100")
    models = [plan.target, plan.draft]
    stored = [estimate._stored(Path(model.checkpoint.path) / "model.safetensors") for model in models]
    cache = sum(estimate.cache_bytes(model, "float32", 102) for model in models)  # BOS, "a", and the answer
    assert estimate.estimate(plan).needed == {"cpu": 4 * sum(stored) + cache}
    assert estimate.cache_bytes(plan.target, "float32", 10) == 2 * 3 * 10 * 64 * 4, "two of its four heads have keys"


def test_jobs_of_one_machine_wait_for_each_other_or_share_no_core(monkeypatch: pytest.MonkeyPatch) -> None:  # F12
    with slots.taken(2) as first, slots.taken(2) as second:
        assert set(first.cores or ()) & set(second.cores or ()) == set() and first != second
        assert len(first.cores or ()) == len(second.cores or ())
        asked: list[float] = []

        def waited(seconds: float) -> None:
            asked.append(seconds)
            raise KeyboardInterrupt

        monkeypatch.setattr(slots.time, "sleep", waited)
        with pytest.raises(KeyboardInterrupt), slots.taken(2):
            pass
        assert asked, "a third waits"
    with slots.taken(1) as whole:
        assert whole == slots.Slot(None, None)


def test_a_job_that_waits_says_for_whom(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def waited(_: float) -> None:
        told.append(capsys.readouterr().out)
        if len(told) == 2:
            raise KeyboardInterrupt
        other.send_signal(signal.SIGSTOP)
        os.waitpid(other.pid, os.WUNTRACED)

    told: list[str] = []
    monkeypatch.setattr(slots.time, "sleep", waited)
    monkeypatch.setattr(psutil.Process, "cmdline", lambda _: ["duoexp", "tracker.api_key=abc"])
    with slots.taken(1):
        other = subprocess.Popen(["sleep", "60"])
        try:
            with pytest.raises(KeyboardInterrupt), slots.taken(1):
                pass
        finally:
            other.kill()
            other.wait()
    assert f"process {os.getpid()} (duoexp tracker.api_key=***) since 20" in told[0] and "stopped" not in told[0]
    assert f"`kill -CONT {other.pid}` lets it go on" in told[1]


def test_each_slot_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:  # F12
    monkeypatch.setattr(slots.machine, "gpus", lambda: 2)
    monkeypatch.setattr(slots.machine, "mask", lambda: tuple(range(5)))
    assert [slots.part(number, 2) for number in (0, 1)] == [slots.Slot((0, 1), 0), slots.Slot((2, 3), 1)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert sweep._visible(1) == "7"


def test_prompts_can_be_made_of_a_length() -> None:  # E11
    given = composed("task=mini", "task.limit=3", "task.prompt_tokens=300", "task.text=null")
    plan = runner.prepare(given, CONF / "hardware")
    lengths = [len(templates.encode(plan.target.tokenizer, "auto", prompt)) for prompt in plan.prompts]
    assert len(plan.prompts) == 3 and lengths == [300] * 3, "a byte is a token"
    assert any("synthetic" in note for note in plan.notes)
    with pytest.raises(InputError, match=r"task\.prompt_tokens=3"):
        runner.prepare(composed("task=mini", "task.prompt_tokens=3", "task.text=null"), CONF / "hardware")


def test_long_values_and_slashes_make_no_folder(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # F7
    text = f"task.text='{'a/b ' * 100}','c'"
    settings = [each for each in SHORT if not each.startswith("task.")]
    assert main(monkeypatch, "-m", *settings, "task=prompt", text, "draft.budget=1") == 0
    for job in records(fake):
        assert Path(str(job.folder)).parent == Path("outputs/runs/default") and len(Path(str(job.folder)).name) == 16


@pytest.mark.parametrize("choice", ("hydra/launcher=joblib", "hydra/sweeper=optuna"))
def test_a_plugin_that_is_not_here_is_named(  # F8
    choice: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = Plugins.instance().class_name_to_class
    ours = {name: plugin for name, plugin in known.items() if not name.startswith("hydra_plugins.hydra_")}
    monkeypatch.setattr(Plugins.instance(), "class_name_to_class", ours)
    assert main(monkeypatch, "-m", *SHORT, choice) == 2
    assert f"pip install 'duoexp[{choice.partition('=')[2]}]'" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "hydra" / "launcher").glob("*.yaml")))
def test_every_launcher_says_how_its_jobs_keep_apart(name: str) -> None:
    """Whether they work is shown by benchmarks/launchers.py, which needs their packages."""
    file = CONF / "hydra" / "launcher" / f"{name}.yaml"
    config = OmegaConf.load(file)
    assert config._target_.startswith("hydra_plugins.") and file.read_text().startswith("# ")


# The files


@pytest.mark.parametrize("name", FILES)
def test_every_sweep_is_a_grid_of_valid_configs(name: str) -> None:
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=[f"sweeps={name}"], return_hydra_config=True)
    assert cfg.name == name and cfg.hydra.mode.name == "MULTIRUN"
    sweeper = cfg.hydra.sweeper
    for job in (job for axes in sweeper.get("grids", [sweeper.params]) for job in grid(axes)):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = OmegaConf.to_object(compose("config", overrides=[f"sweeps={name}", *job]))
        assert isinstance(config, Config)
        check(config)
    assert (SWEEPS / f"{name}.yaml").read_text().startswith("# "), "its first line says what it is"


def grid(params: dict[str, Any]) -> list[list[str]]:
    """The first job and the last: between them they have every axis at both its ends."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    overrides = OverridesParser.create().parse_overrides([f"{key}={value}" for key, value in params.items()])
    [jobs] = BasicSweeper.split_arguments(overrides, None)
    return [jobs[0], jobs[-1]]
