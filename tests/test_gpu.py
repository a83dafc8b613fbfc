"""On a GPU: the same properties as on a processor. Skipped where there is none."""

from functools import cache

import pytest
import torch
from conftest import ECHO_PROMPT, engine, inline, planned, prompt_of

from duoexp.budget import Fixed
from duoexp.engine import Method
from duoexp.lm.causal_lm import CausalLM
from duoexp.lm.load import load
from duoexp.profile import Profile, Want, measure
from duoexp.schedule import SCHEDULES
from duoexp.tree import Draft
from duoexp.verify import match

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

ENGINES = ("lean", "transformers", "static", "compiled")


@cache
def on_gpu(name: str) -> CausalLM:
    plan = planned()
    return load(plan.target, name, "cuda", "float32", plan.target.tokens)


@pytest.mark.parametrize("length", (1, 40))
@pytest.mark.parametrize("name", ENGINES)
def test_a_gpu_says_what_the_processor_says(name: str, length: int) -> None:
    plan, prompt = planned(), prompt_of(length)
    draft = Draft((1, 2, 3), (-1, 0, 0))
    here = load(plan.target, "lean", "cpu", "float32", plan.target.tokens).logits(prompt, draft)
    there = on_gpu(name).logits(prompt, draft)
    torch.testing.assert_close(there.cpu(), here, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("temperature", (0.0, 0.8))
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ENGINES)
def test_a_target_on_the_gpu_with_a_draft_on_the_processor(name: str, schedule: str, temperature: float) -> None:
    ours = engine(on_gpu(name), temperature=temperature)
    alone = Method(SCHEDULES["serial"], inline("draft=none").worker, match, Fixed(0))
    for method in ("single", "fixed", "dynamic"):
        drafted = inline(f"draft={method}", temperature=temperature)
        decoding = ours.decode(Method(SCHEDULES[schedule], drafted.worker, match, Fixed(8)), ECHO_PROMPT)
        assert decoding.ids == ours.decode(alone, ECHO_PROMPT).ids


def test_passes_on_the_gpu_are_timed() -> None:
    profile = Profile({})
    want = Want(False, [40], [1, 4], [1], prefill=True)
    assert measure(on_gpu("lean"), inline("draft=vanilla").worker, 259, 1, want, profile)
    assert set(profile.timings) == set(want.places(40))
