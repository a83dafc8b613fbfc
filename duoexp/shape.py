"""The shape of a policy's drafts, without a model: a policy grows one as well over a model that only counts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duoexp.policy import Policy, Row
from duoexp.tree import Draft

TOKENS = 512  # the vocabulary of that model: more than any policy has sequences


@dataclass(frozen=True)
class Shape:
    passes: tuple[int, ...]  # the rows of each forward pass of the draft model
    depth: int  # tokens of the longest sequence
    sequences: int


def shape(policy: Policy, budget: int, doubt: bool = False) -> Shape:
    """Of a draft of `budget` >= 1 tokens. doubt: the model holds all tokens equally likely, rather than one certain."""
    model = _Counting(torch.full((TOKENS,), 1 / TOKENS) if doubt else torch.eye(TOKENS)[0])
    *_, draft = policy.grow(model, budget)
    return Shape(tuple(model.passes), max(draft.depths()), len(draft.leaves()))


def most_sequences(policy: Policy, budget: int) -> int:
    """How many sequences a draft of this budget can have."""
    return max(shape(policy, budget, doubt).sequences for doubt in (False, True))


class _Counting:
    """A draft model that says the same everywhere, and remembers how many rows each pass had."""

    def __init__(self, probs: Tensor) -> None:
        self.row, self.passes = _ConstantRow(probs), list[int]()

    @property
    def text(self) -> list[int]:
        return []

    def after(self, draft: Draft, nodes: Sequence[int]) -> list[Row]:
        self.passes.append(len(nodes))
        return [self.row for _ in nodes]


@dataclass(frozen=True)
class _ConstantRow:
    probs: Tensor

    def best(self, count: int = 1) -> list[int]:
        return list(range(count))

    def grow(self, draft: Draft, node: int, count: int = 1) -> Draft:
        return draft.grow(node, self.best(count))
