"""Ratios between two measurements over the same prompts, with paired bootstrap intervals."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from duoexp import metrics
from duoexp.metrics import Pair

Facts = np.ndarray  # [prompts, 4]: tokens and seconds of the method, tokens and seconds of its baseline


@dataclass(frozen=True)
class Ratio:
    """A ratio and its 95% interval, which needs `metrics.FEW` prompts. `prompts`: how many both sides have."""

    value: float
    interval: tuple[float, float] | None
    prompts: int

    @property
    def same(self) -> bool:
        """Whether the interval includes 1: there is no difference to speak of."""
        return self.interval is not None and self.interval[0] <= 1 <= self.interval[1]


def speedups(ours: Sequence[Pair], theirs: Sequence[Pair]) -> Ratio | None:
    """Ours over theirs, each over its own baseline, so that a machine that was slower for a while cancels out."""
    return _ratio(ours, theirs, lambda facts: _rate(facts, 0) / _rate(facts, 2))


def rates(ours: Sequence[Pair], theirs: Sequence[Pair]) -> Ratio | None:
    """Tokens per second, ours over theirs."""
    return _ratio(ours, theirs, lambda facts: _rate(facts, 0))


def baselines(ours: Sequence[Pair], theirs: Sequence[Pair]) -> Ratio | None:
    """Tokens per second of autoregressive decoding, ours over theirs."""
    return _ratio(ours, theirs, lambda facts: _rate(facts, 2))


def _rate(facts: Facts, at: int) -> np.ndarray:
    rate: np.ndarray = facts[..., at] / facts[..., at + 1]
    return rate


def _ratio(ours: Sequence[Pair], theirs: Sequence[Pair], figure: Callable[[Facts], np.ndarray]) -> Ratio | None:
    """None where no prompt was given to both."""
    both = [metrics.facts_by_prompt(ours), metrics.facts_by_prompt(theirs)]
    common = [prompt for prompt in both[0] if prompt in both[1]]
    if not common:
        return None
    mine, other = (np.array([side[prompt] for prompt in common]) for side in both)
    drawn = metrics.resampled(len(common))
    draws = figure(mine[drawn].sum(axis=1)) / figure(other[drawn].sum(axis=1))
    value = float(figure(mine.sum(axis=0)) / figure(other.sum(axis=0)))
    low, high = (float(edge) for edge in np.percentile(draws, [2.5, 97.5]))
    return Ratio(value, (low, high) if len(common) >= metrics.FEW else None, len(common))
