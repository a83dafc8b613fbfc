"""How far the student is from the target, and the gradient of it, without holding a logit longer than needed."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from duoexp.lm.copying import raised

ROWS = 1024  # positions at a time
Divergence = Callable[[Tensor, Tensor], Tensor]


def forward_kl(p: Tensor, log_q: Tensor) -> Tensor:
    """[positions]: KL(p || q) up to the entropy of p, which no weight changes."""
    return -(p * log_q).sum(-1)


def reverse_kl(p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q || p)."""
    return (log_q.exp() * (log_q - p.clamp(min=1e-8).log())).sum(-1)


def jsd(p: Tensor, log_q: Tensor) -> Tensor:
    """The mean of both KL to (p + q) / 2."""
    q = log_q.exp()
    log_m = (0.5 * (p + q)).clamp(min=1e-12).log()
    return 0.5 * (p * (p.clamp(min=1e-12).log() - log_m) + q * (log_q - log_m)).sum(-1)


def tvd(p: Tensor, log_q: Tensor) -> Tensor:
    """1 - the acceptance rate of the ratio test (DistillSpec, section 3)."""
    return 0.5 * (p - log_q.exp()).abs().sum(-1)


NAMED: dict[str, Divergence] = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jsd, "tvd": tvd}


@dataclass(frozen=True)
class Goal:
    """What the student should say: places in the head and their probabilities, [positions, top]."""

    places: Tensor
    probs: Tensor


@dataclass(frozen=True)
class Candidates:
    """The places of the head that a step weighs against each other, and the log of how many each stands for.

    All targets, what may be copied and the most frequent tokens stand for themselves, and some of the others for all of
    those (sampled softmax, Jean et al., 1412.2007).
    """

    places: Tensor
    log_weights: Tensor

    @classmethod
    def drawn(
        cls, frequent: Tensor, goal: Goal, copied: Tensor, size: int, count: int, generator: torch.Generator
    ) -> "Candidates":
        """copied: places that may be -1."""
        fixed = torch.zeros(size, dtype=torch.bool)
        fixed[frequent] = True
        fixed[goal.places.flatten()] = True
        fixed[copied[copied >= 0]] = True
        rest = (~fixed).nonzero()[:, 0]
        drawn = rest[torch.randperm(len(rest), generator=generator)[:count]]
        weight = math.log(len(rest) / len(drawn)) if len(drawn) else 0.0
        log_weights = torch.cat([torch.zeros(int(fixed.sum())), torch.full((len(drawn),), weight)])
        return cls(torch.cat([fixed.nonzero()[:, 0], drawn]), log_weights)

    def among(self, places: Tensor, size: int) -> Tensor:
        """These places of the head among the candidates; -1 stays."""
        place = torch.full((size + 1,), -1, dtype=torch.long)  # the last one is that of -1
        place[self.places] = torch.arange(len(self.places))
        return place[places]


@dataclass(frozen=True)
class Copies:
    """What a source found at a position, [positions, sources]: its place in the head, -1 outside of it, and its gate.

    A gate is the log of the source's weight over that of the layers; -inf where it found nothing.
    """

    places: Tensor
    gates: Tensor

    def log_probs(self, logits: Tensor) -> Tensor:
        """[positions, places]: the layers' softmax mixed with the copies. One from outside takes its share, too."""
        total = logits.logsumexp(-1)
        whole = torch.logaddexp(total, total + self.gates.logsumexp(-1))
        outside = self.places < 0
        gates = self.gates.masked_fill(outside, -torch.inf)
        return raised(logits, total, self.places.masked_fill(outside, 0), gates) - whole[:, None]


def step(
    hidden: Tensor, rows: Tensor, log_weights: Tensor | None, goal: Goal, copies: Copies, divergence: Divergence
) -> tuple[float, int]:
    """Sends the gradient of the mean divergence back through `hidden`, [positions, hidden size], rows and gates.

    log_weights: see `Candidates`. Returns the mean and how often the student's first token is the goal's. Probability
    that the goal's places leave over is spread over none: what it is of is not known.
    """
    total, hits = 0.0, 0
    inputs = hidden, copies.gates, rows
    leaves = [each.detach().requires_grad_(each.requires_grad) for each in inputs]
    for first in range(0, len(hidden), ROWS):
        part = slice(first, first + ROWS)
        with torch.enable_grad():
            logits = (leaves[0][part] @ leaves[2].T).float()
            mixed = Copies(copies.places[part], leaves[1][part])
            log_q = mixed.log_probs(logits if log_weights is None else logits + log_weights)
            p = torch.zeros_like(log_q).scatter_add_(1, goal.places[part], goal.probs[part])
            loss = divergence(p, log_q).sum() / len(hidden)
        loss.backward()
        total += float(loss.detach())
        hits += int((log_q.argmax(-1) == goal.places[part, 0]).sum())
    trained = [(each, leaf.grad) for each, leaf in zip(inputs, leaves, strict=True) if each.requires_grad]
    torch.autograd.backward([each for each, _ in trained], [grad for _, grad in trained])
    return total, hits
