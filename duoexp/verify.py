"""Rules: a draft and the target's logits -> the tokens that the target stands for."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from duoexp.sampling import DRAFT, Sampler
from duoexp.tree import Draft


@dataclass(frozen=True)
class Verdict:
    """`tokens`: accepted draft tokens, then one of the target's own. `node`: the last accepted node, -1 if none."""

    tokens: tuple[int, ...]
    node: int
    rejected: bool  # there were draft tokens behind `node`, and none was accepted

    @property
    def accepted(self) -> int:
        return len(self.tokens) - 1


Rule = Callable[[Draft, Tensor, Sampler, int], Verdict]


def match(draft: Draft, logits: Tensor, sampler: Sampler, position: int) -> Verdict:
    """A draft token is accepted when it is the token that the target itself has at that position.

    logits [nodes + 1, vocabulary]: row 0 follows the context, row i + 1 node i. position: of the first token to decide.
    The output is the autoregressive output of the same seed, whatever was drafted.
    """
    own, node, tokens = _own(draft, logits, sampler, position), -1, list[int]()
    while True:
        tokens.append(own(node))
        child = draft.child(node, tokens[-1])
        if child is None:
            return Verdict(tuple(tokens), node, rejected=bool(draft.children(node)))
        node = child


def _own(draft: Draft, logits: Tensor, sampler: Sampler, position: int) -> Callable[[int], int]:
    """The target's token behind a node. A processor works out those that are asked for; on a GPU, a copy to the host
    costs more than all of them."""
    places = [position, *(position + depth for depth in draft.depths())]
    if logits.device.type == "cpu":
        return lambda node: sampler.token(logits[node + 1], places[node + 1])
    tokens = sampler.tokens(logits, places)
    return lambda node: tokens[node + 1]


def rejection(draft: Draft, logits: Tensor, sampler: Sampler, position: int) -> Verdict:
    """The ratio test (Leviathan et al. 2211.17192, Algorithm 1); over several siblings, recursive rejection sampling
    (2402.14160, section 3). The output is a sample of the target's distribution, though not the autoregressive one.

    Siblings are tested in the order in which they were drawn, without replacement, from one q.
    """
    node, tokens = -1, list[int]()
    while True:
        place = position + len(tokens)
        child, left = _first_accepted(draft, node, sampler.probs(logits[node + 1]), sampler, place)
        if child is None:
            rejected = bool(draft.children(node))
            # Behind a leaf nothing was tested against the draft's noise for this place. With it the target's own token
            # is as exact a sample, and meets the first tokens that are being drafted for the same place more often.
            tokens.append((sampler if rejected else sampler.on(DRAFT)).draw(left, place))
            return Verdict(tuple(tokens), node, rejected)
        tokens.append(draft.tokens[child])
        node = child


def _first_accepted(draft: Draft, node: int, p: Tensor, sampler: Sampler, position: int) -> tuple[int | None, Tensor]:
    """The first child of `node` that passes its test, and what is left of p when none does."""
    tried: list[int] = []
    for trial, child in enumerate(draft.children(node)):
        token = draft.tokens[child]
        q = torch.zeros_like(p).index_fill(0, torch.tensor([token], device=p.device), 1.0)
        if draft.probs is not None:
            q = F.pad(draft.probs[child].to(p), (0, len(p) - draft.probs.shape[1]))  # a draft may know fewer ids
        q = _normalised(q.index_fill(0, torch.tensor(tried, dtype=torch.long, device=p.device), 0.0), q)
        if sampler.uniform(position, trial) * float(q[token]) < float(p[token]):  # u < p / q
            return child, p
        p = _normalised((p - q).clamp(min=0), p)  # norm(max(p - q, 0))
        tried.append(token)
    return None, p


def _normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Nothing is left only where rounding ate a difference; then the two distributions were equal all along."""
    total = weights.sum()
    return weights / total if total > 0 else otherwise


RULES: dict[str, Rule] = {"match": match, "rejection": rejection}
