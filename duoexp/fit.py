"""From measured times to a budget: what has to be measured for it, and the budget that follows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from duoexp.budget import Budget, Deadline, Fixed
from duoexp.config import BudgetConfig, InputError
from duoexp.optimal import Optimal
from duoexp.policy import Policy
from duoexp.profile import Costs, Profile, Want
from duoexp.shape import Shape, most_sequences, shape

CONTEXT = 128  # tokens before the passes that a budget rests on
WIDTHS = (1, 2, 4, 8, 16, 32)
NEAR = 0.97  # of two budgets whose rates lie closer than this, the smaller one


@dataclass(frozen=True)
class Setting:
    """What a budget is for. `policy`: None of a drafter that has none. beside: both models work at the same time."""

    config: BudgetConfig
    policy: Policy | None
    overlapped: bool
    beside: bool
    context_size: int  # of the smaller model

    @property
    def context(self) -> int:
        return min(CONTEXT, self.context_size // 2)

    def check(self) -> None:
        """Raises InputError where the kind of budget and the method do not fit."""
        kind = self.config.kind
        if kind == "optimal" and self.config.most < 2:
            raise InputError(
                f"draft.budget.most={self.config.most} leaves draft.budget.kind=optimal nothing to choose; "
                "give 2 or more, or a number as the budget"
            )
        if kind in ("measured", "optimal") and self.policy is None:
            raise InputError(
                f"draft.budget.kind={kind} rests on the time of a draft model's passes, and this method has no policy "
                "that says how many it takes; give a number, as in draft.budget=10"
            )
        if kind == "deadline" and not (self.overlapped and self.beside):
            raise InputError(
                "draft.budget.kind=deadline ends a draft with the target's pass, which needs both at the same time; "
                "use draft.schedule=overlapped with hardware.worker=process, or another kind of budget"
            )

    def want(self) -> Want | None:
        """What has to be known; None where nothing has to be."""
        if self.config.kind not in ("measured", "optimal") or not self.config.most:
            return None
        assert self.policy is not None, "checked before"
        most = most_sequences(self.policy, self.config.most)
        widths = [width for width in WIDTHS if width < 2 * self.config.most]
        sequences = [count for count in (1, 2, 4) if count < most] + [most]
        return Want(self.beside, [self.context], widths, sequences)

    def budget(self, profile: Profile) -> Budget:
        kind, most = self.config.kind, self.config.most
        if kind == "fixed":
            return Fixed(self.config.tokens)
        if kind == "deadline":
            return Deadline(most)
        costs = profile.costs(self.beside, self.context)
        if not most or not costs.draft:
            return Fixed(0, "no draft" if most else kind)
        assert self.policy is not None, "checked before"
        if kind == "optimal":
            return Optimal(costs, most, list(costs.draft), self.overlapped)
        return Fixed(pace(self.policy, costs, most, self.overlapped), "measured")

    def about(self, budget: Budget) -> dict[str, Any]:
        """For the summary."""
        return {"kind": self.config.kind, "tokens": budget.tokens if isinstance(budget, Fixed) else None}


def pace(policy: Policy, costs: Costs, most: int, overlapped: bool) -> int:
    """The smallest budget, up to `most`, with which both models are as busy as they can be (2503.00784).

    The paper gives the drafter the time of one target pass. Such a draft seldom ends with the pass: one token less
    leaves the drafter idle, one more the target. So of all budgets this takes the one that brings the most tokens a
    second while nothing is rejected: a sequence of L tokens in a round of max(target_s(L), draft_s). Where the policy
    may choose among shapes, the dearest counts. An overlapped round spends a token on choosing the sequence, so it
    takes two to gain anything.
    """
    rates: dict[int, float] = {}
    for tokens in range(min(most, 2 if overlapped else 1), most + 1):
        sure, *other = _shapes(policy, tokens)
        draft_s = max(costs.draft_s(each.passes) for each in (sure, *other))
        rates[tokens] = tokens / sure.sequences / max(costs.target_s(sure.depth), draft_s)
    return next(tokens for tokens, rate in rates.items() if rate >= NEAR * max(rates.values()))


def _shapes(policy: Policy, tokens: int) -> Sequence[Shape]:
    return [shape(policy, tokens, doubt) for doubt in (False, True)]
