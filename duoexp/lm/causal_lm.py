"""A model and its cache behind one verb: the logits after a context and after every node of a draft."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from duoexp.config import InputError
from duoexp.lm.cache import buffer_cache, keep
from duoexp.tree import Draft


class CausalLM(Protocol):
    """What drafting and verifying need of a model."""

    vocabulary: int  # ids below it are tokens; further rows of the weights are padding
    context_size: int  # tokens

    def logits(self, context: Sequence[int], draft: Draft = Draft(), rows: Sequence[int] | None = None) -> Tensor:
        """[rows, vocabulary]. Row 0 follows the context, row i + 1 follows node i; `rows` picks some, None takes all.

        Aligns the cache to what it is given and runs only what is new and needed for the rows.
        """
        ...

    def clear(self) -> None:
        """Forgets what it has read, so that the next prompt is read from its start."""
        ...


class TransformersLM:
    """A causal model of transformers, batch 1."""

    def __init__(self, model: PreTrainedModel, vocabulary: int) -> None:
        config = model.config.get_text_config(decoder=True)
        self.model = model.eval()
        self.vocabulary = vocabulary
        self.context_size: int = config.max_position_embeddings
        self._cache = buffer_cache(config)
        self.clear()

    def clear(self) -> None:
        self._context: list[int] = []  # lies in the first slots of the cache
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
        tokens = [*context[read:], *(draft.tokens[node] for node in nodes)]
        positions = [*range(read, len(context)), *(len(context) - 1 + depths[node] for node in nodes)]
        places = {0: new - 1} | {node + 1: new + i for i, node in enumerate(nodes)}
        device = self.model.device
        output = self.model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.tensor([positions], device=device),
            attention_mask=self._mask(read, len(context), slots, nodes),
            cache=self._cache,
            use_cache=True,
            logits_to_keep=torch.tensor([places[row] for row in rows], device=device),
        )
        self._context, self._slots = list(context), slots
        return output.logits[0, :, : self.vocabulary]

    def _align(self, context: list[int], draft: Draft, rows: Sequence[int]) -> int:
        """Keeps in the cache what `context` and `draft` share with it; returns how many context tokens it then holds."""
        read = _shared(context, self._context)
        slots, node = list(range(read)), -1
        while read == len(slots) and len(self._context) <= read < len(context):  # the context went on along the draft
            child = self._draft.child(node, context[read])
            if child is None or child not in self._slots:
                break
            slots.append(self._slots[child])
            read, node = read + 1, child
        if 0 in rows and read == len(context):  # the row behind the last token must be computed
            read -= 1
            slots.pop()
        kept: dict[int, int] = {}
        if read == len(context):
            was = {-1: node}
            for new, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
                old = self._draft.child(was[parent], token) if parent in was else None
                if old is not None and old in self._slots and new + 1 not in rows:
                    was[new], kept[new] = old, len(slots)
                    slots.append(self._slots[old])
        keep(self._cache, slots)
        self._context, self._draft, self._slots = context[:read], draft, kept
        return read

    def _mask(self, read: int, length: int, slots: dict[int, int], nodes: list[int]) -> Tensor | None:
        """[1, 1, new tokens, slots], 0 where a token looks, the lowest number where not; None where all is one chain."""
        parents = self._draft.parents
        if all(parents[node] == before for node, before in zip(slots, [-1, *slots], strict=False)):
            return None
        new = length - read + len(nodes)
        mask = torch.full((new, length + len(slots)), torch.finfo(self.model.dtype).min, dtype=self.model.dtype)
        mask[:, :length] = mask[:, :length].triu(read + 1)  # context tokens look back, nodes at all of the context
        for row, node in enumerate(nodes, start=length - read):
            while node >= 0:
                mask[row, slots[node]] = 0
                node = parents[node]
        return mask.to(self.model.device)[None, None]

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


def _shared(left: list[int], right: list[int]) -> int:
    """How many tokens the two begin with in common."""
    shortest = min(len(left), len(right))
    if left[:shortest] == right[:shortest]:
        return shortest
    return next(i for i in range(shortest) if left[i] != right[i])
