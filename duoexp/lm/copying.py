"""Copying: what stood behind the same words before, in the context or in the text that a draft learnt from.

A few layers are too few to look back for a repetition, or to hold the phrases of a language, and both are cheap to look
up. So a draft mixes what its layers say with the tokens found, each with a weight that its last hidden state gives
(pointer networks, 1506.03134; pointer-generator, 1704.04368).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duoexp.lm.causal_lm import CausalLM
from duoexp.tree import Draft

SIZES = (4, 3, 2)  # of a phrase's beginning, the longest first
SHARES = (0.5, 0.9)  # of the occurrences of a beginning that its commonest end has: below, between, above
NONE = -1
PRIME, MASK = 0x100000001B3, 2**64 - 1  # FNV-1a, a token at a time


class Seen:
    """What last stood behind each n-gram of a growing context, for n up to `longest`."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.clear()

    def clear(self) -> None:
        self._tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}

    def append(self, token: int) -> None:
        for n in range(1, min(self.longest, len(self._tokens)) + 1):
            self._behind[tuple(self._tokens[-n:])] = token
        self._tokens.append(token)

    def follow(self, context: Sequence[int]) -> None:
        """Reads what is new; begins anew where it is another context."""
        if self._tokens != context[: len(self._tokens)]:
            self.clear()
        for token in context[len(self._tokens) :]:
            self.append(token)

    def find(self, tail: Sequence[int]) -> tuple[int, int]:
        """The token behind the longest n-gram that `tail` ends with, and n - 1; NONE twice where there is none."""
        for n in range(min(self.longest, len(tail)), 0, -1):
            if (token := self._behind.get(tuple(tail[-n:]))) is not None:
                return token, n - 1
        return NONE, NONE


@dataclass(frozen=True)
class Phrases:
    """The commonest end of each frequent beginning: keys [n] int64, tokens [n] int32, kinds [n] uint8."""

    keys: Tensor
    tokens: Tensor
    kinds: Tensor

    def __post_init__(self) -> None:
        ends = zip(self.tokens.tolist(), self.kinds.tolist(), strict=True)
        object.__setattr__(self, "_ends", dict(zip(self.keys.tolist(), ends, strict=True)))

    def find(self, tail: Sequence[int]) -> tuple[int, int]:
        """The end of the longest beginning that `tail` ends with, and its kind; NONE twice where none is known."""
        ends: dict[int, tuple[int, int]] = self._ends  # type: ignore[attr-defined]
        for n in SIZES:
            if n <= len(tail) and (end := ends.get(key(tail[-n:]))):
                return end
        return NONE, NONE


def key(tokens: Sequence[int]) -> int:
    """Of a beginning: a signed 64-bit hash."""
    value = len(tokens)
    for token in tokens:
        value = ((value ^ token) * PRIME) & MASK
    return value - 2**64 if value >= 2**63 else value


def keys(columns: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """`key` of many beginnings of one size, given by the column."""
    value = np.full(len(columns[0]), len(columns), np.uint64)
    for column in columns:
        value = (value ^ column.astype(np.uint64)) * np.uint64(PRIME)
    return value.view(np.int64)


class Copier:
    """Both sources. A found token has a kind, from 0 up to `kinds`: where it was found, and behind how long a match."""

    def __init__(self, longest: int, phrases: Phrases | None) -> None:
        self.seen, self.phrases = Seen(longest), phrases
        self.reach = max(longest, *SIZES)
        self.kinds = longest + (0 if phrases is None else len(SIZES) * (len(SHARES) + 1))

    def behind(self, tail: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """(token, kind) of both sources behind `tail`, the last `reach` tokens of what `seen` read or of a draft."""
        end, kind = (NONE, NONE) if self.phrases is None else self.phrases.find(tail)
        return self.seen.find(tail), (end, kind if kind == NONE else kind + self.seen.longest)

    def along(self, text: Sequence[int]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """`behind` each token of a text."""
        self.seen.clear()
        for i, token in enumerate(text, start=1):
            self.seen.append(token)
            yield self.behind(text[max(0, i - self.reach) : i])


def raised(logits: Tensor, total: Tensor, tokens: Tensor, gates: Tensor) -> Tensor:
    """`logits` [rows, vocabulary] with each found token, [rows, sources], at log(exp(logit) + exp(total + gate)).

    total [rows]: log of the sum of exp(logits). gates [rows, sources]: log of a source's weight over that of the
    layers; -inf where it found none. In place where nothing is learnt.
    """
    for source in range(tokens.shape[1]):
        place = tokens[:, source, None]
        found = torch.logaddexp(logits.gather(1, place), (total + gates[:, source])[:, None])
        logits = logits.scatter(1, place, found) if found.requires_grad else logits.scatter_(1, place, found)
    return logits


class CopyingLM:
    """A draft that says what its layers say, mixed with what it copies.

    lm: its layers, whose rows are those of `ids`, the tokens that they can say, and the gates, with their bias [kinds].
    """

    def __init__(self, lm: CausalLM, copier: Copier, vocabulary: int, ids: Tensor, bias: Tensor) -> None:
        self.lm, self.copier, self.vocabulary, self.context_size = lm, copier, vocabulary, lm.context_size
        self.kernel = lm.kernel
        self._ids, self._bias = ids, bias.float()

    def logits(self, context: Sequence[int], draft: Draft = Draft(), rows: Sequence[int] | None = None) -> Tensor:
        rows = range(len(draft) + 1) if rows is None else rows
        said, gates = self.lm.logits(context, draft, rows).float().split([len(self._ids), self.copier.kinds], -1)
        logits = said.new_full((len(said), self.vocabulary), -torch.inf).index_copy_(1, self._ids, said)
        if not self.copier.kinds:
            return logits
        self.copier.seen.follow(list(context))
        found = [self.copier.behind(self._tail(context, draft, row - 1)) for row in rows]
        tokens, kinds = torch.tensor(found, device=said.device).unbind(-1)
        none = (tokens < 0) | (tokens >= self.vocabulary)
        gates = (gates + self._bias).gather(1, kinds.clamp(min=0)).masked_fill(none, -torch.inf)
        return raised(logits, said.logsumexp(-1), tokens.masked_fill(none, 0), gates)

    def clear(self) -> None:
        self.lm.clear()
        self.copier.seen.clear()

    def _tail(self, context: Sequence[int], draft: Draft, node: int) -> list[int]:
        drafted = [draft.tokens[each] for each in draft.path(node)]
        return [*context[-self.copier.reach :], *drafted][-self.copier.reach :]
