"""Budgets: how many draft tokens a round asks for, and whether it waits for all of them."""

from dataclasses import dataclass
from typing import Protocol

from duoexp.rounds import Round


@dataclass(frozen=True)
class Size:
    """What a round asks of the drafter."""

    tokens: int  # of all sequences together
    why: str
    sequences: int | None = None  # so many, whatever the policy says; None: as many as the policy says
    waits: bool = True  # for all of them; else no more steps begin when the target's pass is over


UNASKED = Size(0, "")
END = "end of the answer"


class Budget(Protocol):
    def choose(self, pending: int, room: int) -> Size:
        """For the draft that follows `pending` nodes under verification; 0 when the drafter is asked in turn.

        room: no sequence longer than this can be of use before the answer reaches its length. The drafter knows it too.
        """
        ...

    def observe(self, round: Round) -> None:
        """What came of it."""
        ...


@dataclass(frozen=True)
class Fixed:
    """The same number every round; 0 makes decoding autoregressive. `why` tells where the number came from."""

    tokens: int
    why: str = "fixed"

    def choose(self, pending: int, room: int) -> Size:
        return Size(self.tokens, self.why) if room > 0 else Size(0, END)

    def observe(self, round: Round) -> None:
        pass


@dataclass(frozen=True)
class Deadline:
    """Drafts until the target's pass is over, `most` tokens at most.

    The target waits for the step under way, which would be lost otherwise, unless it is the first of its draft: where
    a step takes longer than a pass, nothing is waited for.
    """

    most: int

    def choose(self, pending: int, room: int) -> Size:
        return Size(self.most, "until the pass is over", waits=False) if room > 0 else Size(0, END)

    def observe(self, round: Round) -> None:
        pass
