"""A round: what one target pass brought, and where the time went. Facts alone; `metrics` derives the rates."""

from collections.abc import Iterable
from dataclasses import dataclass

from duoexp.worker import Span


@dataclass(frozen=True)
class Round:
    """Times in seconds, starts on the clock of `perf_counter`.

    A draft position is tested in one of two places. The first of a sequence that was drafted behind an unverified block
    is compared with the target's token as soon as the block stands (`head`); all others are tested by the pass.
    """

    tokens: tuple[int, ...]  # accepted draft tokens and one of the target's own, as far as the answer goes
    accepted: int  # draft tokens that the pass accepted
    rejected: bool  # it rejected one behind them
    head: bool | None  # whether a first token was the target's; None where none was compared
    verified: int  # nodes of the draft that the pass verified
    drafted: int  # nodes that were drafted since the last pass began, used or not
    sequences: int  # draft sequences that arrived for this pass; 0: none
    start_s: float  # of the pass
    verify_s: float
    wait_s: float  # how long the target waited for the draft before the pass
    message_s: float  # the part of the wait that an answer was on its way
    spans: tuple[Span, ...]  # the draft steps that became known before the pass
    rank: int | None = None  # which of the sequences began with the target's token, from 0; None: none did
    budget: int = 0  # draft tokens that the drafter was asked for: before this pass in turn, else to draft beside it
    why: str = ""  # the reason for this number


def tests(rounds: Iterable[Round]) -> list[tuple[int, bool]]:
    """Every verified draft token: its position in its sequence, from 1, and whether it was accepted."""
    tested = []
    for round in rounds:
        if round.head is not None:
            tested.append((1, round.head))
        first = 1 if round.head is None else 2
        tested += [(first + i, True) for i in range(round.accepted)]
        if round.rejected:
            tested.append((first + round.accepted, False))
    return tested
