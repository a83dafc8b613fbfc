"""Passes of fixed shapes say what the lean pass says, padding is without effect, and each shape is one graph."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import planned
from test_lean import MODELS, VOCABULARY, drawn, ids, relative, spoken
from torch._dynamo.utils import counters
from transformers import GPT2Config, GPT2LMHeadModel

from duoexp.config import InputError
from duoexp.lm import load, static
from duoexp.lm.lean import LeanLM
from duoexp.lm.static import WIDTHS, StaticLM
from duoexp.tree import Draft


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the cache grows in a test."""
    monkeypatch.setattr(static, "CAPACITY", 128)


@pytest.fixture
def dynamo() -> Iterator[Any]:
    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


def chain(nodes: int, seed: int = 1) -> Draft:
    return Draft(tuple(ids(nodes, seed)), tuple(range(-1, nodes - 1)))


@pytest.mark.parametrize("name", MODELS)
def test_a_static_pass_says_what_the_lean_pass_says(name: str) -> None:
    model = drawn(name)
    lean, fixed = LeanLM.from_model(model, VOCABULARY), StaticLM.from_model(model, VOCABULARY)
    for expected, found in zip(spoken(lean), spoken(fixed), strict=True):
        assert found.shape == expected.shape and found.dtype == expected.dtype
        assert relative(found, expected) < 1e-4


def test_a_bf16_pass_stays_within_its_rounding() -> None:
    model = drawn("llama").bfloat16()
    lean, fixed = LeanLM.from_model(model, VOCABULARY), StaticLM.from_model(model, VOCABULARY)
    for expected, found in zip(spoken(lean), spoken(fixed), strict=True):
        assert found.dtype == torch.bfloat16
        assert relative(found.float(), expected.float()) < 0.05


@pytest.mark.parametrize("tokens", (1, 2, 3, 5, 8, 9, 16, 17, 31, 32, 33))
def test_every_width_and_one_beyond_say_what_the_lean_pass_says(tokens: int) -> None:
    model, text = drawn("llama"), ids(40)
    lean, fixed = LeanLM.from_model(model, VOCABULARY), StaticLM.from_model(model, VOCABULARY)
    for lm in (lean, fixed):
        lm.logits(text[:39])
    for draft in (chain(tokens - 1), Draft(chain(tokens - 1).tokens, (-1,) * (tokens - 1))):
        assert relative(fixed.logits(text, draft), lean.logits(text, draft)) < 1e-4


@pytest.mark.parametrize("tokens", (1, 3, 20))
def test_what_lies_in_free_slots_and_in_padding_changes_no_bit(tokens: int) -> None:
    fixed, text = StaticLM.from_model(drawn("llama"), VOCABULARY), ids(40)
    fixed.logits(text[:39])
    expected = fixed.logits(text, chain(tokens - 1))
    with torch.inference_mode():
        fixed._cache.buffer[..., 39:, :] = 1e4
    one = fixed._one

    def padded(width: int, start: int, tokens: list[int], positions: list[int], *rest: Any) -> torch.Tensor:
        more = width - len(tokens)
        return one(width, start, [*tokens, *ids(more, seed=7)], [*positions, *ids(more, seed=8)], *rest)

    fixed._one = padded  # type: ignore[method-assign]
    assert fixed.logits(text, chain(tokens - 1)).equal(expected)
    assert fixed._cache.buffer.isfinite().all()


def test_each_width_is_one_graph_however_many_passes_run(dynamo: Any) -> None:
    model = drawn("llama")
    lean, fixed = (kind.from_model(model, VOCABULARY, layers=[0]) for kind in (LeanLM, StaticLM))
    fixed.compile(backend="eager")
    text = ids(150)
    fixed.logits(text[:1])
    assert dynamo["stats"]["unique_graphs"] == len(WIDTHS)
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in range(2, 50):
            for lm in (lean, fixed):
                lm.logits(text[:length], chain(length % 7))
            tree = Draft((5, 9, 6, 8, 3), (-1, -1, 0, 0, 1))
            branch = [*text[:length], 5, 8]
            assert relative(fixed.logits(text[:length], tree), lean.logits(text[:length], tree)) < 1e-4
            assert relative(fixed.logits(branch, tree), lean.logits(branch, tree)) < 1e-4
    assert relative(fixed.logits(text[:100]), lean.logits(text[:100])) < 1e-4  # the cache has grown
    assert relative(fixed.logits(text[:101]), lean.logits(text[:101])) < 1e-4
    assert dynamo["stats"]["unique_graphs"] == 2 * len(WIDTHS)
    assert not dynamo["graph_break"]


def test_a_graph_whose_writes_are_functional_says_the_same(dynamo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a compiler gets it: without writes in place, which it has to put back."""
    monkeypatch.setattr(static, "WIDTHS", (2, 16))
    model = drawn("llama, biases")
    lean, fixed = (kind.from_model(model, VOCABULARY, layers=[0]) for kind in (LeanLM, StaticLM))
    fixed.compile(backend="aot_eager")
    for expected, found in zip(spoken(lean), spoken(fixed), strict=True):
        assert relative(found, expected) < 1e-4


def test_a_model_without_a_lean_pass_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=100))
    monkeypatch.setattr(load, "stock", lambda *_: gpt2)
    for engine in ("lean", "static", "compiled"):
        with pytest.raises(InputError, match=r"GPT2LMHeadModel has no lean pass.*model.engine=transformers"):
            load.load(planned().target, engine, "cpu", "float32", VOCABULARY)


def test_a_compiler_that_fails_is_told_with_the_way_out(dynamo: Any) -> None:
    def broken(*_: Any) -> Any:
        raise OSError("no compiler at hand")

    fixed = StaticLM.from_model(drawn("llama"), VOCABULARY).compile(backend=broken)
    with pytest.raises(InputError, match=r"no compiler at hand.*choose static or lean"):
        fixed.logits([1, 2])


def test_a_draft_on_a_processor_keeps_its_own_engine() -> None:
    plan = planned()
    for engine, device, expected in (
        ("compiled", "cpu", "auto"),
        ("static", "cpu", "auto"),
        ("compiled", "cuda", "compiled"),
        ("lean", "cpu", "lean"),
    ):
        assert load.for_draft(engine, device) == expected
    assert isinstance(load.load(plan.target, "static", "cpu", "float32", plan.target.tokens), StaticLM)
