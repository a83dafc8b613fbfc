"""Tables as data: what is shown, what stands out, and the bare numbers behind it."""

import csv
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader

from duoexp import metrics
from duoexp.metrics import Decoding, Pair
from duoexp.report import compare
from duoexp.report.methods import Method, budget_of_rounds, by_budget, kinds

BOLD = "bold: the best of its column, and each whose ratio to the best has a 95% interval that includes 1"
FEW = f"an interval, and a tie with the best, takes {metrics.FEW} prompts"


@dataclass(frozen=True)
class Cell:
    text: str
    detail: str = ""  # an interval, or what a figure lacks
    bold: bool = False


@dataclass(frozen=True)
class Table:
    """`columns` carry units. `facts`: the CSV, a line a figure or a method, unrounded."""

    name: str  # of its files
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    facts: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...] = ()

    @cached_property
    def csv(self) -> str:
        text = io.StringIO()
        lines = csv.DictWriter(text, list(self.facts[0]), lineterminator="\n")
        lines.writeheader()
        lines.writerows(self.facts)
        return text.getvalue()

    def render(self, template: str) -> str:
        """In the form of a file of `templates/`."""
        return templates.get_template(template).render(table=self)


def tables(found: Sequence[Method]) -> list[Table]:
    """All that the methods have figures for."""
    made = [overview(found), speedup(found), throughput(found), acceptance(found), first_token(found), budgets(found)]
    return [table for table in made if table is not None]


def overview(found: Sequence[Method]) -> Table:
    """A line a method, over all of its prompts."""
    facts = [_facts(method) for method in found]
    best = _best(found, [method.pairs() for method in found])
    rows = []
    for method, fact, bold in zip(found, facts, best, strict=True):
        rows.append(
            (
                Cell(method.label, _about(method)),
                Cell(str(fact["answers"]), f"{fact['failed']} failed" if fact["failed"] else ""),
                _number(fact["baseline_tokens_per_s"], 1),
                _number(fact["tokens_per_s"], 1),
                _speedup(method.pairs(), bold),
                _number(fact["speedup_geometric"], 2),
                _number(fact["tau"], 2),
                _number(fact["alpha"], 2),
                _number(fact["draft_efficiency"], 2),
                _number(fact["ttft_ms"], 0),
                _number(fact["baseline_ttft_ms"], 0),
                _number(fact["target_idle"], 0, 100),
                _number(fact["draft_idle"], 0, 100),
                Cell(fact["identity"]),
            )
        )
    columns = (
        *("method", "answers", "AR tok/s", "tok/s", "speedup", "geometric mean", "tau", "alpha", "draft efficiency"),
        *("TTFT ms", "AR TTFT ms", "target idle %", "drafter idle %", "identity"),
    )
    return Table("overview", "Methods over all prompts", columns, tuple(rows), tuple(facts), (BOLD, FEW))


def speedup(found: Sequence[Method]) -> Table | None:
    """Methods x tasks."""
    return _by_task(
        found,
        Table("speedup", "Speedup over autoregressive decoding, ratio of totals", (), (), (), (BOLD, FEW)),
        _speedup,
        lambda pairs: {"speedup": metrics.speedup(pairs), **_edges(metrics.interval(pairs))},
    )


def throughput(found: Sequence[Method]) -> Table | None:
    """Methods x tasks."""
    note = "bold as in the table of speedups: each method has a baseline of its own, decoded alternately with it"
    return _by_task(
        found,
        Table("throughput", "Tokens per second", (), (), (), (note,)),
        lambda pairs, bold: Cell(f"{metrics.tokens_per_s([pair.method for pair in pairs]):.1f}", bold=bold),
        lambda pairs: {
            "tokens_per_s": metrics.tokens_per_s([pair.method for pair in pairs]),
            "baseline_tokens_per_s": metrics.tokens_per_s([pair.baseline for pair in pairs]),
        },
    )


POSITIONS = 8  # columns of the table of acceptance; its CSV has all


def acceptance(found: Sequence[Method]) -> Table | None:
    """Acceptance rate by the position in a sequence, given that all before it were accepted."""
    facts, rows, last = [], [], 0
    for method in found:
        by_position = metrics.tests_by_position(each for pair in method.pairs() for each in pair.method.rounds)
        if not by_position:
            continue
        cells = [Cell(method.label)]
        for position, (accepted, tested) in by_position.items():
            facts.append({"method": method.label, "position": position, "accepted": accepted, "tested": tested})
            cells.append(Cell(f"{accepted / tested:.2f}", f"of {tested}"))
        rows.append(cells[: POSITIONS + 1])
        last = max(last, len(rows[-1]) - 1)
    if not rows:
        return None
    filled = tuple((*cells, *[Cell("")] * (last + 1 - len(cells))) for cells in rows)
    columns = ("method", *(f"position {position}" for position in range(1, last + 1)))
    note = "the chance that a verified draft token is accepted, below it how many were verified there"
    return Table("acceptance", "Acceptance rate by position in the draft", columns, filled, tuple(facts), (note,))


def first_token(found: Sequence[Method]) -> Table:
    """Time to the first verified token, by the length of the prompt in powers of two."""
    sizes = sorted({_size(answer.prompt_tokens) for method in found for answer in method.answers})
    facts, rows = [], []
    for method in found:
        cells = [Cell(method.label)]
        for size in sizes:
            group = [answer.pair for answer in method.answers if _size(answer.prompt_tokens) == size]
            if not group:
                cells.append(Cell("-"))
                continue
            ours, theirs = (
                _median_ms(side) for side in zip(*((pair.method, pair.baseline) for pair in group), strict=True)
            )
            cells.append(Cell(f"{ours:.0f}", f"AR {theirs:.0f}, of {len(group)}"))
            fact = {"method": method.label, "from_tokens": size // 2, "below_tokens": size, "answers": len(group)}
            facts.append(fact | {"ttft_ms": ours, "baseline_ttft_ms": theirs})
        rows.append(tuple(cells))
    columns = ("method", *(f"{size // 2} to {size - 1} tokens" for size in sizes))
    title, note = (
        "Time to first token by prompt length, median in ms",
        "AR: of autoregressive decoding in the same runs",
    )
    return Table("ttft", title, columns, tuple(rows), tuple(facts), (note,))


def budgets(found: Sequence[Method]) -> Table | None:
    """What a budget brings: methods that differ in nothing else."""
    facts, rows = [], []
    for label, group in by_budget(found).items():
        if len(group.fixed) + len(group.chosen) < 2:
            continue
        members = [*group.fixed, *group.chosen]
        best = _best(members, [method.pairs() for method in members])
        for method, bold in zip(members, best, strict=True):
            pairs, median = method.pairs(), budget_of_rounds(method)
            ours = [pair.method for pair in pairs]
            tau, rate = metrics.block_efficiency(ours), metrics.tokens_per_s(ours)
            cells = (Cell(label), Cell(method.budget), Cell(f"{median:.1f}"), _speedup(pairs, bold))
            rows.append((*cells, _number(rate, 1), _number(tau, 2)))
            fact: dict[str, Any] = {"method": label, "budget": method.budget, "median_budget": median, "tau": tau}
            fact |= {"tokens_per_s": rate}
            fact |= {"speedup": metrics.speedup(pairs)} | _edges(metrics.interval(pairs))
            facts.append(fact)
    if not rows:
        return None
    columns = ("method", "budget", "median budget of rounds", "speedup", "tok/s", "tau")
    return Table("budget", "Draft budget, in tokens a round", columns, tuple(rows), tuple(facts), (BOLD, FEW))


def comparison(before: Sequence[Method], after: Sequence[Method]) -> Table:
    """After over before, for methods of the same name, on the prompts of both."""
    earlier = {method.label: method for method in before}
    facts, rows = [], []
    for method in after:
        if method.label not in earlier:
            continue
        for kind in (*kinds([method]), None):
            ours, theirs = method.pairs(kind), earlier[method.label].pairs(kind)
            ratios = {
                "speedup": compare.speedups(ours, theirs),
                "tokens_per_s": compare.rates(ours, theirs),
                "baseline_tokens_per_s": compare.baselines(ours, theirs),
            }
            if any(ratio is None for ratio in ratios.values()):
                continue
            found = {name: ratio for name, ratio in ratios.items() if ratio is not None}
            prompts = found["speedup"].prompts
            sides = (f"{metrics.speedup(side):.2f}" for side in (theirs, ours))
            cells = (Cell(method.label), Cell(kind or "all"), Cell(str(prompts)), *(Cell(side) for side in sides))
            rows.append((*cells, *(_ratio(ratio) for ratio in found.values())))
            fact: dict[str, Any] = {"method": method.label, "task": kind or "all", "prompts": prompts}
            for name, ratio in found.items():
                fact |= {f"{name}_ratio": ratio.value} | _edges(ratio.interval, f"{name}_ratio_")
            facts.append(fact)
    columns = (
        *("method", "task", "prompts", "speedup before", "speedup after"),
        *("speedup, after / before", "tok/s, after / before", "AR tok/s, after / before"),
    )
    notes = (
        "each ratio over the prompts of both sides, with its paired 95% bootstrap interval",
        "the speedups are over each side's own baseline, so a slower machine cancels out of their ratio alone",
    )
    return Table("comparison", "Before and after", columns, tuple(rows), tuple(facts), notes)


def _ratio(ratio: compare.Ratio) -> Cell:
    if ratio.interval is None:
        return Cell(f"{ratio.value:.2f}", "too few prompts")
    low, high = ratio.interval
    return Cell(f"{ratio.value:.2f}", f"{low:.2f} to {high:.2f}" + ", no difference" * ratio.same, not ratio.same)


def _by_task(
    found: Sequence[Method],
    table: Table,
    cell: Callable[[Sequence[Pair], bool], Cell],
    fact: Callable[[Sequence[Pair]], Mapping[str, Any]],
) -> Table:
    """`table` with a column a task, and one for all of them."""
    columns = [*kinds(found), None] if len(kinds(found)) > 1 else kinds(found)
    rows: list[list[Cell]] = [[Cell(method.label)] for method in found]
    facts = []
    for kind in columns:
        groups = [method.pairs(kind) for method in found]
        for method, row, pairs, bold in zip(found, rows, groups, _best(found, groups), strict=True):
            row.append(cell(pairs, bold) if pairs else Cell("-"))
            if pairs:
                prompts = len({pair.prompt for pair in pairs})
                facts.append({"method": method.label, "task": kind or "all", "prompts": prompts} | dict(fact(pairs)))
    names = ("method", *(kind or "all" for kind in columns))
    return Table(table.name, table.title, names, tuple(map(tuple, rows)), tuple(facts), table.notes)


def _best(found: Sequence[Method], groups: Sequence[Sequence[Pair]]) -> list[bool]:
    """Which methods have the best speedup, or one that cannot be told from it."""
    speedups = [metrics.speedup(pairs) if pairs else -math.inf for pairs in groups]
    if len(found) < 2 or max(speedups) == -math.inf:
        return [False] * len(found)
    best = groups[int(np.argmax(speedups))]
    return [pairs is best or _ties(best, pairs) for pairs in groups]


def _ties(best: Sequence[Pair], other: Sequence[Pair]) -> bool:
    ratio = compare.speedups(best, other)
    return ratio is not None and ratio.same


def _speedup(pairs: Sequence[Pair], bold: bool) -> Cell:
    between = metrics.interval(pairs) if len({pair.prompt for pair in pairs}) >= metrics.FEW else None
    detail = ""
    if between is not None:
        detail = f"{between[0]:.2f} to {between[1]:.2f}" + ", no difference" * (between[0] <= 1 <= between[1])
    return Cell(f"{metrics.speedup(pairs):.2f}", detail, bold)


def _facts(method: Method) -> dict[str, Any]:
    """Every figure of a method; one that it has not is None."""
    pairs = method.pairs()
    ours, baseline = [pair.method for pair in pairs], [pair.baseline for pair in pairs]
    seconds = [sum(pair.method.duration_s for pair in run.pairs) for run in method.runs]

    def mean(figure: str) -> float | None:
        values = [run.summary[figure] for run in method.runs]
        return None if None in values else float(np.average(values, weights=seconds))

    return {
        "method": method.label,
        "runs": len(method.runs),
        "prompts": len({pair.prompt for pair in pairs}),
        "answers": len(pairs),
        "failed": sum(len(run.summary["failed"]) for run in method.runs),
        "tokens": sum(len(each.ids) for each in ours),
        "baseline_tokens_per_s": metrics.tokens_per_s(baseline),
        "tokens_per_s": metrics.tokens_per_s(ours),
        "speedup": metrics.speedup(pairs),
        **_edges(metrics.interval(pairs)),
        "speedup_geometric": metrics.geometric_mean(pairs),
        "tau": metrics.block_efficiency(ours),
        "alpha": metrics.acceptance_rate(each for decoding in ours for each in decoding.rounds),
        "accepted_run": metrics.accepted_run(ours),
        "draft_efficiency": metrics.draft_efficiency(ours),
        "ttft_ms": _median_ms(ours),
        "baseline_ttft_ms": _median_ms(baseline),
        "target_idle": mean("target_idle"),
        "draft_idle": mean("draft_idle"),
        "identity": _identity(method),
    }


def _about(method: Method) -> str:
    runs = [] if len(method.runs) == 1 else [f"{len(method.runs)} runs"]
    return ", ".join(runs + ([f"a peer: {method.peer}"] if method.peer else []))


def _identity(method: Method) -> str:
    if any(run.summary["identical"] is None for run in method.runs):
        return "not compared"
    ties = sum(run.summary["ties"] for run in method.runs)
    if method.peer:  # of a method the run would not stand
        parted = [one for run in method.runs for one in run.summary["parted"] if one["kind"] == "different"]
        return f"{len(parted)} parted, {ties} ties"
    return "true" + (f", {ties} ties" if ties else "")


def _edges(between: tuple[float, float] | None, prefix: str = "speedup_") -> dict[str, float | None]:
    low, high = between or (None, None)
    return {f"{prefix}low": low, f"{prefix}high": high}


def _number(value: float | None, digits: int, scale: float = 1) -> Cell:
    return Cell("-" if value is None else f"{scale * value:.{digits}f}")


def _median_ms(decodings: Sequence[Decoding]) -> float:
    return 1000 * float(np.median([each.ttft_s for each in decodings]))


def _size(tokens: int) -> int:
    """The power of two above."""
    return 1 << tokens.bit_length()


def _tex(text: str) -> str:
    """Text that LaTeX sets as it is."""
    signs = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return re.sub(r"[\\~^&%$#_{}]", lambda found: signs.get(found[0], "\\" + found[0]), text)


def _md(text: str) -> str:
    """Text within a cell of a Markdown table."""
    return re.sub(r"([\\|*`<])", r"\\\1", text)


templates = Environment(
    loader=PackageLoader("duoexp.report"),
    autoescape=lambda name: bool(name) and str(name).endswith(".html"),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
templates.filters |= {"tex": _tex, "md": _md}
