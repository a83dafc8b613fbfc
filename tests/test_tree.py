"""Properties of token trees, over trees of any shape: a tree is the set of sequences that lead from its root."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from conftest import drafts
from hypothesis import given
from hypothesis import strategies as st

from duoexp.tree import Draft

TOKENS = st.lists(st.integers(0, 3), max_size=6)


def sequences(draft: Draft) -> list[tuple[int, ...]]:
    """The tokens that lead to each node, the node's own included."""
    return [words(draft, node) for node in range(len(draft))]


def words(draft: Draft, node: int) -> tuple[int, ...]:
    return tuple(draft.tokens[each] for each in draft.path(node))


@given(drafts())
def test_a_path_leads_from_the_root_through_parents(draft: Draft) -> None:
    for node in range(-1, len(draft)):
        path = draft.path(node)
        assert all(draft.parents[child] == parent for parent, child in pairwise([-1, *path]))
        assert draft.depth(node) == len(path) == [0, *draft.depths()][node + 1]
        assert path[-1:] == [node] * (node >= 0)


@given(drafts(), TOKENS)
def test_after_keeps_what_follows_those_tokens_and_nothing_else(draft: Draft, tokens: list[int]) -> None:
    """Of siblings with one token the first is followed, as `match` does."""
    node = draft.find(tokens)
    below = draft.after(tokens)
    if node is None:
        assert below == Draft() and tuple(tokens) not in sequences(draft)
        return
    assert words(draft, node) == tuple(tokens)
    inside = [each for each in range(len(draft)) if node in (-1, *draft.path(each)[:-1])]
    assert sequences(below) == [words(draft, each)[len(tokens) :] for each in inside], "in the same order"


@given(drafts(), TOKENS, TOKENS)
def test_after_two_pieces_is_after_their_sum(draft: Draft, first: list[int], second: list[int]) -> None:
    if draft.find(first) is not None:
        assert draft.after(first).after(second) == draft.after([*first, *second])


@given(drafts())
def test_leaves_end_every_sequence(draft: Draft) -> None:
    ends = [set(draft.path(leaf)) for leaf in draft.leaves()]
    assert set().union(*ends) == set(range(len(draft)))
    assert not any(one < other for one in ends for other in ends)


@given(drafts())
def test_the_tip_ends_the_first_sequence(draft: Draft) -> None:
    path = draft.path(draft.tip())
    assert bool(path) == bool(draft) and all(
        draft.children(parent)[0] == child for parent, child in pairwise([-1, *path])
    )
    assert draft.tip() in (draft.leaves() or [-1])


@given(drafts(), drafts(), st.data())
def test_what_hangs_under_a_node_follows_it_and_changes_no_other(
    draft: Draft, more: Draft, data: st.DataObject
) -> None:
    node = data.draw(st.integers(-1, len(draft) - 1))
    joined = draft.hang(node, more)
    assert sequences(joined) == [*sequences(draft), *(words(draft, node) + each for each in sequences(more))]
    if node == -1 and not draft:
        assert joined == more
    if not draft.children(node):
        assert joined.below(node) == more


@given(drafts(), st.data())
def test_a_draft_in_two_parts_is_the_draft(draft: Draft, data: st.DataObject) -> None:
    """As it travels between processes."""
    cut = data.draw(st.integers(0, len(draft)))
    first = Draft(draft.tokens[:cut], draft.parents[:cut])
    assert first.join(draft.since(cut)) == draft


@given(drafts(most=6), drafts(most=6), st.booleans(), st.booleans(), st.data())
def test_q_stays_with_its_token(one: Draft, other: Draft, first: bool, second: bool, data: st.DataObject) -> None:
    """Through hanging, cutting and following; a point mass where a part had none."""
    joined = drawn(one, first).hang(data.draw(st.integers(-1, len(one) - 1)), drawn(other, second))
    assert same_q(joined, [*[first] * len(one), *[second] * len(other)])
    kept = data.draw(st.integers(-1, len(joined) - 1))
    inside = [each for each in range(len(joined)) if kept in (-1, *joined.path(each)[:-1])]
    marks = [first if node < len(one) else second for node in inside]
    assert same_q(joined.below(kept), marks, whole=(first and bool(one)) or (second and bool(other)))


def drawn(draft: Draft, sampled: bool) -> Draft:
    """With a q for each node that tells its token: half for it, half for the id after it."""
    return Draft(draft.tokens, draft.parents, halves(draft.tokens)) if sampled and draft else draft


def halves(tokens: Sequence[int]) -> torch.Tensor:
    eye = torch.eye(5)
    ids = torch.tensor(tokens, dtype=torch.long)
    return (eye[ids] + eye[ids + 1]) / 2


def same_q(draft: Draft, sampled: Sequence[bool], whole: bool | None = None) -> bool:
    if draft.probs is None:
        return not (any(sampled) if whole is None else whole)
    point = torch.eye(5)[torch.tensor(draft.tokens, dtype=torch.long)]
    chosen = torch.tensor(sampled, dtype=torch.bool)[:, None]
    return torch.equal(draft.probs, torch.where(chosen, halves(draft.tokens), point))
