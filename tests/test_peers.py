"""Peers: what others' loops answer, how it is told in rounds, and what they are not asked to do."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import DRAFTS, PEERS, composed, engine, expected, planned, prompt_of, target_of
from omegaconf import OmegaConf

from duoexp.compare import __main__ as command
from duoexp.compare.race import _cores, _everywhere
from duoexp.config import InputError
from duoexp.hardware import Hardware, Place
from duoexp.lm import sources
from duoexp.metrics import Decoding, acceptance_rate
from duoexp.peers.base import Stock, Unavailable, home
from duoexp.runner import Plan, method_of, worker_of
from duoexp.summary import Results

IN_PYTHON = [name for name in PEERS if name != "llama_cpp"]
FLOAT = ("hardware.target.dtype=float32", "hardware.draft.dtype=float32")

# A llama.cpp that answers in a row of letters; FILE says what it does when it loads.
FAKE = """
import os, signal
def llama_supports_gpu_offload(): return False
class Llama:
    def __init__(self, model_path, n_ctx, n_threads, n_threads_batch, n_batch, n_gpu_layers, flash_attn, verbose):
        exec(open(model_path).read())
    def reset(self): pass
    def generate(self, prompt, temp, repeat_penalty):
        assert temp == 0 and repeat_penalty == 1
        yield from range(97, 123)
"""


@contextmanager
def peer(*overrides: str) -> Iterator[Any]:
    plan: Plan = planned(*overrides)
    plan = replace(plan, drafter=deepcopy(plan.drafter))
    with method_of(plan, target_of(), worker_of(plan), home(plan.hardware), Stock(), Results()) as method:
        yield method


@pytest.fixture
def llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that stands for a GGUF, beside the fake library."""
    (tmp_path / "llama_cpp.py").write_text(FAKE)
    (tmp_path / "llama_cpp_python-0.3.99.dist-info").mkdir()
    (tmp_path / "llama_cpp_python-0.3.99.dist-info/METADATA").write_text("Name: llama-cpp-python\nVersion: 0.3.99\n")
    file = tmp_path / "model.gguf"
    file.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sources, "gguf", lambda source: file)
    planned.cache_clear()
    yield file
    planned.cache_clear()
    sys.modules.pop("llama_cpp", None)


def test_the_first_line_of_a_file_tells_a_peer() -> None:
    for name in [*DRAFTS, *PEERS]:
        target = OmegaConf.to_container(composed(f"draft={name}").draft)["drafter"]["_target_"]
        assert (name in PEERS) == target.startswith("duoexp.peers."), f"conf/draft/{name}.yaml"


@pytest.mark.parametrize("name", IN_PYTHON)
def test_a_peers_answer_is_the_targets_own(name: str) -> None:
    ours = engine()
    with peer(f"draft={name}") as method:
        for length in (2, 9, 60):
            prompt = prompt_of(length)
            assert ours.decode(method, prompt).ids == expected(ours, prompt).ids


@pytest.mark.parametrize("name", IN_PYTHON)
def test_a_peer_ends_where_the_target_ends(name: str) -> None:
    prompt = prompt_of(9)
    answer = expected(engine(), prompt).ids
    some = engine(eos=[answer[12]])
    text = engine().text(answer)
    with peer(f"draft={name}") as method:
        ended = some.decode(method, prompt)
        assert (ended.ids, ended.reason) == (expected(some, prompt).ids, "eos")
        for limit in (1, 2):
            assert engine(limit=limit).decode(method, prompt).ids == answer[:limit]
        stopping = engine(stop=[text[10:12]])
        stopped = stopping.decode(method, prompt)
        assert (stopped.ids, stopped.reason) == (expected(stopping, prompt).ids, "stop")


@pytest.mark.parametrize("draft", ["random:context=2048,noise=0.08", "random:extra_rows=5", "layers:1", "self"])
@pytest.mark.parametrize("name", ["assisted", "assisted_constant"])
def test_whatever_the_draft_is_the_answer_is_the_targets_own(name: str, draft: str) -> None:
    ours, prompt = engine(), prompt_of(30)
    with peer(f"draft={name}", f"model.draft='{draft}'") as method:
        told = ours.decode(method, prompt)
    assert told.ids == expected(ours, prompt).ids
    whole(told)


def whole(told: Decoding) -> None:
    """The rounds say what was verified, and their times follow each other."""
    for before, after in zip(told.rounds, told.rounds[1:], strict=False):
        assert before.start_s + before.verify_s <= after.start_s
        assert len(before.tokens) == before.accepted + 1 and before.accepted <= before.verified
        assert before.rejected == (before.accepted < before.verified)
    for each in told.rounds:
        assert all(start <= end <= each.start_s for start, end in each.spans)
    assert told.start_s < told.first_s <= told.end_s


def test_its_own_target_as_a_draft_is_never_rejected() -> None:
    with peer("draft=assisted_constant", "model.draft='random:context=2048'") as method:
        told = engine(limit=30).decode(method, prompt_of(30))
    assert [len(each.tokens) for each in told.rounds] == [6] * 5
    assert acceptance_rate(told.rounds) == 1 and all(len(each.spans) == 5 for each in told.rounds)


def test_the_rounded_copy_is_the_draft_itself() -> None:
    """It drafts behind transformers' interface what it drafts here: at temperature 0, all of what the target says."""
    with peer("draft=assisted_constant", "model.draft=self") as method:
        told = engine(limit=60).decode(method, prompt_of(30))
    rate = acceptance_rate(told.rounds)
    assert rate is not None and rate > 0.8
    note = planned("draft=assisted", "model.draft=self").notes[-1]
    assert "a peer" in note and "self, which transformers cannot run: that is the same pass as here" in note
    assert "transformers' own model of layers:1" in planned("draft=assisted", "model.draft='layers:1'").notes[-1]


def test_one_answer_leaves_no_habit_to_the_next() -> None:  # A7
    ours, prompt = engine(limit=60), prompt_of(30)
    heuristic = "draft.drafter.num_assistant_tokens_schedule=heuristic"
    with peer("draft=assisted", heuristic, "model.draft='random:noise=0.3'") as method:
        first, _, again = ours.decode(method, prompt), ours.decode(method, prompt_of(20)), ours.decode(method, prompt)
    assert [each.verified for each in first.rounds] == [each.verified for each in again.rounds]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["draft=assisted", "sampling.temperature=0.8"], "sampling.temperature=0.8 is not for the peer draft=assisted"),
        (["draft=transformers", "draft.schedule=overlapped"], "a loop of its own, so draft.schedule=overlapped"),
        (["draft=transformers", "draft.rule=rejection"], "a loop of its own"),
        (["draft=transformers", "draft.budget=4"], "draft.budget=4"),
        (["draft=transformers", "+draft/policy=chain"], "draft.policy"),
        (["draft=assisted", "draft.drafter.num_assistant_tokens=0"], "num_assistant_tokens=0"),
        (["draft=assisted", "draft.drafter.num_assistant_tokens_schedule=fast"], "'fast' is unknown"),
        (["draft=assisted", "draft.drafter.assistant_confidence_threshold=1"], "assistant_confidence_threshold=1"),
        (["draft=transformers_lookup", "draft.drafter.max_matching_ngram_size=0"], "max_matching_ngram_size=0"),
    ],
)
def test_what_a_peer_cannot_do_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said.replace("(", r"\(")):
        planned(*overrides)


# llama.cpp


def test_llama_cpp_is_asked_for_greedy_tokens(llama_cpp: Path) -> None:  # C1
    ours = engine(limit=20, eos=[110])
    with peer("draft=llama_cpp") as method:
        told = ours.decode(method, prompt_of(9))
        assert "".join(map(chr, told.ids)) == "abcdefghijklmn" and told.reason == "eos"
        assert ours.decode(method, prompt_of(9)).ids == told.ids
    whole(told)
    assert all(each.verified == each.drafted == 0 for each in told.rounds)


def test_a_llama_cpp_of_another_processor_is_told_of(llama_cpp: Path) -> None:
    llama_cpp.write_text("os.kill(os.getpid(), signal.SIGILL)")
    cause = "died of SIGILL; it was built for another processor: CMAKE_ARGS=-DGGML_NATIVE=OFF"
    with pytest.raises(Unavailable, match=cause), peer("draft=llama_cpp"):
        pass


def test_what_llama_cpp_raises_is_told(llama_cpp: Path) -> None:
    llama_cpp.write_text("raise MemoryError('no room')")
    with pytest.raises(Unavailable, match=r"llama.cpp failed: MemoryError: no room"), peer("draft=llama_cpp"):
        pass


def test_llama_cpp_needs_its_library_a_gguf_and_no_stop_string(
    llama_cpp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Unavailable, match=r"not made to look for sampling.stop=\['x'\]"):
        planned("draft=llama_cpp", "sampling.stop=[x]")
    small, cause = "draft.drafter.n_ctx=16", r"exceed llama.cpp's room of 16; raise draft.drafter.n_ctx"
    with peer("draft=llama_cpp", small) as method, pytest.raises(Unavailable, match=cause):
        engine().decode(method, prompt_of(9))
    monkeypatch.setattr(sources, "gguf", lambda source: None)
    with pytest.raises(Unavailable, match=r"reads GGUF files, and the target random:context=2048 is none"):
        planned("draft=llama_cpp")
    (llama_cpp.parent / "llama_cpp.py").unlink()
    with pytest.raises(Unavailable, match="llama-cpp-python is not installed"):
        planned("draft=llama_cpp", "name=other")


def test_a_gguf_is_found_by_its_path_alone(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.touch()
    assert sources.gguf(str(file)) == file
    assert sources.gguf(str(tmp_path)) is None and sources.gguf("random:") is None and sources.gguf("org/name") is None


# The comparison


def compared(
    here: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str, code: int = 0
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    monkeypatch.chdir(here)
    short = ("model=tiny", "hardware=cpu", *FLOAT, "hardware.target.threads=1", "task.limit=2", "all_cores=false")
    monkeypatch.setattr(sys, "argv", ["compare", *short, "sampling.max_new_tokens=12", *arguments])
    try:
        command.main()
    except SystemExit as end:
        assert end.code == code
    else:
        assert code == 0
    folders = list((here / "outputs/comparisons/default").glob("*")) if (here / "outputs").exists() else []
    if not folders:
        return {}, []
    lines = (folders[0] / "answers.jsonl").read_text().splitlines()
    return json.loads((folders[0] / "summary.json").read_text()), [json.loads(line) for line in lines]


def test_all_are_compared_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    summary, answers = compared(tmp_path, monkeypatch, "methods=[vanilla,'dynamic draft.schedule=serial']")
    lines = {line["name"]: line for line in summary["entrants"]}
    ran = ["none", *IN_PYTHON, "vanilla", "dynamic draft.schedule=serial"]
    assert set(lines) == {*ran, "llama_cpp"} and summary["status"] == "finished"
    for name in ran:
        line = lines[name]
        assert (line["peer"] is not None) == (name in PEERS) and line["cores"]
        assert line["equal"] == line["answers"] == 3 and line["tie"] == line["different"] == 0
        assert line["speedup"] > 0 and line["ttft_s"]["median"] > 0 and line["tokens"] == lines["none"]["tokens"]
    assert lines["none"]["speedup"] == 1 and lines["none"]["tau"] == 1
    assert lines["llama_cpp"]["speedup"] is None and "not installed" in lines["llama_cpp"]["reason"]
    fastest = summary["fastest"]
    assert fastest["name"] in ran[-2:] and set(fastest["over"]) == {*ran} - {fastest["name"]}
    low, high = fastest["over"]["assisted"]["interval"]
    assert low <= fastest["over"]["assisted"]["ratio"] <= high
    assert len(answers) == 3 * len(ran)
    said = capsys.readouterr().out
    assert "assisted *" in said and "llama_cpp: null, since llama-cpp-python is not installed" in said


def test_a_peer_that_parts_is_a_result_and_a_method_that_does_is_a_fault(
    tmp_path: Path, llama_cpp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, _ = compared(tmp_path, monkeypatch, "methods=[]", "peers=[llama_cpp]")
    [_, line] = summary["entrants"]
    assert line["different"] == line["answers"] == 3 and line["peer"] == "llama-cpp-python 0.3.99"
    monkeypatch.setattr("duoexp.runner.RULES", {"match": _crooked})
    other = tmp_path / "other"
    other.mkdir()
    compared(other, monkeypatch, "methods=[vanilla]", "peers=[]", code=1)
    assert "answers of vanilla are not the target's own" in capsys.readouterr().err


def _crooked(draft: Any, logits: Any, sampler: Any, position: int) -> Any:
    from duoexp.verify import Verdict, match

    return Verdict((66,), -1, rejected=False) if draft else match(draft, logits, sampler, position)


def test_a_peer_that_dies_drops_out(tmp_path: Path, llama_cpp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama_cpp.write_text("os.kill(os.getpid(), signal.SIGILL)")
    summary, _ = compared(tmp_path, monkeypatch, "methods=[]", "peers=[llama_cpp,transformers]")
    lines = {line["name"]: line for line in summary["entrants"]}
    assert "SIGILL" in lines["llama_cpp"]["reason"] and lines["llama_cpp"]["tokens_per_s"] is None
    assert lines["transformers"]["equal"] == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["methods=[vanilla,vanilla]"], "'vanilla' is in the comparison twice"),
        (["methods=[none]"], "`none` is always there"),
        (["methods=[nonsense]"], "draft=nonsense is not there; choose"),
        (["methods=['vanilla model.draft=self']"], "overrides model.draft=self, which is the same for all"),
        (["sampling.temperature=1"], "sampling.temperature=1.0 is not for a comparison"),
        (["name=a/b"], "name='a/b'"),
        (["tracker=none"], "tracker is no choice of this command; leave it out"),
    ],
)
def test_what_cannot_be_compared_is_told(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    compared(tmp_path, monkeypatch, *arguments, code=2)
    assert said in capsys.readouterr().err


def test_cores_are_told_for_each_side() -> None:
    one, two, gpu = (
        Place("cpu", "float32", 1, (0,)),
        Place("cpu", "float32", 1, (1,)),
        Place("cuda:0", "float16", 1, None),
    )
    split = Hardware("cpu_split", one, two, "process", "raise", ())
    assert _cores(split, one, alone=False) == "0 | 1" and _cores(split, one, alone=True) == "0"
    assert _cores(replace(split, worker="inline"), one, alone=False) == "0"
    assert _cores(replace(split, target=gpu), gpu, alone=False) == "cuda:0 | 1"
    assert home(split) == one and home(replace(split, target=gpu)).cores == (1,)
    wide = _everywhere(replace(one, threads=0))
    assert (wide.threads, wide.cores) == (len(os.sched_getaffinity(0)), tuple(sorted(os.sched_getaffinity(0))))
    assert _everywhere(gpu) == gpu
