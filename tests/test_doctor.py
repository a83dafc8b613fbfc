"""The doctor: what it finds on machines of many kinds, and that it changes none of them."""

import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import composed

from duoexp import machine, tasks
from duoexp.config import TaskConfig
from duoexp.doctor import __main__ as command
from duoexp.doctor import checks
from duoexp.doctor.checks import Finding, examine
from duoexp.lm import disk_cache, sources


def found(*overrides: str) -> dict[str, Finding]:
    """By what they are about; the last of several."""
    return {each.what: each for each in examine(composed(*overrides))}


def test_a_machine_that_can_run_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["doctor", "model=tiny", "hardware=cpu", "tracker=none"])
    with pytest.raises(SystemExit) as end:
        command.main()
    out = capsys.readouterr().out
    assert end.value.code == 0 and out.rstrip().endswith("it can run")
    for what in ("processor", "cores", "memory", "Python", "model.target", "prompts", "tracker", "output_dir", "cache"):
        assert what in out
    assert list(tmp_path.iterdir()) == [], "it makes nothing"


def test_each_fault_has_a_cure_and_one_that_stops_a_run_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    arguments = [
        "model=tiny",
        "hardware=gpu",
        "tracker=none",
        f"model.draft={tmp_path}/none",
        f"task.path={tmp_path}/no",
    ]
    monkeypatch.setattr(sys, "argv", ["doctor", *arguments, f"output_dir={tmp_path}/file/out"])
    monkeypatch.setattr(machine, "gpus", lambda: 0)
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 1
    said = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert said == "it cannot run: see hardware, model.draft, prompts, output_dir"
    faults = [each for each in examine(composed(*arguments)) if each.mark != "ok"]
    assert faults and all(each.cure for each in faults)


def test_what_no_machine_could_run_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for argument, said in (("model=nonsense", "model=nonsense is not there"), ("sampling.top_p=2", "top_p=2")):
        monkeypatch.setattr(sys, "argv", ["doctor", argument])
        with pytest.raises(SystemExit) as end:
            command.main()
        assert end.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("patch", "what", "said", "cure"),
    [
        (("mask", lambda: (0,)), "cores", "[0]", "hardware=cpu"),
        (("quota", lambda: 0.5), "quota", "the time of 0.5", "threads"),
        (("bf16_cpu", lambda: False), "bfloat16", "lacks", "float32"),
    ],
)
def test_the_processor_is_looked_at(
    patch: tuple[str, Any], what: str, said: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, *patch)
    finding = {each.what: each for each in checks._processor()}[what]
    assert said in finding.found and cure in str(finding.cure) and finding.mark == "note"


def test_other_programs_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.getloadavg", lambda: (99.0, 99.0, 99.0))
    assert "times would not stand" in str(found()["load"].cure)
    monkeypatch.setattr("psutil.getloadavg", lambda: (0.0, 9.0, 9.0))
    assert found()["load"].mark == "ok"


def test_packages_and_extras_are_compared_with_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [
        "numpy>=1",
        "torch<0.1",
        "absent-thing; extra == 'more'",
        "numpy; extra == 'same'",
        "x; python_version<'3'",
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: wanted)
    findings = {each.what: each for each in checks._packages()}
    assert set(findings) == {"Python", "torch", "extra more", "extra same"}
    assert findings["torch"].stops and findings["torch"].cure == 'pip install "torch<0.1"'
    assert findings["extra more"].found == "absent-thing is not installed" and not findings["extra more"].stops
    assert findings["extra same"].mark == "ok"


def test_what_is_in_a_cache_is_here_and_nothing_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUOEXP_CACHE", str(tmp_path))
    wheel = f"wheel:some-model==1.0#sha256={'0' * 64}"
    assert sources.here(wheel) is None
    (disk_cache.root() / sources._entry("wheel-some-model", "0" * 64)).mkdir()
    (disk_cache.root() / sources._entry("wheel-some-model", "0" * 64) / "model.safetensors").write_bytes(b"12345")
    assert sources.here(wheel) == 5
    assert sources.here("org/name") is None and sources.here("org/name/file.gguf") is None
    assert sources.here("self") == sources.here("layers:2") == sources.here("random:") == 0
    note = checks._model("model.target", "org/name")
    assert note.mark == "note" and "the first run fetches it" in str(note.cure)


def test_prompts_are_looked_for_without_a_network() -> None:
    public = TaskConfig("qa", ["qa"], source="https://example.invalid/none.jsonl")
    assert not tasks.here(public) and checks._prompts(public).mark == "note"
    assert not tasks.here(TaskConfig("humaneval", ["humaneval"], source="someone/nothing", subset="a"))
    assert tasks.here(TaskConfig("mini", ["qa"], source="pkg://duoexp/data/mini.jsonl"))


def test_an_online_tracker_needs_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    assert found("tracker=offline")["tracker"].mark == "ok"
    finding = found("tracker=wandb")["tracker"]
    assert finding.stops and "no key for api.wandb.ai" in finding.found
    monkeypatch.setenv("WANDB_API_KEY", "of mine")
    finding = found("tracker=wandb")["tracker"]
    assert finding.mark == "ok" and "of mine" not in finding.found
