"""Kinds of faults that users of programs like this one met, where no other test holds them off: see README.md."""

import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from conftest import CONF, engine, expected, planned, prompt_of, target_of
from test_peers import IN_PYTHON
from test_peers import peer as peer_of
from test_run import SHORT, here, main, summary_of
from test_sweep import fake

import duoexp
from duoexp import config

__all__ = ["fake", "here"]  # fixtures

PACKAGE, TESTS = Path(duoexp.__file__).parent, Path(__file__).parent


# A5, B3: a checkpoint's own habits of generation

HABITS = {
    **{"do_sample": True, "temperature": 0.3, "top_p": 0.5, "top_k": 3, "repetition_penalty": 1.5},
    **{"no_repeat_ngram_size": 1, "min_length": 60, "min_new_tokens": 30, "suppress_tokens": [*range(100)]},
}


@pytest.fixture(scope="module")
def penalised(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("penalised") / "model"
    shutil.copytree(planned().target.checkpoint.path, folder)
    (folder / "generation_config.json").write_text(json.dumps(HABITS))
    return f'model.target="{folder}"'


@pytest.mark.parametrize("passes", ("lean", "transformers"))
def test_what_a_checkpoint_says_of_generation_changes_no_token(penalised: str, passes: str) -> None:  # A5, B3
    plain, prompt = engine(), prompt_of(9)
    ours = engine(target_of(f"model.engine={passes}", penalised))
    assert expected(ours, prompt).ids == expected(plain, prompt).ids


@pytest.mark.parametrize("name", IN_PYTHON)
def test_nor_does_it_change_a_peers(penalised: str, name: str) -> None:  # A5, B3
    prompt = prompt_of(9)
    some = engine(eos=[expected(engine(), prompt).ids[12]])
    with peer_of(f"draft={name}", penalised) as method:
        assert some.decode(method, prompt).ids == expected(some, prompt).ids


# A6: a setting that nobody reads

ELSEWHERE = {  # what the runs below have no use for, and the words that read it
    "profile.contexts": "settings.contexts",
    "profile.fresh": "config.profile.fresh",
    "profile.repeats": "config.profile.repeats",
    "task.subset": "task.subset",
    "task.split": "task.split",
    "sweep.retries": "settings.retries",
    "sweep.report": "config.sweep.report",
    "draft.budget": "budget_of(draft.budget)",
    "tracker.name": "",  # says to a reader of config.yaml which choice it was
}


def settings(kind: type = config.Config, path: str = "") -> Iterator[tuple[str, tuple[str, str]]]:
    """The path of every leaf of the schema, with its class and field."""
    hints = get_type_hints(kind)
    for each in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[each.name]):
            yield from settings(hints[each.name], f"{path}{each.name}.")  # type: ignore[arg-type]
        else:
            yield path + each.name, (kind.__name__, each.name)


def test_every_setting_is_read(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # A6
    """By the program, that is, and not just by the check of its range."""
    read: set[tuple[str, str]] = set()

    def noted(self: Any, name: str) -> Any:
        caller = Path(sys._getframe(1).f_code.co_filename)
        if PACKAGE in caller.parents and caller.name != "config.py":
            read.add((type(self).__name__, name))
        return object.__getattribute__(self, name)

    for kind in {kind for kind in vars(config).values() if dataclasses.is_dataclass(kind)}:
        monkeypatch.setattr(kind, "__getattribute__", noted, raising=False)
    assert main(monkeypatch, *SHORT, "task.limit=1", "draft=vanilla", "baseline=cached") == 0
    assert main(monkeypatch, "-m", *SHORT, "draft=vanilla", "draft.budget=1", "sweep.report=false") == 0
    used = "\n".join(file.read_text() for file in CONF.rglob("*.yaml"))
    unread = [path for path, leaf in settings() if leaf not in read and f"${{{path}}}" not in used]
    assert set(unread) <= set(ELSEWHERE), unread
    code = "\n".join(file.read_text() for file in PACKAGE.rglob("*.py"))
    assert all(words in code for words in ELSEWHERE.values())


# A9: what is compared was computed alike, and is recorded


@pytest.mark.parametrize(
    ("passes", "kernel"),
    [("lean", "lean"), ("static", "lean, fixed shapes"), ("transformers", "transformers, sdpa attention")],
)
def test_a_summary_says_what_computed_method_and_baseline(  # A9
    passes: str, kernel: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(monkeypatch, *SHORT, "task.limit=1", "draft=prompt_lookup", f"model.engine={passes}") == 0
    summary = summary_of(here)
    assert summary["kernel"] == kernel and summary["hardware"]["target"]["dtype"] == "float32"
    machine = json.loads(next(here.rglob("machine.json")).read_text())
    assert set(machine["tf32"]) == {"matmul", "cudnn"}


# F8: the cause behind `instantiate`


@pytest.mark.parametrize(
    ("code", "cause"),
    [("def broken(:", "invalid syntax"), ("import no_such_library", "no_such_library"), ("1 / 0", "division by zero")],
)
def test_what_is_wrong_with_a_plugin_is_told(  # F8
    code: str, cause: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(here)
    name = f"plugin_{abs(hash(code))}"
    (here / f"{name}.py").write_text(code)
    assert main(monkeypatch, *SHORT, "draft=prompt_lookup", f"draft.drafter._target_={name}.Drafter") == 2
    [told] = capsys.readouterr().err.splitlines()
    assert name in told and cause in told and "HYDRA_FULL_ERROR" not in told, told


# The table of README.md


def test_the_table_has_every_case_and_names_tests_that_are_there() -> None:
    table = (TESTS / "README.md").read_text()
    counts = {"A": 9, "B": 6, "C": 8, "D": 4, "E": 12, "F": 13, "G": 5, "H": 4}
    for group, count in counts.items():
        for number in range(1, count + 1):
            assert f"| {group}{number} |" in table, f"{group}{number}"
    there = {name for file in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())}
    files = {file.stem for file in TESTS.rglob("test_*.py")}
    named = set(re.findall(r"`(test_\w+)(?:\.py)?`", table))
    assert named <= there | files, sorted(named - there - files)
