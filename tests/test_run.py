"""Runs, whole: what they print, what they leave on disk, how they end, and what they refuse to start."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from conftest import CONF, DRAFTS, composed, planned
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from duoexp import __main__ as command
from duoexp import record, runner
from duoexp.budget import Fixed
from duoexp.config import Config, check, register
from duoexp.drafters import Drafter
from duoexp.peers.base import Peer
from duoexp.sampling import Sampler
from duoexp.tree import Draft
from duoexp.verify import RULES, Verdict, match

ROOT = Path(__file__).parent.parent
FLOAT = ("hardware.target.dtype=float32", "hardware.draft.dtype=float32")
TINY = ("model=tiny", "hardware=cpu", "hardware.target.threads=1", *FLOAT, "tracker=none", "task.limit=2")
SHORT = (*TINY, "sampling.max_new_tokens=12")

# What the issue that asked for the program lists.
SUMMARY = {
    *("speedup", "speedup_low", "speedup_high", "speedup_by_task", "identical", "ties", "tokens_per_s"),
    *("baseline_tokens_per_s", "ttft_s", "baseline_ttft_s", "tpot_s", "tau", "alpha", "alpha_by_position"),
    *("accepted_run", "draft_efficiency", "draft_idle", "target_idle", "sequences", "peak_memory_bytes"),
}

# For the processes that are started here: Python imports this first.
NO_NETWORK = """
import socket
connect = socket.socket.connect
def checked(self, address):
    assert self.family == socket.AF_UNIX, f"a run asked for the network: {address}"
    connect(self, address)
socket.socket.connect = checked
"""


def strict(text: str) -> Any:
    """JSON without NaN and Infinity."""

    def refused(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refused)


def lines(file: Path) -> list[dict[str, Any]]:
    return [strict(line) for line in file.read_text().splitlines()]


def module_of(file: Path) -> Any:
    """A script, as a module."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# In this process


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of the command."""
    monkeypatch.setattr(sys, "argv", ["duoexp", *arguments])
    monkeypatch.setattr(command, "_failed", [])
    try:
        command.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)  # a text is told, and means 1
    return 0


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def folder_of(here: Path) -> Path:
    [folder] = (here / "outputs" / "runs" / "default").iterdir()
    return folder


def summary_of(here: Path) -> dict[str, Any]:
    found: dict[str, Any] = strict((folder_of(here) / "summary.json").read_text())
    return found


def crooked(draft: Draft, logits: torch.Tensor, sampler: Sampler, position: int) -> Verdict:
    """Takes the first drafted token for the target's, for once."""
    verdict = match(draft, logits, sampler, position)
    if draft and verdict.tokens[0] != draft.tokens[0]:
        return Verdict((draft.tokens[0], 65), 0, rejected=False)
    return verdict


def test_an_output_that_is_not_the_targets_own_fails_the_run(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(RULES, "match", crooked)
    assert main(monkeypatch, *SHORT, "draft=vanilla") == 1
    summary = summary_of(here)
    assert summary["identical"] is False and summary["status"] == "finished"
    [first, *_] = summary["parted"]
    assert first["kind"] == "different" and first["gap"] > first["tolerance"]
    out, errors = capsys.readouterr()
    assert "identity: FAILED" in out and errors.startswith("error: identity: FAILED")
    assert out.splitlines()[-1] == str(folder_of(here).relative_to(here))


@pytest.mark.parametrize("text", ("123E456", "1e3", "null", "007"))
def test_a_name_that_looks_like_a_number_stays_a_name(  # F4
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "--cfg", "job", f"name={text}") == 0
    assert OmegaConf.create(capsys.readouterr().out).name == text


def test_the_shortest_run_has_every_figure(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # E4
    assert main(monkeypatch, *SHORT, "task.limit=1", "sampling.max_new_tokens=5", "draft=vanilla") == 0
    summary = summary_of(here)
    assert all(summary[name] is not None or summary["reasons"][name] for name in SUMMARY)
    assert summary["tau"] is not None and summary["alpha"] is not None and summary["tpot_s"] is not None


def test_rejection_at_a_temperature_is_not_compared(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(monkeypatch, *SHORT, "draft.rule=rejection", "sampling.temperature=0.8") == 0
    summary = summary_of(here)
    assert summary["identical"] is None and "rejection" in summary["reasons"]["identical"]


def asked(here: Path, *prompts: Sequence[str]) -> str:
    """A file of prompts, each with its turns, which are given to the model as they are."""
    rows = [{"question_id": i, "category": "prompt", "turns": list(turns)} for i, turns in enumerate(prompts)]
    (here / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"task.path={here / 'asked.jsonl'}"


def test_a_prompt_that_is_too_long_fails_and_the_others_run(  # E12
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = asked(here, ["a"], ["b" * 100], ["c" * 99])  # of a context of 101, BOS takes one and the answer one
    settings = ("model.target='random:context=101'", "model.draft='random:context=101,noise=0.2'", "task.limit=null")
    assert main(monkeypatch, *SHORT, *settings, "task=prompt", file) == 0
    summary = summary_of(here)
    assert [(each["prompt"], "101" in each["reason"]) for each in summary["failed"]] == [("1", True)]
    assert summary["answers"] == 2 and summary["identical"] is True
    assert [each["method"]["tokens"] for each in lines(folder_of(here) / "prompts.jsonl")] == [12, 1]
    assert "failed: 1" in capsys.readouterr().out


def test_a_run_of_which_no_prompt_could_be_run_fails(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = asked(here, ["b" * 200])
    assert main(monkeypatch, *SHORT, "model.target='random:context=150'", "task=prompt", file) == 1
    summary = summary_of(here)
    assert summary["speedup"] is None and summary["reasons"]["speedup"] and len(summary["failed"]) == 1


def test_a_second_turn_stands_on_the_answer_to_the_first(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(monkeypatch, *SHORT, "task=prompt", asked(here, ["one", "two"])) == 0
    first, second = lines(folder_of(here) / "prompts.jsonl")
    assert (first["turn"], second["turn"]) == (0, 1)
    assert first["prompt_ids"] == [256, *b"one"]
    assert second["prompt_ids"] == [256, *f"one\n\n{first['baseline']['text']}\n\ntwo".encode()]


class Listening:
    """A tracker that remembers, and interrupts a run when it is told to."""

    heard: ClassVar[list[tuple[Any, ...]]] = []
    interrupts_at: ClassVar[int | None] = None

    def start(self, folder: Path, group: str, job_type: str, config: dict[str, Any]) -> None:
        self.heard.append(("start", group, job_type))
        self.folder = folder

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.heard.append(("log", step, len(lines(self.folder / "prompts.jsonl"))))
        if step == self.interrupts_at:
            raise KeyboardInterrupt

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        self.heard.append(("finish", summary["status"], exit_code))


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Listening, "heard", [])
    yield "tracker.tracker._target_=test_run.Listening"


def test_the_tracker_hears_of_every_answer_when_it_is_on_disk_and_of_the_end(
    here: Path, monkeypatch: pytest.MonkeyPatch, listening: str
) -> None:
    assert main(monkeypatch, *SHORT, listening, "draft=vanilla") == 0
    steps = [("log", step + 1, step + 1) for step in range(summary_of(here)["answers"])]
    assert Listening.heard == [("start", "default", "vanilla"), *steps, ("finish", "finished", 0)]


def test_an_interrupted_run_is_readable_up_to_its_last_prompt(
    here: Path, monkeypatch: pytest.MonkeyPatch, listening: str
) -> None:
    monkeypatch.setattr(Listening, "interrupts_at", 2)
    assert main(monkeypatch, *SHORT, listening, "task.limit=4") == 130
    assert Listening.heard[-2:] == [("log", 2, 2), ("finish", "interrupted", 1)]
    summary = summary_of(here)
    assert summary["status"] == "interrupted" and summary["answers"] == 2
    prompts, rounds = (lines(folder_of(here) / f"{name}.jsonl") for name in ("prompts", "rounds"))
    assert len(prompts) == 2
    assert sum(len(each["tokens"]) for each in rounds) == sum(each["method"]["tokens"] for each in prompts)


class Dying(Drafter):
    """Fails at a question that comes after the warm-up."""

    asked = 0

    def propose(self, context: Sequence[int], pending: Draft, budget: int, depth: int | None = None) -> Iterator[Draft]:
        self.asked += 1
        if self.asked == 40:
            raise ValueError("the drafter's own fault")
        yield pending.grow(pending.tip(), [65] * min(budget, 1))


@pytest.mark.parametrize(("way", "code"), [("raise", 1), ("continue", 0)])
def test_a_run_whose_drafter_fails_ends_or_goes_on_as_it_was_told(
    way: str,
    code: int,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    listening: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drafter = "draft.drafter._target_=test_run.Dying"
    settings = ("draft=prompt_lookup", drafter, "~draft.drafter.max_ngram", "~draft.drafter.min_ngram")
    assert main(monkeypatch, *SHORT, *settings, listening, f"hardware.on_draft_failure={way}") == code
    summary = summary_of(here)
    if way == "continue":
        assert summary["identical"] is True and summary["status"] == "finished"
        assert "the drafter's own fault" in summary["draft_failure"]["reason"]
    else:
        assert summary["status"] == "failed"
        assert "ValueError: the drafter's own fault" in capsys.readouterr().err
    assert Listening.heard[-1] == ("finish", summary["status"], code)


def test_the_first_to_decode_takes_turns(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a machine that slows down slows both."""
    decoded: list[str] = []
    decode = runner.Engine.decode

    def listened(self: Any, method: Any, *rest: Any) -> Any:
        decoded.append("method" if method.budget != Fixed(0) else "baseline")
        return decode(self, method, *rest)

    monkeypatch.setattr(runner.Engine, "decode", listened)
    assert main(monkeypatch, *SHORT, "task=prompt", asked(here, ["a"], ["b"], ["c"])) == 0
    assert decoded[4:] == ["baseline", "method", "method", "baseline"][: len(decoded) - 4]


# The config

AXES = ("model", "hardware", "draft", "draft/policy", "task", "tracker")
GROUPS = {group: sorted(path.stem for path in (CONF / group).glob("*.yaml")) for group in AXES}


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, names in GROUPS.items() for name in names])
def test_every_file_of_conf_composes(group: str, name: str) -> None:
    register()
    draft = ["draft=dynamic"] if group == "draft/policy" else []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=[*draft, f"{group}={name}"])
    assert OmegaConf.missing_keys(cfg) == set()
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, Config)
    check(config)
    drafter = runner._drafter(config)
    assert isinstance(drafter, Peer) or drafter.needs_model == (config.draft.policy is not None)
    if group in ("model", "hardware", "draft", "task", "tracker"):
        assert OmegaConf.select(cfg, f"{group}.name") == name, "its name is its file's"
    first = (CONF / group / f"{name}.yaml").read_text().splitlines()[0]
    assert first.startswith("# "), "its first line says what it is"


def test_help_lists_every_group_its_choices_and_three_examples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "--help") == 0
    out = capsys.readouterr().out
    for group, names in GROUPS.items():
        assert f"{group}: {', '.join(names)}" in out
    assert out.count("python -m duoexp") >= 3


def test_cfg_job_prints_the_config_and_runs_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "--cfg", "job", "draft.budget=3") == 0
    shown = OmegaConf.create(capsys.readouterr().out)
    assert shown.draft.budget == 3 and shown.draft.name == "dynamic"
    assert list(here.iterdir()) == []


# What is refused


def widen(folder: Path) -> None:
    """The row of an id more, which wins where "A" would."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        row = weights[name][65:66] * (1.5 if name == "lm_head.weight" else 1)
        weights[name] = torch.cat([weights[name][:259], row])
    save_file(weights, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny model with a tokenizer that has two ids swapped, and with one that has an id more."""
    source, folder = Path(planned().target.checkpoint.path), tmp_path_factory.mktemp("other")
    for name in ("swapped", "longer"):
        shutil.copytree(source, folder / name)
        file = folder / name / "tokenizer.json"
        tokenizer = json.loads(file.read_text())
        if name == "swapped":
            vocabulary = tokenizer["model"]["vocab"]
            vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
        else:
            tokenizer["added_tokens"].append(tokenizer["added_tokens"][-1] | {"id": 259, "content": "<more>"})
            config = json.loads((folder / name / "config.json").read_text())
            (folder / name / "config.json").write_text(json.dumps(config | {"vocab_size": 260}))
            widen(folder / name)
        file.write_text(json.dumps(tokenizer))
    return {name: folder / name for name in ("swapped", "longer")}


REFUSED = [  # overrides; what the sentence must hold
    (["draft.bugdet=3"], ["draft.bugdet", "draft.budget"]),
    (["sampling.temprature=1"], ["sampling.temprature", "sampling.temperature"]),
    (["nonsense=1"], ["nonsense"]),
    (["draft.policy.sequences=3"], ["draft.policy.sequences"]),
    (["+draft.policy.sequences=3"], ["sequences"]),
    (["draft=nonsense"], ["draft=nonsense", *DRAFTS]),
    (["draft.budget=-1"], ["draft.budget=-1", "0 or more"]),
    (["draft.budget=many"], ["draft.budget='many'", "measured"]),
    (["draft.budget=2.5"], ["draft.budget=2.5", "0 or more"]),
    (["draft.budget.kind=most"], ["draft.budget='most'", "deadline"]),
    (["+draft.budget.much=3"], ["draft.budget.much", "tokens, most"]),
    (["draft=prompt_lookup", "draft.budget=measured"], ["draft.budget.kind=measured", "draft.budget=10"]),
    (["hardware=cpu", "draft.budget=deadline"], ["draft.budget.kind=deadline", "draft.schedule=overlapped"]),
    (["draft.schedule=alternating"], ["draft.schedule='alternating'", "serial", "overlapped"]),
    (["draft.rule=guess"], ["draft.rule='guess'", "match", "rejection"]),
    (["draft=fixed", "draft.policy.k=0"], ["draft.policy.k=0"]),
    (["draft.policy.max_sequences=0"], ["draft.policy.max_sequences=0"]),
    (["draft.policy.growth=slow"], ["draft.policy.growth='slow'", "batched", "serial"]),
    (["draft=adaptive", "draft.policy.start=0"], ["draft.policy.start=0", "1 or more"]),
    (["draft=adaptive", "draft.policy.confidence=40"], ["draft.policy.confidence=40"]),
    (["draft=hybrid", "draft.drafter.model_budget=-1"], ["draft.drafter.model_budget=-1"]),
    (["draft=lookahead", "draft.drafter.level=0"], ["draft.drafter.level=0", "2 or more"]),
    (["draft=lookahead", "draft.drafter.window=3000"], ["window=3000", "2048"]),
    (["draft=lookahead", "draft.drafter.guess_set=-1"], ["draft.drafter.guess_set=-1"]),
    (["draft=rest", "draft.drafter.hits=0"], ["draft.drafter.hits=0"]),
    (["draft=rest", "draft.drafter.shortest=17"], ["shortest=17", "longest=16"]),
    (["draft=rest", "draft.drafter.datastore=nowhere"], ["nowhere", "python -m duoexp.datastore"]),
    (["draft=rest", "draft.budget=4096"], ["draft.budget=4096", "2048"]),
    (["draft=prompt_lookup", "draft.drafter.max_ngram=0"], ["max_ngram=0", "1 <= min_ngram"]),
    (["draft=prompt_lookup", "draft.drafter.min_ngram=4"], ["draft.drafter.min_ngram=4"]),
    (["sampling.temperature=-0.5"], ["sampling.temperature=-0.5"]),
    (["sampling.temperature=nan"], ["sampling.temperature=nan"]),
    (["sampling.temperature=inf"], ["sampling.temperature=inf"]),
    (["sampling.top_p=0"], ["sampling.top_p=0", "above 0 and up to 1"]),
    (["sampling.top_p=1.5"], ["sampling.top_p=1.5"]),
    (["sampling.top_k=-1"], ["sampling.top_k=-1"]),
    (["sampling.max_new_tokens=0"], ["sampling.max_new_tokens=0"]),
    (["sampling.stop=['']"], ["sampling.stop"]),
    (["hardware.target.dtype=fp17"], ["hardware.target.dtype=fp17", "float32"]),
    (["hardware.draft.dtype=float16"], ["hardware.draft.dtype=float16", "float32"]),
    (["hardware.target.device=tpu"], ["hardware.target.device=tpu", "cpu"]),
    (["hardware.draft.device=cuda:99"], ["hardware.draft.device=cuda:99", "cpu"]),
    (["hardware.target.threads=0"], ["hardware.target.threads=0"]),
    (["hardware.worker=fork"], ["hardware.worker=fork", "inline", "process"]),
    (["hardware.on_draft_failure=hope"], ["hardware.on_draft_failure=hope", "raise", "continue"]),
    (["task=qa", "task.path=nowhere.jsonl"], ["nowhere.jsonl", "task.path"]),
    (["task=prompt"], ["task.text"]),
    (["task=prompt", "task.text=' '"], ["empty"]),
    (["task.limit=0"], ["task.limit=0"]),
    (["task=qa", "task.source=http://127.0.0.1:9/qa.jsonl"], ["http://127.0.0.1:9/qa.jsonl", "task.path"]),
    (["model.target=./nowhere"], ["./nowhere"]),
    (["model.target=nowhere.gguf"], ["nowhere.gguf"]),
    (["model.target=no-one/nothing"], ["no-one/nothing", "hf auth login"]),
    (["model.draft=layers:2"], ["layers:2"]),
    (["model.draft='random:size=3'"], ["size"]),
    (["model.template=chat"], ["model.template=chat"]),
    (["model.template=rhyme"], ["model.template='rhyme'", "vicuna"]),
    (["model.engine=steam"], ["model.engine='steam'"]),
    (["name=a/b"], ["name='a/b'"]),
    (["output_dir=/dev/null"], ["output_dir", "/dev/null"]),
    (["tracker.tracker.mode=loud", "tracker=offline"], ["tracker.tracker.mode=loud", "offline"]),
    (["task.text=<|x|>", "task=prompt"], ["quote", "task.path"]),
    *(
        (["task=prompt", f"task.text={text}"], [text, "quote", "task.path"])
        for text in ("#x", "ünï", "a;b", "a&b", "(x")
    ),
    (["model.target=/m/epoch=3-step=87.gguf"], ["model.target=/m/epoch=3-step=87.gguf", "quote"]),
    (["baseline=once"], ["baseline='once'", "paired", "cached"]),
    (["repeats=0"], ["repeats=0", "1 or more"]),
    (["task.prompt_tokens=0"], ["task.prompt_tokens=0"]),
    (["draft.drafter._target_=duoexp.drafters.Nothing"], ["duoexp.drafters.Nothing"]),
    (["draft.drafter._target_=no_such_package.Drafter"], ["no_such_package"]),
]


@pytest.mark.parametrize(("overrides", "words"), REFUSED, ids=lambda value: " ".join(value))
def test_bad_input_is_refused_in_a_sentence_before_a_model_loads(  # A6, F2
    overrides: list[str],
    words: list[str],
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(runner, "load", load)
    base = [each for each in SHORT if each.partition("=")[0] not in {other.partition("=")[0] for other in overrides}]
    assert main(monkeypatch, *base, *overrides) == 2
    out, errors = capsys.readouterr()
    [told] = errors.splitlines()
    assert told.startswith("error: ") and len(told) < 600
    assert all(word in told for word in words), told
    assert out == "" and list(here.iterdir()) == []


@pytest.mark.parametrize(("name", "words"), [("swapped", ["id 65", "'A'", "'B'"]), ("longer", ["259", "260"])])
def test_a_pair_of_two_vocabularies_is_refused_unless_it_is_wanted(  # D1, D4
    name: str,
    words: list[str],
    other: dict[str, Path],
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(monkeypatch, *SHORT, f"model.draft={other[name]}") == 2
    told = capsys.readouterr().err
    assert all(word in told for word in ["model.draft=", "model.target=", "model.vocabulary=warn", *words])
    assert list(here.iterdir()) == [], "nothing was run"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("side", ("target", "draft"))
def test_a_pair_of_which_one_has_more_ids_drafts_with_those_of_both(
    side: str, rule: str, other: dict[str, Path], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (f"model.{side}={other['longer']}", "model.vocabulary=warn", "sampling.max_new_tokens=60")
    assert main(monkeypatch, *SHORT, *settings, f"draft.rule={rule}", "sampling.temperature=0.8") == 0
    summary = summary_of(here)
    assert summary["identical"] is (True if rule == "match" else None) and summary["alpha"] > 0.2, summary["alpha"]
    said = {id for each in lines(folder_of(here) / "prompts.jsonl") for id in each["method"]["ids"]}
    assert (259 in said) == (side == "target"), "its own id is said by the target alone"


def test_more_threads_than_cores_are_warned_of() -> None:  # E9
    threads = len(os.sched_getaffinity(0)) + 1
    notes = planned("hardware.target.threads=null", f"hardware.draft.threads={threads}").notes
    assert any(f"hardware.draft.threads={threads} are too many" in note for note in notes)


def test_every_choice_of_a_method_is_a_plan() -> None:
    """The drafter and the policy of each file are made, as a run makes them."""
    for name in DRAFTS:
        config = OmegaConf.to_object(composed(f"draft={name}"))
        assert isinstance(config, Config)
        assert config.draft.name == name and isinstance(runner._drafter(config), Drafter)


# As a person runs it


def begun(folder: Path, *overrides: str) -> "subprocess.Popen[str]":
    (folder / "sitecustomize.py").write_text(NO_NETWORK)
    paths = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "duoexp", *overrides],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module", autouse=True)
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, list[Any]]]]:
    """The same command twice at once in one folder, and a multirun; begun first and awaited last, to save time."""
    two, sweep = (tmp_path_factory.mktemp(name) for name in ("two", "sweep"))
    many = ("-m", "draft=none,fixed", "model=tiny", "task.limit=1", "sampling.max_new_tokens=6", "name=sweep")
    found = {
        "two": (two, [begun(two, *(each for each in SHORT if each not in FLOAT)) for _ in range(2)]),
        "sweep": (sweep, [begun(sweep, *many, "sampling.temperature=0.8", "tracker=offline")]),
    }
    yield found
    for _, processes in found.values():
        for process in processes:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def two(commands: dict[str, tuple[Path, list[Any]]]) -> tuple[Path, list[tuple[str, Path]]]:
    """What each of the two printed, and the folder that it named."""
    folder, processes = commands["two"]
    ended = [(*process.communicate(timeout=300), process.returncode) for process in processes]
    assert [code for _, _, code in ended] == [0, 0], ended
    return folder, [(out, folder / out.splitlines()[-1]) for out, _, _ in ended]


def test_two_runs_at_once_have_two_folders(two: tuple[Path, list[tuple[str, Path]]]) -> None:  # F6
    folder, runs = two
    assert len({place for _, place in runs}) == 2
    for _, place in runs:
        assert place.parent == folder / "outputs" / "runs" / "default"
        assert len(lines(place / "prompts.jsonl")) == strict((place / "summary.json").read_text())["answers"]


def test_a_run_prints_its_progress_a_table_the_verdict_and_last_its_folder(  # E5
    two: tuple[Path, list[tuple[str, Path]]],
) -> None:
    out, place = two[1][0]
    assert "\x1b" not in out, "not a terminal, so plain text"
    assert "[2/2]" in out and "speedup" in out
    assert "draft=dynamic" in out and "│ all" in out
    assert "identity: true" in out
    assert place.is_dir()


def test_a_run_leaves_its_files(two: tuple[Path, list[tuple[str, Path]]]) -> None:
    place = two[1][0][1]
    names = {*("config.yaml", "machine.json", "profile.json", "summary.json", "run.log"), *record.LINES}
    assert {file.name for file in place.iterdir()} == names
    config = OmegaConf.load(place / "config.yaml")
    assert "${" not in (place / "config.yaml").read_text()
    assert config.model.name == "tiny" and config.draft.budget.kind == "measured"
    machine = strict((place / "machine.json").read_text())
    assert {"cpu", "memory", "gpus", "threads", "versions", "git"} <= machine.keys()
    assert sorted(os.sched_getaffinity(0)) == machine["cpu"]["cores"]


def test_a_summary_has_what_was_asked_for(two: tuple[Path, list[tuple[str, Path]]]) -> None:  # E12
    place = two[1][0][1]
    summary = strict((place / "summary.json").read_text())
    assert summary.keys() >= SUMMARY
    assert summary["status"] == "finished" and summary["identical"] is True and summary["failed"] == []
    assert all(summary["reasons"].get(name) for name in SUMMARY if summary[name] is None), "null has a reason"
    assert {name for name in summary["reasons"] if summary[name] is not None} == set()
    assert summary["speedup_low"] <= summary["speedup"] <= summary["speedup_high"]
    prompts, rounds = lines(place / "prompts.jsonl"), lines(place / "rounds.jsonl")
    for prompt in prompts:
        assert prompt["baseline"]["ids"] == prompt["method"]["ids"] or prompt["comparison"]["kind"] == "tie"
        assert prompt["method"]["tokens"] == len(prompt["method"]["ids"]) <= 12
        own = [each for each in rounds if (each["prompt"], each["turn"]) == (prompt["prompt"], prompt["turn"])]
        assert [token for each in own for token in each["tokens"]] == prompt["method"]["ids"]
    assert summary["tokens"] == sum(prompt["method"]["tokens"] for prompt in prompts)
    assert sum(summary["sequences"].values()) == len(rounds)


def test_a_multirun_has_a_folder_and_a_tracked_run_for_each_job(  # G1
    commands: dict[str, tuple[Path, list[Any]]],
) -> None:
    folder, [process] = commands["sweep"]
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, (out, errors)
    folders = sorted((folder / "outputs" / "runs" / "sweep").iterdir())
    summaries = [strict((each / "summary.json").read_text()) for each in folders]
    assert {summary["method"] for summary in summaries} == {"none", "fixed"}
    assert all(summary["identical"] for summary in summaries)
    if len(os.sched_getaffinity(0)) > 1:  # what hardware=auto makes of them
        assert {summary["hardware"]["worker"] for summary in summaries} == {"process"}
    assert [len(list(each.glob("wandb/offline-run-*"))) for each in folders] == [1, 1]
    assert out.count("identity: true") == 2 and "2 done" in out
    [sweep] = (folder / "outputs" / "sweeps" / "sweep").iterdir()
    records = [strict(file.read_text()) for file in sorted(sweep.glob("0*.json"))]
    assert [record["status"] for record in records] == ["done", "done"]
    assert {folder / record["folder"] for record in records} == set(folders), "a job names its run"
    assert all("identity: true" in (folder / record["log"]).read_text() for record in records)
