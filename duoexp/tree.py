"""A draft as a token tree: a chain, several sequences, or anything between."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draft:
    """Drafted tokens as a tree: `parents[i]` is the node that token i follows, -1 the end of the context.

    A node stands behind its parent. `probs` [nodes, vocabulary] is q, the distribution that each token was drawn from;
    None when all were chosen without chance, so that each q is a point mass.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probs: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def grow(self, parent: int, tokens: Iterable[int], probs: Tensor | None = None) -> "Draft":
        """With `tokens` as further children of `parent`, all drawn from `probs` [vocabulary]."""
        new = tuple(tokens)
        rows = None if probs is None else probs.expand(len(new), -1)
        return self.join(Draft(new, (parent,) * len(new), rows))

    def join(self, more: "Draft") -> "Draft":
        """With the nodes of `more` behind this draft's own; its parents already count from this draft's first node."""
        widths = {draft.probs.shape[1] for draft in (self, more) if draft.probs is not None}
        rows = torch.cat([self._rows(max(widths)), more._rows(max(widths))]) if widths else None
        return Draft(self.tokens + more.tokens, self.parents + more.parents, rows)

    def hang(self, node: int, more: "Draft") -> "Draft":
        """With the tree `more` under `node`."""
        parents = tuple(node if parent < 0 else len(self) + parent for parent in more.parents)
        return self.join(Draft(more.tokens, parents, more.probs))

    def since(self, first: int) -> "Draft":
        """The nodes from `first` on, as `join` takes them."""
        return Draft(self.tokens[first:], self.parents[first:], None if self.probs is None else self.probs[first:])

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that holds `token`, if there is one."""
        return next((child for child in self.children(node) if self.tokens[child] == token), None)

    def path(self, node: int) -> list[int]:
        """The nodes from the first one down to `node`."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def leaves(self) -> list[int]:
        inner = set(self.parents)
        return [node for node in range(len(self)) if node not in inner]

    def depths(self) -> list[int]:
        """How far each node is from the end of the context: 1 for the first tokens."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def depth(self, node: int) -> int:
        """How far `node` is from the end of the context, which as node -1 is at 0."""
        return len(self.path(node))

    def tip(self) -> int:
        """The end of the first sequence, which is the likeliest: first children all the way; -1 when there is none."""
        node = -1
        while children := self.children(node):
            node = children[0]
        return node

    def after(self, tokens: Sequence[int]) -> "Draft":
        """What hangs below `tokens`, followed from the root; empty when they leave the tree."""
        node = self.find(tokens)
        return Draft() if node is None else self.below(node)

    def find(self, tokens: Sequence[int]) -> int | None:
        """The node at the end of `tokens`, followed from the root; None when they leave the tree."""
        node: int | None = -1
        for token in tokens:
            node = None if node is None else self.child(node, token)
        return node

    def below(self, node: int) -> "Draft":
        """The subtree under `node`, which becomes the root."""
        renamed = {node: -1}
        for child, parent in enumerate(self.parents):
            if parent in renamed:
                renamed[child] = len(renamed) - 1
        kept = list(renamed)[1:]
        tokens = tuple(self.tokens[child] for child in kept)
        parents = tuple(renamed[self.parents[child]] for child in kept)
        return Draft(tokens, parents, None if self.probs is None else self.probs[kept])

    def __reduce__(self) -> tuple[Any, ...]:
        """Between processes q travels as an array: torch would open a shared file for each tensor."""
        return _restored, (self.tokens, self.parents, None if self.probs is None else self.probs.numpy())

    def _rows(self, width: int) -> Tensor:
        """q of every node; a point mass where nothing was drawn by chance."""
        if self.probs is not None:
            return self.probs
        return torch.nn.functional.one_hot(torch.tensor(self.tokens, dtype=torch.long), width).float()


class Trie:
    """A draft made of sequences, in which equal beginnings share their nodes; of at most `limit` nodes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, tokens: Sequence[int]) -> int | None:
        """The node at the end of `tokens`, followed from the root; None, and nothing added, if there is no room."""
        node, kept = -1, 0
        while kept < len(tokens) and (node, tokens[kept]) in self._nodes:
            node, kept = self._nodes[node, tokens[kept]], kept + 1
        if len(self) + len(tokens) - kept > self._limit:
            return None
        for token in tokens[kept:]:
            node = self._nodes.setdefault((node, token), len(self._nodes))
        return node

    @property
    def draft(self) -> Draft:
        return Draft(tuple(token for _, token in self._nodes), tuple(parent for parent, _ in self._nodes))


def _restored(tokens: tuple[int, ...], parents: tuple[int, ...], probs: Any) -> Draft:
    return Draft(tokens, parents, None if probs is None else torch.from_numpy(probs))
