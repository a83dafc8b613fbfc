"""The timeline of some rounds: when the target verified, when the draft model drafted, and when each waited."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from duoexp.metrics import Decoding, Pair
from duoexp.report.style import COLOURS, RC, WIDTH

ROUNDS = 8
TARGET, DRAFT, WAIT = COLOURS[0], COLOURS[5], "#cccccc"


@dataclass(frozen=True)
class Lanes:
    """What each side did in a window of time: starts and lengths in seconds from the start of the window."""

    verify: tuple[tuple[float, float], ...]
    wait: tuple[tuple[float, float], ...]  # of the target, for the draft
    draft: tuple[tuple[float, float], ...]
    tokens: tuple[int, ...]  # that each pass brought


def timeline(pairs: Mapping[str, Sequence[Pair]], rounds: int = ROUNDS) -> Figure:
    """Two lanes a method, over the time that such a number of rounds takes, the same for all of them."""
    answers = {label: answer(group) for label, group in pairs.items()}
    length_s = statistics.median(_length_s(each, rounds) for each in answers.values())
    with matplotlib.rc_context(RC | {"axes.grid": False}):
        figure = Figure(figsize=(WIDTH, 0.75 + 0.85 * len(answers)), layout="constrained")
        rows = figure.subplots(len(answers), sharex=True, squeeze=False)[:, 0]
        for axes, (label, decoding) in zip(rows, answers.items(), strict=True):
            draw(axes, lanes(decoding, length_s))
            axes.set_title(label, fontsize=8, loc="left", pad=2)
            axes.set_xlim(0, 1000 * length_s)
        rows[-1].set_xlabel("time (ms)")
        figure.legend(handles=_keys(), loc="outside upper left", ncols=3, fontsize=8, frameon=False)
    return figure


def answer(pairs: Sequence[Pair]) -> Decoding:
    """The first that is long enough to have a middle; the longest where none is."""
    answers = [pair.method for pair in pairs]
    long = (each for each in answers if len(each.rounds) >= 2 * ROUNDS)
    return next(long, max(answers, key=lambda each: len(each.rounds)))


def lanes(decoding: Decoding, length_s: float) -> Lanes:
    """The window of an answer that begins with a pass a third of the way through its rounds."""
    start = decoding.rounds[len(decoding.rounds) // 3].start_s
    passes = [(each.start_s, each.verify_s) for each in decoding.rounds]
    waits = [(each.start_s - each.wait_s, each.wait_s) for each in decoding.rounds]
    steps = [(left, right - left) for left, right in decoding.spans]
    verify = _within(passes, start, length_s)
    inside = [each for each in decoding.rounds if start <= each.start_s < start + length_s]
    return Lanes(
        verify=verify,
        wait=_within(waits, start, length_s),
        draft=_within(steps, start, length_s),
        tokens=tuple(len(each.tokens) for each in inside),
    )


def _within(bars: Iterable[tuple[float, float]], start: float, length_s: float) -> tuple[tuple[float, float], ...]:
    """The bars of a window, cut at its edges."""
    cut = [(max(0.0, at - start), min(length_s, at + length - start)) for at, length in bars]
    return tuple((left, right - left) for left, right in cut if right > left)


def _length_s(decoding: Decoding, rounds: int) -> float:
    """How long so many rounds take, from a third of the way through the answer."""
    window = decoding.rounds[len(decoding.rounds) // 3 :][:rounds]
    return window[-1].start_s + window[-1].verify_s - window[0].start_s


def draw(axes: Axes, window: Lanes) -> None:
    """The two lanes, times in ms."""
    edge: dict[str, Any] = {"edgecolor": "black", "linewidth": 0.4}
    axes.broken_barh(_ms(window.verify), (1.1, 0.8), facecolor=TARGET, **edge)
    axes.broken_barh(_ms(window.wait), (1.1, 0.8), facecolor=WAIT, hatch="////", **edge)
    axes.broken_barh(_ms(window.draft), (0.1, 0.8), facecolor=DRAFT, **edge)
    for (start, length), count in zip(window.verify, window.tokens, strict=True):
        axes.text(1000 * (start + length / 2), 1.5, str(count), ha="center", va="center", color="white", fontsize=7)
    axes.set_yticks([1.5, 0.5], ["target", "draft"], fontsize=8)
    axes.set_ylim(0, 2)
    axes.tick_params(axis="y", length=0)


def _keys() -> list[Patch]:
    kinds = (("target verifies", TARGET, ""), ("target waits for the draft", WAIT, "////"), ("draft step", DRAFT, ""))
    return [
        Patch(facecolor=colour, hatch=hatch, edgecolor="black", linewidth=0.5, label=name)
        for name, colour, hatch in kinds
    ]


def _ms(bars: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(1000 * start, 1000 * length) for start, length in bars]
