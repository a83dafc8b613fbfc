"""A model and its cache behind one verb: the logits after a context and after every node of a draft."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from duoexp.config import InputError
from duoexp.tree import Draft


class CausalLM(Protocol):
    """What drafting and verifying need of a model."""

    vocabulary: int  # ids below it are tokens; further rows of the weights are padding
    context_size: int  # tokens
    kernel: str  # whose pass it is, and with which attention

    def logits(self, context: Sequence[int], draft: Draft = Draft(), rows: Sequence[int] | None = None) -> Tensor:
        """[rows, vocabulary]. Row 0 follows the context, row i + 1 follows node i; `rows` picks some, None takes all.

        Aligns the cache to what it is given and runs only what is new and needed for the rows.
        """
        ...

    def clear(self) -> None:
        """Forgets what it has read, so that the next prompt is read from its start."""
        ...


class CachedLM(ABC):
    """The bookkeeping of a cache: which slot holds which token of the context and which node of the draft.

    A model adds `run`, `keep` and its `kernel`. The context always lies in the first slots, in order; nodes lie behind
    it in any.
    """

    kernel = ""

    def __init__(self, vocabulary: int, context_size: int) -> None:
        self.vocabulary, self.context_size = vocabulary, context_size
        self.clear()

    @abstractmethod
    def run(self, tokens: list[int], positions: list[int], hidden: Tensor | None, places: list[int]) -> Tensor:
        """Runs `tokens` in the next free slots; returns [places, vocabulary], the logits behind tokens[place].

        hidden [tokens, slots]: True where a token must not look; None where each looks at all slots up to its own.
        """

    @abstractmethod
    def keep(self, start: int, slots: list[int]) -> None:
        """Keeps the first `start` slots, and behind them `slots`, in this order; the others are free again."""

    def clear(self) -> None:
        self._context: list[int] = []
        self._draft, self._slots = Draft(), dict[int, int]()  # the nodes that the cache holds, and in which slot

    @torch.inference_mode()
    def logits(self, context: Sequence[int], draft: Draft = Draft(), rows: Sequence[int] | None = None) -> Tensor:
        rows = range(len(draft) + 1) if rows is None else rows
        depths = draft.depths()
        self._check(context, depths)
        read = self._align(list(context), draft, rows)
        nodes = [node for node in _needed(draft, rows) if node not in self._slots]
        new = len(context) - read
        slots = self._slots | {node: read + len(self._slots) + new + i for i, node in enumerate(nodes)}
        places = {0: new - 1} | {node + 1: new + i for i, node in enumerate(nodes)}
        logits = self.run(
            tokens=[*context[read:], *(draft.tokens[node] for node in nodes)],
            positions=[*range(read, len(context)), *(len(context) - 1 + depths[node] for node in nodes)],
            hidden=self._hidden(read, len(context), slots, nodes),
            places=[places[row] for row in rows],
        )
        self._context, self._slots = list(context), slots
        return logits

    def _align(self, context: list[int], draft: Draft, rows: Sequence[int]) -> int:
        """Keeps in the cache what it shares with `context` and `draft`; returns how much of the context that is."""
        read = shared(context, self._context)
        start, slots, node = read, list[int](), -1
        while len(self._context) <= read < len(context):  # the context went on along the draft
            child = self._draft.child(node, context[read])
            if child is None or child not in self._slots:
                break
            slots.append(self._slots[child])
            read, node = read + 1, child
        if 0 in rows and read == len(context):  # the row behind the last token must be computed
            read -= 1
            start = min(start, read)
            slots = slots[: read - start]
        kept: dict[int, int] = {}
        if read == len(context) >= len(self._context):  # else the old tree hangs from a place further on
            was = {-1: node}
            for new, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
                old = self._draft.child(was[parent], token) if parent in was else None
                if old is not None and old in self._slots and new + 1 not in rows:
                    was[new], kept[new] = old, start + len(slots)
                    slots.append(self._slots[old])
        while slots and slots[0] == start:  # these lie where they belong
            start, slots = start + 1, slots[1:]
        self.keep(start, slots)
        self._context, self._draft, self._slots = context[:read], draft, kept
        return read

    def _hidden(self, read: int, length: int, slots: dict[int, int], nodes: list[int]) -> Tensor | None:
        parents = self._draft.parents
        if all(parents[node] == before for node, before in zip(slots, [-1, *slots], strict=False)):
            return None
        new = length - read + len(nodes)
        hidden = torch.ones(new, length + len(slots), dtype=torch.bool)
        hidden[:, :length].triu_(read + 1)  # context tokens look back, nodes at all of the context
        for row, node in enumerate(nodes, start=length - read):
            while node >= 0:
                hidden[row, slots[node]] = False
                node = parents[node]
        return hidden

    def _check(self, context: Sequence[int], depths: list[int]) -> None:
        if not context:
            raise InputError("an empty context has no next token; give at least one token")
        if len(context) + max(depths, default=0) > self.context_size:
            raise InputError(
                f"{len(context)} tokens and a draft {max(depths, default=0)} deep exceed the model's context of "
                f"{self.context_size} tokens; shorten the prompt"
            )


def _needed(draft: Draft, rows: Sequence[int]) -> list[int]:
    """The nodes of these rows and those above them, in the tree's order."""
    nodes: set[int] = set()
    for row in rows:
        node = row - 1
        while node >= 0 and node not in nodes:
            nodes.add(node)
            node = draft.parents[node]
    return sorted(nodes)


def shared(left: list[int], right: list[int]) -> int:
    """How many tokens the two begin with in common."""
    shortest = min(len(left), len(right))
    if left[:shortest] == right[:shortest]:
        return shortest
    return next(i for i in range(shortest) if left[i] != right[i])
