"""Is the output the target's own? Equal, parted at a tie, or different."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from duoexp.lm.causal_lm import CausalLM
from duoexp.sampling import Sampler

# How far passes of different widths may move a logit against another, in units of the dtype's epsilon times the largest
# logit. Seen with a 30-layer model on a CPU: in passes 3 to 16 tokens wide 1.4 in bfloat16, 7 in float32. In bfloat16
# behind 30 tokens out of trees of 64 nodes, whose rounding stays in the cache, 2.7; as much between two engines.
ROUNDING = {torch.float32: 16.0, torch.bfloat16: 4.0, torch.float16: 4.0}


@dataclass(frozen=True)
class Comparison:
    """kind: equal, tie or different. The rest is about the first answer position that differs.

    gap: how far the two tokens' scores lie apart there, in logits; tolerance: what rounding explains.
    """

    kind: str
    position: int | None = None
    tokens: tuple[int | None, int | None] | None = None
    gap: float | None = None
    tolerance: float | None = None


def compare(
    target: CausalLM, sampler: Sampler, prompt: Sequence[int], baseline: Sequence[int], method: Sequence[int]
) -> Comparison:
    """The method's answer against the autoregressive one. Costs a target pass when they part."""
    if list(baseline) == list(method):
        return Comparison("equal")
    position = next((i for i, (a, b) in enumerate(zip(baseline, method, strict=False)) if a != b), None)
    if position is None:  # one answer goes on where the other ended
        shorter = min(len(baseline), len(method))
        ends = [answer[shorter] if len(answer) > shorter else None for answer in (baseline, method)]
        return Comparison("different", shorter, (ends[0], ends[1]))
    context = [*prompt, *baseline[:position]]
    return _part(target.logits(context)[0], sampler, len(context), position, baseline[position], method[position])


def _part(logits: Tensor, sampler: Sampler, place: int, position: int, ours: int, theirs: int) -> Comparison:
    tolerance = float(ROUNDING[logits.dtype] * torch.finfo(logits.dtype).eps * logits.abs().max())
    scores = replace(sampler, top_k=0, top_p=1.0).scores(logits, place) * (sampler.temperature or 1.0)
    gap = abs(float(scores[ours] - scores[theirs]))
    tie = all(
        _can_win(logits.float(), sampler, place, token, other, tolerance)
        for token, other in ((ours, theirs), (theirs, ours))
    )
    return Comparison("tie" if tie else "different", position, (ours, theirs), gap, tolerance)


def _can_win(logits: Tensor, sampler: Sampler, place: int, token: int, other: int, tolerance: float) -> bool:
    """Whether rounding can make the sampler choose `token`: by moving it against `other`, or over the edge of top-p."""
    moved = logits.clone()
    moved[token] += tolerance / 2
    moved[other] -= tolerance / 2
    shift = tolerance * sampler.top_p * (1 - sampler.top_p)  # how far the mass S of the likelier ones moves: S (1 - S)
    edges = (sampler.top_p - shift, sampler.top_p, sampler.top_p + shift)
    return any(replace(sampler, top_p=edge).token(moved, place) == token for edge in edges)
