"""A cache that was rolled back, extended along a draft or broken off gives the logits of a model that starts afresh."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import engine, expected, inline, loaded, planned, prompt_of, target_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

from duoexp.budget import Fixed
from duoexp.config import InputError
from duoexp.lm.causal_lm import CachedLM, CausalLM
from duoexp.lm.lean import Layer, LeanLM
from duoexp.lm.transformers_lm import TransformersLM
from duoexp.schedule import SCHEDULES
from duoexp.tree import Draft

TEXT = prompt_of(300, seed=2)
TREE = Draft((5, 6, 7, 8, 9, 5), (-1, -1, 0, 0, 1, 3))  # two sequences, one of which forks; 5 stands twice


@pytest.fixture(scope="module", params=("lean", "transformers", "static"))
def engine_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def loaded_lm(engine_name: str) -> CachedLM:
    found: CachedLM = loaded(planned().target, engine_name)
    return found


@pytest.fixture
def lm(loaded_lm: CachedLM) -> CachedLM:
    loaded_lm.clear()
    return loaded_lm


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Another copy, which is only ever run without a cache."""
    found = loaded(planned().target, "transformers").model
    assert isinstance(found, LlamaForCausalLM)
    return found


@torch.inference_mode()
def afresh(model: LlamaForCausalLM, context: Sequence[int], draft: Draft, rows: Sequence[int]) -> Tensor:
    """Each row from the plain text that leads to it."""
    texts = [[*context, *(draft.tokens[node] for node in draft.path(row - 1))] for row in rows]
    return torch.stack([model(torch.tensor([text]), use_cache=False).logits[0, -1, :259] for text in texts])


def check(
    lm: CausalLM,
    model: LlamaForCausalLM,
    context: Sequence[int],
    draft: Draft = Draft(),
    rows: Sequence[int] | None = None,
) -> None:
    found = lm.logits(context, draft, rows)
    wanted = afresh(model, context, draft, range(len(draft) + 1) if rows is None else rows)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)  # logits of standard deviation 4: 7 digits hold


@pytest.mark.parametrize("count", (0, 1, 19, 20, 40))
def test_rollback_by_any_count_equals_a_fresh_prefill(lm: CachedLM, model: LlamaForCausalLM, count: int) -> None:  # C3
    """20 are cached: 19 leaves one, 20 none that is shared, and 40 would be more than there is."""
    check(lm, model, TEXT[:20])
    other = [7] * 3
    shorter = [*TEXT[: max(0, 20 - count)], *other]
    check(lm, model, shorter)
    check(lm, model, TEXT[: max(1, 20 - count)])


def test_rollback_twice_in_a_row_equals_a_fresh_prefill(lm: CachedLM, model: LlamaForCausalLM) -> None:  # C3
    for length in (20, 15, 9, 9, 1, 30):
        check(lm, model, TEXT[:length])


def test_a_prompt_beyond_the_caches_first_size_equals_a_fresh_prefill(lm: CachedLM, model: LlamaForCausalLM) -> None:
    check(lm, model, TEXT[:250])
    for length in range(251, 300, 7):
        check(lm, model, TEXT[:length])


@pytest.mark.parametrize("rows", (None, [0], [3], [6], [2, 5], [1, 2, 3, 4, 5, 6], [6, 1, 0]))
def test_any_rows_of_a_tree_equal_a_fresh_prefill(  # C5
    lm: CachedLM, model: LlamaForCausalLM, rows: list[int] | None
) -> None:
    check(lm, model, TEXT[:12], TREE, rows)
    check(lm, model, TEXT[:12], TREE, rows)
    check(lm, model, TEXT[:12], TREE)


@pytest.mark.parametrize("node", range(-1, len(TREE)))
def test_the_context_goes_on_along_any_branch_of_a_tree(lm: CachedLM, model: LlamaForCausalLM, node: int) -> None:
    lm.logits(TEXT[:12], TREE)
    context = [*TEXT[:12], *(TREE.tokens[each] for each in TREE.path(node))]
    check(lm, model, context, TREE.below(node), rows=None)
    lm.logits(TEXT[:12], TREE)
    check(lm, model, [*context, 77], Draft((5, 6), (-1, -1)))


def test_random_turns_of_context_and_tree_equal_a_fresh_prefill(lm: CachedLM, model: LlamaForCausalLM) -> None:  # C3
    """What drafting and verifying do, and what they never do; of few tokens, so that trees share nodes."""
    dice = random.Random(0)
    context, draft = TEXT[:5], Draft()
    for _ in range(150):
        turn = dice.random()
        if turn < 0.2:
            context = context[: dice.randrange(1, len(context) + 1)]
        elif turn < 0.5 and draft:
            node = dice.randrange(-1, len(draft))
            context = [*context, *(draft.tokens[each] for each in draft.path(node))]
            draft = draft.below(node) if dice.random() < 0.7 else Draft()
        else:
            context = [*context, *dice.choices(range(4), k=dice.randrange(3))]
        context = context[-40:] or [1]
        for _ in range(dice.randrange(5)):
            node = dice.randrange(-1, len(draft))
            token = dice.randrange(4)
            if draft.child(node, token) is None:
                draft = draft.grow(node, [token])
        rows = None if dice.random() < 0.4 else dice.sample(range(len(draft) + 1), dice.randrange(1, len(draft) + 2))
        check(lm, model, context, draft, rows)


TOKEN = st.integers(0, 2)  # so few that contexts and trees share beginnings
TURN = st.tuples(
    st.integers(0, 3),  # how much of the context is taken back
    st.none() | st.integers(0, 9),  # or the node along which it goes on
    st.lists(TOKEN, max_size=2),  # what follows
    st.lists(st.tuples(st.integers(0, 9), TOKEN), max_size=4),  # nodes that grow, each on another
    st.none() | st.sets(st.integers(0, 9)),  # the rows that are wanted
)


@settings(max_examples=40)
@given(turns=st.lists(TURN, min_size=3, max_size=8))
def test_any_turns_of_context_and_tree_equal_a_fresh_prefill(
    loaded_lm: CachedLM, model: LlamaForCausalLM, turns: list[Any]
) -> None:
    loaded_lm.clear()
    context, draft = [1, 2, 0], Draft()
    for cut, along, more, grown, wanted in turns:
        if along is None:
            context = [*(context[: len(context) - cut] or [1]), *more]
        else:
            node = along % (len(draft) + 1) - 1
            context = [*context, *(draft.tokens[each] for each in draft.path(node)), *more]
            draft = draft.below(node)
        for parent, token in grown:
            draft = draft.grow(parent % (len(draft) + 1) - 1, [token])
        rows = None if wanted is None else [row for row in wanted if row <= len(draft)] or [0]
        check(loaded_lm, model, context, draft, rows)


@pytest.mark.parametrize("layer", (0, 1))
def test_after_a_pass_that_broke_off_the_next_one_is_right(
    lm: CachedLM, model: LlamaForCausalLM, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then the layers before it hold new tokens in their caches, and the others don't."""
    run = Layer.__call__

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, Layer) and self.index != layer:
            return run(self, *args)
        raise RuntimeError("out of memory")

    for before, during, after in (((), TREE, TREE), (TREE, Draft(), TREE), (TREE, TREE.below(0), Draft((1,), (-1,)))):
        lm.clear()
        if before:
            lm.logits(TEXT[:12], before)
        with monkeypatch.context() as patch:
            if isinstance(lm, LeanLM):
                patch.setattr(Layer, "__call__", broken)
            else:
                patch.setattr(lm.model.model.layers[layer], "forward", broken)
            with pytest.raises(RuntimeError, match="out of memory"):
                lm.logits([*TEXT[:12], 5], during)
        check(lm, model, [*TEXT[:12], 5], after)
        check(lm, model, TEXT[:10], after)


class Counted:
    """How many tokens each pass ran."""

    def __init__(self, lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[int] = []
        self.run = lm.run
        monkeypatch.setattr(lm, "run", self.counted)

    def counted(self, tokens: list[int], **rest: Any) -> Tensor:
        self.passes.append(len(tokens))
        found: Tensor = self.run(tokens, **rest)
        return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ("none", "prompt_lookup", "vanilla", "fixed", "dynamic"))
def test_each_side_runs_only_what_is_new(name: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:  # C7
    """The target: the block and one token before it. The draft: what it has not read, and what it drafts."""
    method, budget, prompt = inline(f"draft={name}"), 6, prompt_of(40)
    wanted = expected(engine(limit=100), prompt)
    target = Counted(target_of(), monkeypatch)
    drafter = method.worker.drafter
    draft = Counted(drafter.lm, monkeypatch) if drafter.needs_model else None
    asked: list[int] = []  # how many passes of the draft were made before each question
    ask = method.worker.ask

    def counted(*question: Any) -> None:
        asked.append(len(draft.passes) if draft else 0)
        ask(*question)

    monkeypatch.setattr(method.worker, "ask", counted)
    scheduled = replace(method, schedule=SCHEDULES[schedule], budget=Fixed(budget))
    rounds = engine(limit=100).decode(scheduled, prompt).rounds
    assert [token for each in rounds for token in each.tokens] == list(wanted.ids)
    assert target.passes == [len(prompt), *(1 + each.verified for each in rounds[1:])]
    if draft is None:
        return
    turns = [sum(draft.passes[begin:end]) for begin, end in zip(asked, [*asked[1:], len(draft.passes)], strict=True)]
    # One token of the context is run again for its logits; all nodes but the last of each sequence are run to draft on.
    assert all(turn <= len(each.tokens) + 1 + budget for turn, each in zip(turns[1:], rounds[1:], strict=False))
    assert sum(turns[1:]) <= sum(each.drafted + len(each.tokens) + 1 for each in rounds[1:])


@pytest.mark.parametrize("context", (0, 1))
def test_an_empty_context_and_one_beyond_the_models_are_refused(lm: CachedLM, context: int) -> None:  # B4
    with pytest.raises(InputError, match=r"empty context|exceed the model's context of 2048"):
        lm.logits([1] * 2046 * context, TREE)


def test_a_sliding_window_is_refused_by_its_name() -> None:  # C2
    """Its cache forgets, so a rollback beyond the window would be silently wrong (transformers#48280)."""
    config = MistralConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=8,
    )  # fmt: skip
    with pytest.raises(InputError, match="'mistral' keeps a DynamicSlidingWindowLayer"):
        TransformersLM(MistralForCausalLM(config), 16)
    config.sliding_window = None
    assert TransformersLM(MistralForCausalLM(config), 16).logits([1, 2]).shape == (1, 16)
