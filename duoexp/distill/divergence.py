"""How far the student is from the target, and the gradient of it, without holding a logit longer than needed."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """The places of the head that a step weighs against each other, and what each logit is raised by.

    All targets and the most frequent tokens stand for themselves, and some of the others for all of those: added in the
    softmax's sum with the weight of how many each stands for (sampled softmax, Jean et al., 1412.2007).
    """

    places: Tensor
    raised: Tensor

    @classmethod
    def drawn(cls, frequent: Tensor, goal: Goal, size: int, count: int, generator: torch.Generator) -> "Candidates":
        fixed = torch.zeros(size, dtype=torch.bool)
        fixed[frequent] = True
        fixed[goal.places.flatten()] = True
        rest = (~fixed).nonzero()[:, 0]
        drawn = rest[torch.randperm(len(rest), generator=generator)[:count]]
        weight = math.log(len(rest) / len(drawn)) if len(drawn) else 0.0
        raised = torch.cat([torch.zeros(int(fixed.sum())), torch.full((len(drawn),), weight)])
        return cls(torch.cat([fixed.nonzero()[:, 0], drawn]), raised)

    def among(self, goal: Goal, size: int) -> Goal:
        place = torch.zeros(size, dtype=torch.long)
        place[self.places] = torch.arange(len(self.places))
        return Goal(place[goal.places], goal.probs)


def step(hidden: Tensor, rows: Tensor, raised: Tensor | None, goal: Goal, divergence: Divergence) -> tuple[float, int]:
    """Sends the gradient of the mean divergence back through `hidden`, [positions, hidden size].

    Returns the mean and how often the student's first token is the goal's. Probability that the goal's places leave
    over is spread over none: what it is of is not known.
    """
    total, hits, gradient = 0.0, 0, torch.empty_like(hidden)
    for first in range(0, len(hidden), ROWS):
        part = slice(first, first + ROWS)
        leaf = hidden[part].detach().requires_grad_()
        with torch.enable_grad():
            logits = (leaf @ rows.T).float()
            log_q = (logits if raised is None else logits + raised).log_softmax(-1)
            p = torch.zeros_like(log_q).scatter_add_(1, goal.places[part], goal.probs[part])
            loss = divergence(p, log_q).sum() / len(hidden)
        (gradient[part],) = torch.autograd.grad(loss, leaf)
        total += float(loss.detach())
        hits += int((log_q.argmax(-1) == goal.places[part, 0]).sum())
    hidden.backward(gradient)
    return total, hits
