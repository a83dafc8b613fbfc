"""PEARL's two halves: what a run without one of them does, and that its answer is the same."""

from itertools import pairwise
from typing import Any

import pytest
from conftest import TEMPERATURES, composed, engine, expected, inline, prompt_of

from duoexp.config import InputError, check

PROMPTS = [prompt_of(16, seed) for seed in range(3)]


def rounds_of(temperature: float, *overrides: str) -> list[Any]:
    """Of each prompt, from the second pass on: the first is over the prompt alone."""
    ours, method = engine(limit=50, temperature=temperature), inline("draft=pearl", *overrides, temperature=temperature)
    found = [ours.decode(method, prompt) for prompt in PROMPTS]
    assert [each.ids for each in found] == [expected(ours, prompt).ids for prompt in PROMPTS]
    return [each.rounds[1:] for each in found]


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_without_pre_verify_every_pass_verifies_a_draft(temperature: float) -> None:
    for rounds in rounds_of(temperature, "draft.pre_verify=false"):
        assert all(each.verified for each in rounds[:-1])  # at the end of an answer there is no room for one
    assert any(not each.verified for rounds in rounds_of(temperature) for each in rounds[:-1])


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_without_post_verify_nothing_is_drafted_while_a_draft_is_verified(temperature: float) -> None:
    for rounds in rounds_of(temperature, "draft.post_verify=false"):
        for before, after in pairwise(rounds):
            assert not (before.verified and (after.head is not None or after.verified))
    assert any(
        before.verified and after.verified for rounds in rounds_of(temperature) for before, after in pairwise(rounds)
    )


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_without_both_it_is_the_serial_schedule(temperature: float) -> None:
    neither = rounds_of(temperature, "draft.pre_verify=false", "draft.post_verify=false")
    serial = rounds_of(temperature, "draft.schedule=serial")
    assert [[each.tokens for each in rounds] for rounds in neither] == [
        [each.tokens for each in rounds] for rounds in serial
    ]


@pytest.mark.parametrize("half", ("pre_verify", "post_verify"))
def test_a_serial_schedule_has_no_halves_to_leave_out(half: str) -> None:
    from omegaconf import OmegaConf

    config: Any = OmegaConf.to_object(composed("draft=vanilla", f"draft.{half}=false"))
    with pytest.raises(InputError, match=f"draft.{half}=False.*overlapped"):
        check(config)
