"""The budget that promises the most verified tokens a second, by measured times and the acceptance seen so far."""

from collections import Counter
from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from duoexp.budget import END, Size
from duoexp.profile.tables import Costs
from duoexp.rounds import Round, tests

Floats = NDArray[np.float64]

PRIOR, PRIOR_WEIGHT = 0.8, 5.0  # an acceptance to begin with, worth so many tests
RIVAL = 0.3  # the chance that the next sequence begins with the target's token where those before do not, to begin with
NEWS = 1.5  # plans anew when it has seen so many times as much: a plan takes milliseconds
PAUSE = 8  # rounds without a draft until it looks again, the first time
AHEAD = 2  # plans for answers of so many times the deepest draft; of longer ones the end is too far to matter


class Acceptance:
    """The chance that a draft token is accepted, by its position in its sequence and by the rank of the sequence."""

    def __init__(self) -> None:
        self.tested, self.accepted = Counter[int](), Counter[int]()  # by position, from 1
        self.tried, self.chosen = Counter[int](), Counter[int]()  # by rank, from 0

    def see(self, round: Round) -> int:
        """Counts what the round tells; returns how many tests that were."""
        found = tests([round])
        for position, accepted in found:
            self.tested[position] += 1
            self.accepted[position] += accepted
        if round.sequences and (round.head is not None or round.verified):
            reached = round.sequences if round.rank is None else round.rank + 1
            self.tried.update(range(reached))
            self.chosen.update([] if round.rank is None else [round.rank])
        return len(found)

    def at(self, deepest: int) -> Floats:
        """[deepest + 1]: at positions 0 (no meaning) to `deepest`. Where little was seen, close to the overall rate."""
        overall = _rate(self.accepted.total(), self.tested.total(), PRIOR)
        return np.array([1.0] + [_rate(self.accepted[i], self.tested[i], overall) for i in range(1, deepest + 1)])

    def first(self, sequences: int) -> float:
        """That one of so many sequences begins with the target's token."""
        miss = 1.0
        for rank in range(sequences):
            miss *= 1 - _rate(self.chosen[rank], self.tried[rank], RIVAL if rank else self.at(1)[1])
        return 1 - miss


class Optimal:
    """Depth and number of sequences of every round, from the plan with the least expected time to the answer's end.

    The plan is exact for a model of decoding with these facts: target_s(w), a pass over w tokens; draft_s(d, k), a
    draft of k sequences, d tokens deep; a_i, the chance that the i-th token of a sequence is accepted when those before
    are; h_k, that one of k sequences begins with the target's token. W is the expected time of what is left.

    In turn, with n tokens left, and i of the d accepted with chance p_i (p_0 = 1 - h_k, p_1 = h_k (1 - a_2), ...):

        W(n) = min over d, k of  draft_s(d, k) + target_s(k d + 1) + sum_i p_i W(n - i - 1)

    Overlapped, a pass verifies the m tokens that are left of the chosen sequence when its first was compared, while the
    drafter goes d deeper. The draft counts only when all m are accepted, with chance A: then the target waits for what
    is missing of it, and h_k decides whether d - 1 tokens await the next pass, or none. With N = n - m - 1:

        W(n, m) = target_s(m + 1) + sum_{i < m} p_i W(n - i - 1, 0)
                  + A min over d, k of  max(0, draft_s(d, k) - target_s(m + 1)) + h_k W(N, d - 1) + (1 - h_k) W(N, 0)

    An end by EOS is not foreseen.

    Where the plan is not to draft, nothing more is tested. So after `PAUSE` rounds of that it forgets what it saw, and
    begins anew; the next pause is twice as long. n rounds have at most log2(n / PAUSE + 1) looks in vain, each as short
    as that at the beginning. A draft that pays for as many rounds as the next pause makes it short again.
    """

    def __init__(self, costs: Costs, most: int, sequences: Sequence[int], overlapped: bool) -> None:
        self.overlapped, self.most, self.sequences = overlapped, most, tuple(sequences)
        self.acceptance, self._seen, self._due = Acceptance(), 0, 0.0
        self._pause, self._paused, self._drafting = PAUSE, 0, 0  # rounds
        self._target_s = np.array([costs.target_s(tokens + 1) for tokens in range(most + 1)])
        times = [[_draft_s(costs, d, k) if d * k <= most else inf for d in range(most + 1)] for k in sequences]
        self._draft_s = np.array(times)  # [sequences, depth]
        self._plan()

    def choose(self, pending: int, room: int) -> Size:
        if room <= 0:
            return Size(0, END)
        left = min(room + 1 + pending, len(self._depth) - 1)
        place = (left, min(pending, self.most)) if self.overlapped else (left, 0)
        depth, sequences = int(self._depth[place]), self.sequences[self._which[place]]
        if not depth:
            return Size(0, "a draft would take longer than it saves")
        return Size(depth * sequences, f"least time: {depth} deep, sequences: {sequences}", sequences)

    def observe(self, round: Round) -> None:
        self._seen += self.acceptance.see(round)
        if self._looks_again():
            self.acceptance, self._seen, self._due = Acceptance(), 0, 0.0
        if self._seen >= self._due:
            self._plan()

    def _looks_again(self) -> bool:
        """Counts the round as one with a draft, or without."""
        if self._depth[-1, 0]:
            self._paused, self._drafting = 0, self._drafting + 1
            if self._drafting >= self._pause:
                self._pause = PAUSE
            return False
        self._paused, self._drafting = self._paused + 1, 0
        if self._paused < self._pause:
            return False
        self._paused, self._pause = 0, 2 * self._pause
        return True

    def _plan(self) -> None:
        self._due = NEWS * max(self._seen, 4)
        accepted = self.acceptance.at(self.most + 1)
        first = np.array([self.acceptance.first(k) for k in self.sequences])
        (self._plan_overlapped if self.overlapped else self._plan_serial)(accepted, first)

    def _plan_serial(self, accepted: Floats, first: Floats) -> None:
        most, horizon = self.most, AHEAD * self.most
        depths = np.arange(most + 1)
        # reach[k, i]: the first i tokens of a sequence are accepted. ends[k, d, i]: of d tokens, exactly i are.
        chances = np.tile(accepted[:-1], (len(first), 1))
        chances[:, 1] = first
        reach = chances.cumprod(axis=1)
        ends = np.where(depths < depths[:, None], (reach - np.roll(reach, -1, axis=1))[:, None], 0.0)
        ends[:, depths, depths] = reach
        nodes = depths * np.array(self.sequences)[:, None]
        cost = self._draft_s + self._target_s[np.minimum(nodes, most)]  # what has more nodes takes for ever
        left_s = np.zeros(horizon + 1)
        self._depth, self._which = np.zeros((2, horizon + 1, 1), dtype=int)
        for left in range(1, horizon + 1):
            deepest = min(most, left - 1)
            after = left_s[left - 1 - depths[: deepest + 1]]
            total = cost[:, : deepest + 1] + ends[:, : deepest + 1, : deepest + 1] @ after
            which, depth = np.unravel_index(total.argmin(), total.shape)
            left_s[left], self._depth[left], self._which[left] = total[which, depth], depth, which

    def _plan_overlapped(self, accepted: Floats, first: Floats) -> None:
        most, horizon = self.most, AHEAD * self.most
        pending = np.arange(most + 1)
        reach = np.cumprod(np.concatenate([[1.0], accepted[2:]]))  # of what awaits a pass, the first i are accepted
        ends = reach[:-1] - reach[1:]
        target_s = self._target_s[: most + 1]
        # [pending, sequences, depth - 1]: a depth of one would be used up by choosing the sequence
        wait_s = np.maximum(0, self._draft_s[None, :, 2:] - target_s[:, None, None])
        hit, miss = first[:, None], 1 - first[:, None]
        left_s = np.full((horizon + 1, most + 1), np.inf)
        left_s[0] = 0
        self._depth, self._which = np.zeros((2, horizon + 1, most + 1), dtype=int)
        for left in range(1, horizon + 1):
            m = pending[: min(most + 1, left)]
            rejected = np.concatenate([[0.0], np.cumsum(ends[m[:-1]] * left_s[left - 1 - m[:-1], 0])])
            after = left_s[left - 1 - m]  # [pending, what awaits the next pass]
            total = wait_s[m] + hit * after[:, None, 1:most] + miss * after[:, :1, None]
            flat = total.reshape(len(m), -1)
            best = flat.argmin(1)
            none, least = after[:, 0], flat[m, best]
            drafts = least < none
            left_s[left, m] = target_s[m] + rejected + reach[m] * np.minimum(least, none)
            self._depth[left, m] = np.where(drafts, best % (most - 1) + 2, 0)
            self._which[left, m] = np.where(drafts, best // (most - 1), 0)


def _draft_s(costs: Costs, depth: int, sequences: int) -> float:
    """The first pass has one row, whatever grows from it; no pass, no message."""
    return costs.draft_s([1] + [sequences] * (depth - 1)) if depth else 0.0


def _rate(count: int, of: int, prior: float) -> float:
    return (count + PRIOR_WEIGHT * prior) / (of + PRIOR_WEIGHT)
