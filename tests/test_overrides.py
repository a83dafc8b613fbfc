"""Any text can be given: quoted on the command line, or in a file. And what was configured comes back from where it is
written.
"""

import json

import pytest
from conftest import CONF, composed, planned
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from test_run import GROUPS

from duoexp.config import Config
from duoexp.errors import is_input, sentence
from duoexp.runner import prepare
from duoexp.tasks import load

SIGNS = "=,#;&()[]{}<>|@%*?!'\"\\$:/~+-.^`_ \t\nab1üß漢🙂"
TEXTS = st.text(st.sampled_from(SIGNS)) | st.text()
PARSER = OverridesParser.create()


def quoted(text: str) -> str:
    return QuotedString(text, Quote.double).with_quotes()


@settings(max_examples=150)
@given(TEXTS)
def test_a_quoted_text_is_taken_as_it_is(text: str) -> None:
    assert PARSER.parse_override(f"task.text={quoted(text)}").value() == text


def told(text: str) -> str | None:
    """What is said of `task.text=` and this; None where it was taken, and then it was taken as it is."""
    try:
        config = composed(f"task.text={text}")
        given = OmegaConf.to_container(config.task, resolve=True)
    except Exception as error:
        assert is_input(error), "the input is at fault, and no traceback is due"
        return sentence(error)
    assert given["text"] == text  # type: ignore[index,call-overload]
    return None


@pytest.mark.parametrize("sign", [*SIGNS.replace(" ", "").replace("\n", ""), "<|eot_id|>", "${x}", "${", "a, b", "a=b"])
def test_an_unquoted_sign_is_taken_as_it_is_or_the_ways_round_are_told(sign: str) -> None:
    words = told(f"a{sign}b")
    assert words is None or ("task.path=FILE" in words and len(words.splitlines()) == 1), words


@settings(max_examples=30)
@given(st.text(st.sampled_from(SIGNS.replace(" ", "").replace("\t", "").replace("\n", "")), min_size=1))
@example("[a]")
@example("{a: 1}")
def test_an_unquoted_text_is_taken_as_it_is_or_the_ways_round_are_told(text: str) -> None:
    if PARSED_OTHERWISE & set(text):
        return
    words = told("x" + text if text[0] not in "[{" else text)
    assert words is None or "task.path=FILE" in words, words


# Quotes and backslashes are the grammar's own: "a" without its quotes is what was asked for.
PARSED_OTHERWISE = set("'\"\\")


@given(text=TEXTS.filter(lambda text: text.strip() and not {"\r", "\ufeff"} & set(text)))
def test_a_text_in_a_file_is_taken_as_it_is(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "a text = with signs.txt"
    file.write_text(text, newline="")
    task = OmegaConf.to_object(TASK)
    task.path = str(file)  # type: ignore[union-attr]
    [prompt] = load(task)  # type: ignore[arg-type]
    assert prompt.turns == (text,)


TASK = composed("task.text=null").task


# What was configured comes back


@settings(max_examples=6)
@given(
    st.fixed_dictionaries({group: st.sampled_from(names) for group, names in GROUPS.items() if group != "draft/policy"})
)
def test_any_choice_comes_back_from_the_file_and_from_the_line_that_a_job_is_sent(choices: dict[str, str]) -> None:
    given = composed(*(f"{group}={name}" for group, name in choices.items()))
    check_round_trip(OmegaConf.to_container(given, resolve=True))


@settings(max_examples=25)
@given(
    TEXTS,
    st.floats(0, 1e6),
    st.floats(0, 1, exclude_min=True),
    st.integers(-(2**63), 2**63),
    st.lists(TEXTS, max_size=3),
)
@example("1e3", 0.1, 1.0, 0, ["null", "007", "~"])
def test_any_value_comes_back(text: str, temperature: float, top_p: float, seed: int, stop: list[str]) -> None:
    given = json.loads(json.dumps(PLAIN))
    given["task"]["text"] = text
    given["sampling"] |= {"temperature": temperature, "top_p": top_p, "seed": seed, "stop": stop}
    check_round_trip(given)


PLAIN = OmegaConf.to_container(composed(), resolve=True)


def check_round_trip(given: object) -> None:
    """`config.yaml` is the first, the line for `duoexp.job` the second."""
    for back in (OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(given))), json.loads(json.dumps(given))):  # type: ignore[call-overload]
        merged = OmegaConf.merge(OmegaConf.structured(Config), back)
        found = OmegaConf.to_container(merged, resolve=True)
        assert json.dumps(found, sort_keys=True) == json.dumps(given, sort_keys=True)  # 1 is not 1.0 there


def test_a_config_that_came_back_is_the_same_job() -> None:
    given = OmegaConf.to_container(composed("draft=dynamic", "task.text='1e3: \"ü\"'"), resolve=True)
    back = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(given))))
    assert prepare(back, CONF / "hardware").key == planned("draft=dynamic", "task.text='1e3: \"ü\"'").key  # type: ignore[arg-type]
