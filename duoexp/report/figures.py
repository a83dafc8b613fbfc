"""The pictures of a report. Each is a figure of matplotlib, or None where the methods have nothing for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

from duoexp import metrics
from duoexp.metrics import Pair
from duoexp.report.methods import Method, budget_of_rounds, by_budget, kinds
from duoexp.report.style import canvas, legend, look
from duoexp.report.timeline import timeline

MOST = 16  # methods that a picture shows; more cannot be told apart
TESTED = 10  # verified tokens at a position that a point of a curve takes


@dataclass(frozen=True)
class Picture:
    """`text` says to who cannot see it what it shows, and to all how to read it."""

    name: str  # of its files
    title: str
    text: str
    figure: Figure


def pictures(found: Sequence[Method]) -> list[Picture]:
    """All that the methods have something for, of the first of them."""
    makers: tuple[Callable[[Sequence[Method]], Picture | None], ...]
    makers = (speedups, efficiency, acceptance, budgets, first_token, timelines)
    made = [make(found if make is budgets else found[:MOST]) for make in makers]
    return [picture for picture in made if picture is not None]


def speedups(found: Sequence[Method]) -> Picture:
    """Methods x tasks, each with its interval."""
    columns: list[str | None] = [*kinds(found), None] if len(kinds(found)) > 1 else list(kinds(found))
    figure, axes = canvas(1.4 + len(columns) * max(0.3, 0.1 * len(found)))
    offsets = np.linspace(-0.38, 0.38, len(found)) if len(found) > 1 else np.zeros(1)
    for place in range(0, len(columns), 2):
        axes.axhspan(place - 0.5, place + 0.5, color="#f2f2f2", linewidth=0)
    axes.grid(axis="y", visible=False)
    for number, method in enumerate(found):
        style = look(number) | {"linestyle": "none"}
        places, values, errors = [], [], []
        for place, kind in enumerate(columns):
            if pairs := method.pairs(kind):
                places.append(place + offsets[number])
                values.append(metrics.speedup(pairs))
                errors.append(_error(pairs))
        axes.errorbar(values, places, xerr=np.array(errors).T, label=method.label, capsize=2, markersize=4, **style)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(columns)), [kind or "all" for kind in columns])
    axes.set_ylim(len(columns) - 0.5, -0.5)
    axes.set_xlabel("speedup over autoregressive decoding (ratio of tokens/s)")
    axes.set_xlim(left=0)
    legend(figure, axes)
    text = "The line at 1 is autoregressive decoding. A bar is a paired 95% bootstrap interval over prompts"
    return Picture(
        "speedups", "Speedup by task", f"{text}; it takes {metrics.FEW} prompts, and a point without has fewer.", figure
    )


def efficiency(found: Sequence[Method]) -> Picture | None:
    """Block efficiency against speedup: a point a method and task, and a large one for all of them."""
    if all(method.alone for method in found):
        return None
    figure, axes = canvas(3.8)
    for number, method in enumerate(found):
        style = {"color": look(number)["color"], "marker": look(number)["marker"], "linestyle": "none"}
        groups = [method.pairs(kind) for kind in kinds([method])]
        if len(groups) > 1:
            axes.plot(*_efficiency(groups), markersize=4, alpha=0.5, **style)
        axes.plot(*_efficiency([method.pairs()]), markersize=9, markeredgecolor="black", label=method.label, **style)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xlabel("block efficiency tau (new tokens per target pass)")
    axes.set_ylabel("speedup (ratio of tokens/s)")
    legend(figure, axes)
    text = (
        "A large sign is a method over all prompts, a small one over those of a task. What lies low for its tau pays "
    )
    return Picture(
        "efficiency", "Block efficiency and speedup", text + "for its drafts, or for passes that are too wide.", figure
    )


def acceptance(found: Sequence[Method]) -> Picture | None:
    """Acceptance rate by the position in a sequence."""
    curves = []
    for number, method in enumerate(found):
        by_position = metrics.tests_by_position(each for pair in method.pairs() for each in pair.method.rounds)
        points = {place: (kept, of) for place, (kept, of) in by_position.items() if of >= TESTED}
        if points:
            curves.append((method.label, look(number), points))
    if not curves:
        return None
    figure, axes = canvas(3.4)
    shifts = np.linspace(-0.12, 0.12, len(curves)) if len(curves) > 1 else np.zeros(1)
    for shift, (label, style, points) in zip(shifts, curves, strict=True):
        rates = np.array([kept / of for kept, of in points.values()])
        edges = np.array([wilson(kept, of) for kept, of in points.values()])
        error = np.abs(edges.T - rates)
        axes.errorbar(
            np.array(list(points)) + shift,
            rates,
            yerr=error,
            capsize=2,
            markersize=4,
            linewidth=1.2,
            label=label,
            **style,
        )
    axes.set_xlabel("position in the draft sequence (tokens)")
    axes.set_ylabel("acceptance rate alpha")
    axes.set_ylim(top=1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(figure, axes)
    text = "The chance that the target accepts a verified draft token, given that it accepted all before it in the "
    text += f"sequence. Bars are 95% Wilson intervals; positions verified fewer than {TESTED} times are left out."
    return Picture("acceptance", "Acceptance by position", text, figure)


def budgets(found: Sequence[Method]) -> Picture | None:
    """Speedup against the budget, for methods that differ in it alone; what was measured or chosen is marked."""
    curves = {label: group for label, group in by_budget(found).items() if len(group.fixed) > 1}
    if not curves:
        return None
    figure, axes = canvas(3.6)
    for number, (label, group) in enumerate(curves.items()):
        style, fixed = look(number), sorted(group.fixed, key=lambda method: int(method.budget))
        values = [metrics.speedup(method.pairs()) for method in fixed]
        errors = np.array([_error(method.pairs()) for method in fixed]).T
        places = [int(method.budget) for method in fixed]
        axes.errorbar(places, values, yerr=errors, capsize=2, markersize=4, label=label, **style)
        for method in group.chosen:
            at, value = budget_of_rounds(method), metrics.speedup(method.pairs())
            axes.plot(at, value, marker="*", markersize=14, color=style["color"], markeredgecolor="black")
            axes.annotate(method.budget, (at, value), xytext=(7, 7), textcoords="offset points")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xlabel("draft budget (tokens a round)")
    axes.set_ylabel("speedup (ratio of tokens/s)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(figure, axes)
    text = (
        "Curves are constant budgets with their 95% intervals; a star is a budget that was chosen by measuring, at the "
    )
    return Picture("budget", "Draft budget and speedup", text + "median of its rounds.", figure)


def first_token(found: Sequence[Method]) -> Picture | None:
    """Time to first token against the length of the prompt."""
    answers = [answer for method in found for answer in method.answers if not method.alone]
    if len({answer.prompt_tokens for answer in answers}) < 2:
        return None
    figure, axes = canvas(3.6)
    lengths = [answer.prompt_tokens for answer in answers]
    times = [1000 * answer.pair.baseline.ttft_s for answer in answers]
    axes.plot(lengths, times, "x", color="#777777", markersize=5, label="their baselines")
    for number, method in enumerate(found):
        style = look(number) | {"linestyle": "none", "markerfacecolor": "none"}
        lengths = [answer.prompt_tokens for answer in method.answers]
        times = [1000 * answer.pair.method.ttft_s for answer in method.answers]
        axes.plot(lengths, times, markersize=5, label=method.label, **style)
    for axis, name in ((axes.xaxis, "prompt length (tokens)"), (axes.yaxis, "time to first verified token (ms)")):
        axis.set_label_text(name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    legend(figure, axes)
    return Picture(
        "ttft",
        "Time to first token",
        "A point an answer; both axes are logarithmic. A cross is the autoregressive baseline of a method.",
        figure,
    )


def timelines(found: Sequence[Method]) -> Picture | None:
    """Some rounds of each method that drafts."""
    drafting = {method.label: method.pairs() for method in found if not method.alone}
    if not drafting:
        return None
    text = "Each method's first answer, the same length of time. A number is how many tokens the pass brought; gaps "
    return Picture("timeline", "Where the time goes", text + "between the bars are idle time.", timeline(drafting))


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """95% interval of a share (Wilson 1927), which stays within 0 and 1."""
    z, rate = 1.96, successes / trials
    middle = rate + z * z / (2 * trials)
    reach = z * float(np.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)))
    return (middle - reach) / (1 + z * z / trials), (middle + reach) / (1 + z * z / trials)


def _error(pairs: Sequence[Pair]) -> tuple[float, float]:
    """How far the interval of the speedup reaches below and above it; 0 with few prompts."""
    between = metrics.interval(pairs) if len({pair.prompt for pair in pairs}) >= metrics.FEW else None
    value = metrics.speedup(pairs)
    return (0.0, 0.0) if between is None else (max(0.0, value - between[0]), max(0.0, between[1] - value))


def _efficiency(groups: Sequence[Sequence[Pair]]) -> tuple[list[float], list[float]]:
    taus = [metrics.block_efficiency([pair.method for pair in pairs]) for pairs in groups]
    return taus, [metrics.speedup(pairs) for pairs in groups]
