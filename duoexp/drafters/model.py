"""A small language model as the drafter."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from duoexp.drafters.base import Drafter
from duoexp.lm.causal_lm import CausalLM
from duoexp.policy import FixedK, Policy, Row
from duoexp.sampling import DRAFT, TARGET, Sampler, argmax
from duoexp.tree import Draft
from duoexp.verify import Verdict


class ModelDrafter(Drafter):
    """Drafts with a model, in the shape that the policy gives."""

    needs_model = True

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.observes = policy.observes
        self.shape(None)

    def start(self, load: Callable[[], CausalLM] | None, sampler: Sampler, sampled: bool) -> None:
        assert load is not None, "a drafter with needs_model is given one"
        self.lm, self.sampled = load(), sampled
        self.sampler = sampler.on(DRAFT if sampled else TARGET)

    def propose(self, context: Sequence[int], pending: Draft, budget: int, depth: int | None = None) -> Iterator[Draft]:
        tip = pending.tip()
        ahead = len(context) + pending.depth(tip)
        budget = min(budget, self.lm.context_size - ahead)  # past its context the model stays silent
        if depth is not None:
            budget = min(budget, self._sequences * (depth - pending.depth(tip)))
        if budget > 0 and max(context) < self.lm.vocabulary:  # and before an id that it doesn't know
            for draft in self._shaped.grow(_Continuation(self, context, pending, tip, ahead), budget):
                yield pending.hang(tip, draft)

    def observe(self, draft: Draft, verdict: Verdict, behind: Sequence[int]) -> None:
        self.policy.observe(draft, verdict)

    def shape(self, sequences: int | None) -> None:
        self._sequences = sequences or 1
        self._shaped = self.policy if sequences is None else FixedK(sequences)

    def clear(self) -> None:
        self.lm.clear()
        self.policy.clear()


@dataclass
class _Continuation:
    """The model as a policy sees it: behind the context and the first sequence of `pending`, `ahead` tokens in all."""

    drafter: ModelDrafter
    context: Sequence[int]
    pending: Draft
    tip: int
    ahead: int

    @property
    def text(self) -> list[int]:
        return [*self.context, *(self.pending.tokens[node] for node in self.pending.path(self.tip))]

    def after(self, draft: Draft, nodes: Sequence[int]) -> list[Row]:
        rows = [1 + (self.tip if node < 0 else len(self.pending) + node) for node in nodes]
        logits = self.drafter.lm.logits(self.context, self.pending.hang(self.tip, draft), rows)
        depths = [0, *draft.depths()]
        return [
            _ModelRow(self.drafter, row, self.ahead + depths[node + 1]) for node, row in zip(nodes, logits, strict=True)
        ]


@dataclass
class _ModelRow:
    """The logits [vocabulary] for the token at one position."""

    drafter: ModelDrafter
    logits: Tensor
    position: int

    @cached_property
    def probs(self) -> Tensor:
        sampler = self.drafter.sampler
        return sampler.probs(self.logits) if sampler.temperature else self.logits.float().softmax(-1)

    def best(self, count: int = 1) -> list[int]:
        scores = self.drafter.sampler.scores(self.logits, self.position)
        [first] = argmax(scores[None])  # of equal scores the same as the target's; topk has its own way with them
        if count == 1:
            return [first]
        values, tokens = scores.topk(min(count, len(scores)))
        allowed = tokens[values > -torch.inf].tolist()  # by top-k and top-p
        return [first, *(token for token in allowed if token != first)][:count]

    def grow(self, draft: Draft, node: int, count: int = 1) -> Draft:
        q = self.drafter.sampler.probs(self.logits).cpu() if self.drafter.sampled else None
        return draft.grow(node, self.best(count), q)
