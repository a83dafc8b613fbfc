"""Policies: what shape a draft takes. Each grows a tree one forward pass at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from duoexp.config import InputError
from duoexp.tree import Draft
from duoexp.verify import Verdict


class Row(Protocol):
    """What the draft model says about one next token."""

    @property
    def probs(self) -> Tensor:
        """[vocabulary]: how likely the model holds each token."""
        ...

    def best(self, count: int = 1) -> list[int]:
        """The tokens to draft, in the order of drafting."""
        ...

    def grow(self, draft: Draft, node: int, count: int = 1) -> Draft:
        """`draft` with the `count` best tokens as children of `node`."""
        ...


class DraftModel(Protocol):
    @property
    def text(self) -> list[int]:
        """The tokens that the draft goes on from."""
        ...

    def after(self, draft: Draft, nodes: Sequence[int]) -> list[Row]:
        """One forward pass: the rows behind these nodes of the draft, -1 being the place where it begins."""
        ...


class Policy(Protocol):
    observes: bool = False  # whether `observe` is to be called

    def grow(self, model: DraftModel, budget: int) -> Iterator[Draft]:
        """The draft so far, after each forward pass; at most `budget` >= 1 nodes."""
        ...

    def observe(self, draft: Draft, verdict: Verdict) -> None:
        """What the target made of the last draft."""
        return None

    def clear(self) -> None:
        """Forgets the prompt."""
        return None


@dataclass(frozen=True)
class Chain(Policy):
    """One sequence: vanilla speculative decoding, PEARL, and DuoDecoding with k = 1."""

    def grow(self, model: DraftModel, budget: int) -> Iterator[Draft]:
        draft = Draft()
        while len(draft) < budget:
            [row] = model.after(draft, [len(draft) - 1])
            draft = row.grow(draft, len(draft) - 1)
            yield draft


class Adaptive(Policy):
    """One sequence whose length follows its success: 2 tokens more after a draft that was accepted whole, one less
    after any other; and it ends behind a token that the draft model holds for less likely than `confidence`.

    The schedule of transformers' assisted generation (`heuristic_transient`, `assistant_confidence_threshold`), which
    Spec-Bench (2401.07851) measures as SpS. `start`: the length for a new prompt. The budget is the longest.
    """

    observes = True

    def __init__(self, start: int = 5, confidence: float = 0.4) -> None:
        if not isinstance(start, int) or start < 1:
            raise InputError(f"draft.policy.start={start!r} is no length; give 1 or more")
        if not 0 <= confidence <= 1:
            raise InputError(f"draft.policy.confidence={confidence!r} is no probability; give 0 (never stop) to 1")
        self.start, self.confidence = start, confidence
        self.length = start

    def grow(self, model: DraftModel, budget: int) -> Iterator[Draft]:
        draft, sure = Draft(), True
        while sure and len(draft) < min(self.length, budget):
            [row] = model.after(draft, [len(draft) - 1])
            draft = row.grow(draft, len(draft) - 1)
            # The unlikely token stays: under `rejection`, to drop what was drawn would change the distribution.
            sure = float(row.probs[draft.tokens[-1]]) >= self.confidence
            yield draft

    def observe(self, draft: Draft, verdict: Verdict) -> None:
        if draft:
            self.length = max(1, self.length - 1 if verdict.rejected else self.length + 2)

    def clear(self) -> None:
        self.length = self.start


@dataclass(frozen=True)
class FixedK(Policy):
    """k sequences from the k best first tokens, which share the budget (DuoDecoding with a fixed k)."""

    k: int = 4
    growth: str = "batched"

    def __post_init__(self) -> None:
        _check("draft.policy.k", self.k, self.growth)

    def grow(self, model: DraftModel, budget: int) -> Iterator[Draft]:
        [first] = model.after(Draft(), [-1])
        draft = first.grow(Draft(), -1, min(self.k, budget))
        k = len(draft)  # fewer than asked where the vocabulary, or what top-k and top-p left of it, is smaller
        yield draft
        yield from lengthen(model, draft, range(k), share(budget, k), self.growth)


@dataclass(frozen=True)
class Dynamic(Policy):
    """DuoDecoding's dynamic multi-sequence drafting (2503.00784, figure 2).

    p(i, j) is the probability of the j-th ranked token at draft position i, and theta = p(1, 1) p(2, 1): the chance
    that the best sequence survives two positions. A first token likelier than that is worth more than depth, so each
    such token heads a sequence of its own.
    """

    max_sequences: int = 8
    growth: str = "batched"

    def __post_init__(self) -> None:
        _check("draft.policy.max_sequences", self.max_sequences, self.growth)

    def grow(self, model: DraftModel, budget: int) -> Iterator[Draft]:
        [first] = model.after(Draft(), [-1])
        draft = first.grow(Draft(), -1)
        yield draft
        if budget == 1:
            return
        [second] = model.after(draft, [0])
        k = self.sequences(first.probs, draft.tokens[0], second.probs, budget)
        lengths = share(budget, k)
        draft = first.grow(Draft(), -1, k)
        tips = list(range(k))
        if lengths[0] > 1:  # the second pass has drafted the first sequence's next token already
            draft, tips[0] = second.grow(draft, 0), k
        yield draft
        lengths[0] -= len(draft) - k
        yield from lengthen(model, draft, tips, lengths, self.growth)

    def sequences(self, first: Tensor, token: int, second: Tensor, budget: int) -> int:
        """k. It depends on ranks, never on which rival is drawn: so recursive rejection sampling stays exact."""
        theta = first[token] * second.max()
        above = int((first > theta).sum())
        return max(1, min(above, self.max_sequences, budget))


def share(budget: int, k: int) -> list[int]:
    """The tokens of each of k sequences; the first ones take what does not divide."""
    return [budget // k + (i < budget % k) for i in range(k)]


def lengthen(
    model: DraftModel, draft: Draft, tips: Sequence[int], lengths: Sequence[int], growth: str
) -> Iterator[Draft]:
    """Grows each sequence from its tip until it has its length, of which the tip is the first token.

    batched: all sequences one token a pass. serial: one sequence after the other, as the paper drafts them.
    """
    tips, missing = list(tips), [length - 1 for length in lengths]
    every = range(len(tips))
    for turn in [every] if growth == "batched" else [[i] for i in every]:
        while grown := [i for i in turn if missing[i] > 0]:
            for i, row in zip(grown, model.after(draft, [tips[i] for i in grown]), strict=True):
                draft = row.grow(draft, tips[i])
                tips[i], missing[i] = len(draft) - 1, missing[i] - 1
            yield draft


def _check(key: str, sequences: int, growth: str) -> None:
    if not isinstance(sequences, int) or sequences < 1:
        raise InputError(f"{key}={sequences!r} is no number of sequences; give 1 or more")
    if growth not in ("batched", "serial"):
        raise InputError(f"draft.policy.growth={growth!r} is unknown; choose batched or serial")
