"""Tasks and templates: what is read, what is refused, and the ids that the target is given."""

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from duoexp.config import InputError, TaskConfig
from duoexp.tasks import WARMUP, Prompt, encode, load, prompts_hash, template_hash

YAMLS = sorted((Path(__file__).parent.parent / "conf" / "task").glob("*.yaml"))
PUBLIC = [path for path in YAMLS if path.stem not in ("mini", "prompt")]
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
BOS, EOS = "<|begin_of_text|>", "<|eot_id|>"
LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a test asked for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def task_of(name: str, **changes: Any) -> TaskConfig:
    path = next(path for path in YAMLS if path.stem == name)
    task = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TaskConfig), OmegaConf.load(path), changes))
    assert isinstance(task, TaskConfig)
    return task


def tokenizer_of(
    template: str | None = None, adds: str = f"{BOS} $A", **special: str | None
) -> PreTrainedTokenizerFast:
    """One token a byte, so that decoding gives the text back; `adds`: what it puts around a text."""
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS, "</s>"])
    known = [(token, tokenizer.token_to_id(token)) for token in (BOS, EOS)]
    tokenizer.post_processor = processors.TemplateProcessing(single=adds, special_tokens=known)
    special = {"bos_token": BOS, "eos_token": EOS, **special}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special)


def text_of(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def prompt_of(kind: str, *turns: str) -> Prompt:
    return Prompt("1", kind, turns or ("Why?",), None)


def python(script: str, *arguments: str, **changes: str) -> list[str]:
    """The lines that a fresh interpreter prints: what it imports is its own."""
    root, settings = Path(__file__).parent.parent, os.environ | changes
    command = [sys.executable, "-c", script, *arguments]
    run = subprocess.run(command, cwd=root, env=settings, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def row(number: int | str, category: str, *turns: str, **more: Any) -> dict[str, Any]:
    return {"question_id": number, "category": category, "turns": list(turns) or [f"Question {number}?"]} | more


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(fields, ensure_ascii=False) + "\n" for fields in rows), encoding="utf-8")
    return str(path)


def spec_bench(path: Path) -> str:
    """Shaped as the published file: eight categories of MT-bench, a reference or none, ids of two types."""
    rows = [row(81 + i, MT_BENCH[i // 2], f"First {i}?", f"Second {i}?") for i in range(16)]
    rows[3]["reference"] = ["first answer", "second answer"]
    rows += [row(161, "translation", "Translate German to English: Guten Tag .", reference=["Good day ."])]
    rows += [row("321", "qa", "Who?"), row(322, "qa", "When?", reference="today"), {"category": "other"}]
    return write(path, rows)


# --- the configuration ---


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_every_task_merges_into_the_schema(path: Path) -> None:
    task = task_of(path.stem)
    assert task.name == path.stem and task.kinds and path.read_text().startswith("# ")


# --- the packaged prompts ---

MINI_ALONE = """
import socket, sys
def refuse(*_): raise SystemExit("a connection was tried")
socket.socket.connect = socket.getaddrinfo = refuse
from duoexp.config import TaskConfig
from duoexp.tasks import load
from omegaconf import OmegaConf
print(len(load(TaskConfig(**OmegaConf.load(sys.argv[1])))))
if "datasets" in sys.modules: raise SystemExit("datasets was imported")
"""


def test_mini_has_eight_of_each_kind_and_no_warm_up_prompt() -> None:
    prompts = load(task_of("mini", limit=None))
    assert Counter(prompt.kind for prompt in prompts) == dict.fromkeys(task_of("mini").kinds, 8)
    asked = {turn for prompt in prompts for turn in prompt.turns}
    assert len(WARMUP) >= 2 and not asked & {turn for prompt in WARMUP for turn in prompt.turns}


def test_mini_needs_neither_network_nor_datasets() -> None:  # H3
    assert python(MINI_ALONE, str(YAMLS[0].parent / "mini.yaml")) == ["14"]


# --- the limit ---


def test_mini_takes_two_of_each_kind_unless_told() -> None:
    names = [prompt.id for prompt in load(task_of("mini"))]
    assert names == [f"mini-{kind}-{place}" for kind in task_of("mini").kinds for place in (1, 5)]


@pytest.mark.parametrize(
    ("limit", "counts"),
    [
        (1, [1, 0, 0, 0, 0, 0, 0]),
        (3, [1, 0, 1, 0, 1, 0, 0]),
        (7, [1] * 7),
        (16, [3, 2, 2, 3, 2, 2, 2]),
        (55, [8, 8, 8, 8, 8, 8, 7]),
        (56, [8] * 7),
        (10**9, [8] * 7),
    ],
)
def test_limit_is_spread_evenly_over_the_kinds(limit: int, counts: list[int]) -> None:
    found = Counter(prompt.kind for prompt in load(task_of("mini", limit=limit)))
    assert [found[kind] for kind in task_of("mini").kinds] == counts
    assert load(task_of("mini", limit=limit)) == load(task_of("mini", limit=limit))


def test_limit_is_spread_evenly_within_a_kind(tmp_path: Path) -> None:
    path = spec_bench(tmp_path / "question.jsonl")
    prompts = load(task_of("mt_bench", path=path, limit=8))
    assert [prompt.id for prompt in prompts] == [str(81 + 2 * i) for i in range(8)]  # one of each category


def test_a_short_kind_gives_its_share_to_the_others(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", [row(1, "qa"), *(row(i, "rag") for i in range(2, 12))])
    task = TaskConfig(name="own", kinds=["qa", "rag"], path=path, limit=6)
    assert Counter(prompt.kind for prompt in load(task)) == {"qa": 1, "rag": 5}


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_without_a_prompt_is_refused(limit: int) -> None:
    with pytest.raises(InputError, match=rf"task\.limit={limit} .*1 or more"):
        load(task_of("mini", limit=limit))


# --- the files of the paper ---


def test_spec_bench_is_filtered_to_the_kind_of_the_task(tmp_path: Path) -> None:
    path = spec_bench(tmp_path / "question.jsonl")
    mt_bench, qa = load(task_of("mt_bench", path=path)), load(task_of("qa", path=path))
    assert len(mt_bench) == 16 and {prompt.kind for prompt in mt_bench} == {"mt_bench"}
    assert mt_bench[3] == Prompt("84", "mt_bench", ("First 3?", "Second 3?"), "first answer\nsecond answer")
    assert qa == [Prompt("321", "qa", ("Who?",), None), Prompt("322", "qa", ("When?",), "today")]


def test_human_eval_is_read_by_its_own_fields(tmp_path: Path) -> None:
    fields = {"task_id": "HumanEval/0", "prompt": "def one():\n", "canonical_solution": "    return 1\n", "test": ""}
    path = write(tmp_path / "humaneval.jsonl", [fields])
    expected = [Prompt("HumanEval/0", "humaneval", ("def one():\n",), "    return 1\n")]
    assert load(task_of("humaneval", path=path)) == load(task_of("humaneval", path=str(tmp_path))) == expected


def test_a_folder_has_a_file_for_each_kind(tmp_path: Path) -> None:
    write(tmp_path / "qa.jsonl", [{"prompt": "Who?"}])
    write(tmp_path / "mt_bench.jsonl", [row(81, "writing", "Write.", "Again.")])
    task = TaskConfig(name="two", kinds=["qa", "mt_bench"], path=str(tmp_path))
    assert [(prompt.id, prompt.kind) for prompt in load(task)] == [("qa-1", "qa"), ("81", "mt_bench")]


def test_a_line_ends_only_where_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "qa.jsonl"
    path.write_bytes(('\ufeff{"prompt": "a\u2028b"}\r\n\r\n{"prompt": "c"}').encode())
    assert [prompt.turns for prompt in load(task_of("qa", path=str(path)))] == [("a\u2028b",), ("c",)]


REFUSED = {
    "empty": ("", r"rows\.jsonl is empty"),
    "blank": ("\n\n", r"rows\.jsonl is empty"),
    "malformed": ('{"prompt": "a"}\n\n{"prompt": ', r"line 3 is not JSON"),
    "array": ('[{"prompt": "a"}]', r"line 1 is a JSON list"),
    "no turns": ('{"question_id": 7, "category": "qa"}', r"line 1 \(id 7\) has neither"),
    "empty turns": ('{"question_id": 7, "turns": []}', r"\(id 7\) has neither"),
    "text for turns": ('{"question_id": 7, "turns": "Why?"}', r"\(id 7\) has neither"),
    "number for a turn": ('{"question_id": 7, "turns": [1]}', r"\(id 7\) has neither"),
    "empty text": ('{"question_id": 7, "turns": [" \\n"]}', r"\(id 7\) has an empty prompt"),
    "empty second turn": ('{"question_id": 7, "turns": ["Why?", ""]}', r"\(id 7\) has an empty prompt"),
    "other kind": ('{"category": "rag", "turns": ["a"]}', r"no prompt for qa"),
    "id twice": ('{"question_id": 7, "prompt": "a"}\n{"question_id": "7", "prompt": "b"}', r"id 7 is there twice"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_cannot_be_used_is_refused(case: str, tmp_path: Path) -> None:
    text, message = REFUSED[case]
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load(task_of("qa", path=str(path)))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "ü"}'.encode("latin-1"))
    for path, message in (
        ("gone.jsonl", "gone.jsonl cannot be read"),
        ("latin.jsonl", "is not UTF-8"),
        (".", "qa.json"),
    ):
        with pytest.raises(InputError, match=message):
            load(task_of("qa", path=str(tmp_path / path)))


def test_a_kind_without_a_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no prompt for rag, humaneval; give another"):
        task = TaskConfig(name="own", kinds=["qa", "rag", "humaneval"], path=spec_bench(tmp_path / "question.jsonl"))
        load(task)


def test_a_row_without_category_is_refused_where_kinds_are_several(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", [{"prompt": "Who?"}])
    with pytest.raises(InputError, match='line 1 has no "category"'):
        load(task_of("mini", path=path))


# --- one prompt of the user's own ---


def test_a_text_is_one_prompt() -> None:
    assert load(task_of("prompt", text=" a=b; #\n")) == [Prompt("prompt-1", "prompt", (" a=b; #\n",), None)]


def test_a_text_file_is_one_prompt_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text('{"turns": 1}\n# ünï <|x|>\n', encoding="utf-8")
    assert [prompt.turns for prompt in load(task_of("prompt", path=str(path)))] == [('{"turns": 1}\n# ünï <|x|>\n',)]


def test_no_text_or_two_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    path = str(tmp_path / "empty.txt")
    for changes, message in (
        ({}, r"no prompt; give task\.text"),
        ({"text": ""}, r"task\.text is an empty prompt"),
        ({"text": "  "}, r"task\.text is an empty prompt"),
        ({"path": path}, r"empty\.txt is an empty prompt"),
        ({"path": path, "text": "a"}, "both given"),
    ):
        with pytest.raises(InputError, match=message):
            load(task_of("prompt", **changes))
    with pytest.raises(InputError, match=r"7 kinds.*task=prompt"):
        load(task_of("mini", text="Why?"))


# --- public sources, without a network ---

UNREACHABLE = """
import socket, sys
from pathlib import Path
from datasets import config
from datasets.utils.file_utils import hash_url_to_filename
from duoexp.config import InputError, TaskConfig
from duoexp.tasks import load
from omegaconf import OmegaConf

def refuse(*_): raise SystemExit("a connection was tried")
socket.socket.connect = socket.getaddrinfo = refuse
tasks = [TaskConfig(**OmegaConf.load(path)) for path in sys.argv[2:]]
for task in tasks:
    try:
        load(task)
        raise SystemExit(task.name + " was loaded out of nowhere")
    except InputError as error:
        print(error)
qa = next(task for task in tasks if task.name == "qa")
place = Path(config.DOWNLOADED_DATASETS_PATH, hash_url_to_filename(qa.source, etag=None))
place.parent.mkdir(parents=True, exist_ok=True)
place.write_text(Path(sys.argv[1]).read_text())
print(len(load(qa)), "from the cache")
"""


def test_public_sources_offline_name_the_way_out_or_come_from_the_cache(tmp_path: Path) -> None:  # H1
    home = tmp_path / "home"
    places = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "HF_DATASETS_CACHE": str(home / "datasets")}
    *refusals, cached = python(UNREACHABLE, spec_bench(tmp_path / "question.jsonl"), *map(str, PUBLIC), **places)
    assert len(refusals) == len(PUBLIC) == 7 and cached == "2 from the cache"
    for path, refusal in zip(PUBLIC, refusals, strict=True):
        assert "task.path=FILE" in refusal and f"{path.stem}.jsonl" in refusal


def test_human_eval_is_asked_for_by_name_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[object, ...], dict[str, object]]] = []

    def load_dataset(*names: object, **settings: object) -> list[dict[str, str]]:
        asked.append((names, settings))
        return [{"task_id": "HumanEval/0", "prompt": "def one():\n"}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert [prompt.id for prompt in load(task_of("humaneval"))] == ["HumanEval/0"]
    assert asked == [(("openai/openai_humaneval", "openai_humaneval"), {"split": "test"})]  # and no script is trusted


def test_a_data_set_without_configuration_is_refused() -> None:  # H2
    with pytest.raises(InputError, match=r"task\.subset=NAME"):
        load(task_of("humaneval", subset=None))


# --- templates ---


def test_chat_has_one_bos_whoever_brings_it() -> None:  # D3
    by_template, by_tokenizer = tokenizer_of(LLAMA_3), tokenizer_of(LLAMA_3.removeprefix("{{ bos_token }}"))
    expected = (
        f"{BOS}<|start_header_id|>user<|end_header_id|>\n\nWhy?{EOS}<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    for tokenizer in (by_template, by_tokenizer):
        ids = encode(tokenizer, "auto", prompt_of("qa"))
        assert ids.count(tokenizer.bos_token_id) == 1 and text_of(tokenizer, ids) == expected


@pytest.mark.parametrize("text", ["Why?", f"{BOS}Why?"])
def test_raw_text_has_one_bos(text: str) -> None:  # D3
    tokenizer = tokenizer_of()
    ids = encode(tokenizer, "auto", prompt_of("prompt", text))
    assert ids.count(tokenizer.bos_token_id) == 1 and text_of(tokenizer, ids) == f"{BOS}Why?"


def test_no_bos_where_the_tokenizer_adds_none() -> None:
    for tokenizer in (tokenizer_of(adds="$A"), tokenizer_of(adds="$A", bos_token=None)):  # SmolLM2; Qwen
        assert text_of(tokenizer, encode(tokenizer, "plain", prompt_of("prompt"))) == "Why?"


def test_an_end_token_that_the_tokenizer_adds_is_left_out() -> None:
    tokenizer = tokenizer_of(adds=f"{BOS} $A {EOS}")
    assert text_of(tokenizer, encode(tokenizer, "plain", prompt_of("prompt"))) == f"{BOS}Why?"


def test_the_second_turn_follows_the_first_answer() -> None:
    tokenizer, prompt = tokenizer_of(LLAMA_3), prompt_of("mt_bench", "One?", "Two?")
    first, second = (text_of(tokenizer, encode(tokenizer, "chat", prompt, said)) for said in ([], ["I."]))
    end = f"{EOS}<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert first.endswith(f"One?{end}") and "Two?" not in first
    assert second == f"{first}I.{EOS}<|start_header_id|>user<|end_header_id|>\n\nTwo?{end}"
    with pytest.raises(IndexError):
        encode(tokenizer, "chat", prompt, ["I.", "II."])


def test_vicuna_is_the_published_form() -> None:
    tokenizer, prompt = tokenizer_of(eos_token="</s>"), prompt_of("mt_bench", "One?", "Two?")
    system = (
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions."
    )
    first, second = (text_of(tokenizer, encode(tokenizer, "vicuna", prompt, said)) for said in ([], ["I."]))
    assert first == f"{BOS}{system} USER: One? ASSISTANT:"
    assert second == f"{BOS}{system} USER: One? ASSISTANT: I.</s>USER: Two? ASSISTANT:"


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("summarization", "Summarize: It rained.", "It rained.\nTL;DR:"),
        (
            "translation",
            "Translate German to English: Guten Tag .",
            "Translate German to English. German: Guten Tag . English:",
        ),
        ("math_reasoning", "2 + 2?", "2 + 2? Let's think step by step."),
        ("rag", "Passage\nWhy?", "Passage\nWhy?"),
        ("humaneval", "def one():\n", "def one():\n"),
        ("prompt", "Summarize: It rained.", "Summarize: It rained."),
    ],
)
def test_plain_is_the_form_for_base_models(kind: str, text: str, expected: str) -> None:
    tokenizer = tokenizer_of()
    assert text_of(tokenizer, encode(tokenizer, "plain", prompt_of(kind, text))) == BOS + expected


def test_plain_asks_questions_in_the_form_of_vicuna() -> None:
    tokenizer = tokenizer_of()
    for kind in ("qa", "mt_bench"):
        assert encode(tokenizer, "plain", prompt_of(kind)) == encode(tokenizer, "vicuna", prompt_of(kind))


def test_plain_continues_after_earlier_answers() -> None:
    tokenizer = tokenizer_of()
    ids = encode(tokenizer, "plain", prompt_of("prompt", "One?", "Two?"), ["I."])
    assert text_of(tokenizer, ids) == f"{BOS}One?\n\nI.\n\nTwo?"


def test_human_eval_is_a_request_where_somebody_is_asked() -> None:
    tokenizer, prompt = tokenizer_of(LLAMA_3), prompt_of("humaneval", "def one():\n    '''1'''")
    for template in ("chat", "vicuna"):
        text = text_of(tokenizer, encode(tokenizer, template, prompt))
        assert "Complete the following Python function" in text and "def one():\n    '''1'''" in text


def test_auto_is_chat_only_where_there_is_a_template() -> None:
    for tokenizer, template in ((tokenizer_of(LLAMA_3), "chat"), (tokenizer_of(), "plain")):
        for kind in ("summarization", "prompt"):
            assert encode(tokenizer, "auto", prompt_of(kind)) == encode(tokenizer, template, prompt_of(kind))


def test_a_template_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="no chat template; take plain or vicuna"):
        encode(tokenizer_of(), "chat", WARMUP[0])
    with pytest.raises(InputError, match=r"model\.template=chatml is none of auto"):
        encode(tokenizer_of(), "chatml", WARMUP[0])


def test_a_template_with_a_date_gives_the_same_prompt_every_day() -> None:
    dated = "{% if strftime_now is defined %}{% set date = strftime_now('%d %b %Y') %}{% endif %}{{ date }}: "
    tokenizer = tokenizer_of(dated + LLAMA_3.removeprefix("{{ bos_token }}"))
    assert text_of(tokenizer, encode(tokenizer, "chat", prompt_of("qa"))).startswith(f"{BOS}26 Jul 2024: ")


def test_the_shortest_prompts() -> None:  # B4
    plain, silent = tokenizer_of(adds="$A"), tokenizer_of(adds="$A")
    assert len(encode(plain, "plain", prompt_of("prompt", "a"))) == 1
    assert encode(tokenizer_of(), "plain", prompt_of("prompt", BOS)) == [plain.bos_token_id]
    silent.backend_tokenizer.model = models.BPE(vocab={"a": 0}, merges=[])  # what it cannot spell, it drops
    with pytest.raises(InputError, match="prompt 1 becomes no token"):
        encode(silent, "plain", prompt_of("prompt", "b"))


# --- what is recorded ---


def test_template_hash_tells_templates_apart() -> None:  # D3
    chat, plain = tokenizer_of(LLAMA_3), tokenizer_of()
    assert template_hash(chat, "auto") == template_hash(chat, "chat") == template_hash(tokenizer_of(LLAMA_3), "chat")
    others = [tokenizer_of(LLAMA_3.replace("\n\n", "\n")), tokenizer_of(LLAMA_3, adds="$A")]
    hashes = [template_hash(tokenizer, "auto") for tokenizer in (chat, plain, *others)]
    assert len({*hashes, template_hash(plain, "vicuna")}) == 5


def test_prompts_hash_tells_prompts_apart() -> None:
    first = Prompt("1", "qa", ("a", "b"), None)
    same = Prompt("1", "qa", ("a", "b"), "an answer is not asked")
    others = [
        Prompt("2", "qa", ("a", "b"), None),
        Prompt("1", "rag", ("a", "b"), None),
        Prompt("1", "qa", ("ab",), None),
    ]
    assert prompts_hash([first]) == prompts_hash([same])
    assert len({prompts_hash(prompts) for prompts in ([first], [first, first], *([other] for other in others))}) == 5
