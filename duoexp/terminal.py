"""What a person sees of one run: its progress, and its table."""

from collections import defaultdict
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from duoexp import metrics
from duoexp.metrics import Pair
from duoexp.summary import Results


def console() -> Console:
    """Plain text when it is not a terminal, and wide enough that no table breaks."""
    shown = Console(highlight=False)
    return shown if shown.is_terminal else Console(highlight=False, width=120, no_color=True)


class Progress:
    """Tokens per second and speedup so far: a bar on a terminal, a line a prompt elsewhere, and beside a live view."""

    def __init__(self, shown: Console, prompts: int, bar: bool = True) -> None:
        self.shown, self.prompts, self.done = shown, prompts, 0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Bar(*columns, console=shown, transient=True) if bar and shown.is_terminal else None
        self.task = self.bar.add_task("decoding", total=prompts) if self.bar else None

    def __enter__(self) -> "Progress":
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.bar:
            self.bar.stop()

    def update(self, kind: str, pairs: Sequence[Pair], done: int) -> None:
        """After a turn of a prompt of this kind; `done` prompts are finished."""
        said = kind
        if pairs:
            rate = metrics.tokens_per_s([pair.method for pair in pairs])
            said = f"{kind}: {rate:.1f} tokens/s, speedup {metrics.speedup(pairs):.2f} so far"
        if self.bar and self.task is not None:
            self.bar.update(self.task, completed=done, description=said)
        else:
            self.shown.print(f"[{done}/{self.prompts}] {said}", markup=False)


# What a line of the table says; the short ones are all that fits into a narrow terminal.
COLUMNS = (
    "task",
    "answers",
    "tokens",
    "AR tok/s",
    "tok/s",
    "speedup",
    "95% interval",
    "TTFT ms",
    "AR TTFT",
    "tau",
    "alpha",
)
SHORT = ("task", "AR tok/s", "tok/s", "speedup", "95% interval", "tau", "alpha")
WIDE = 120  # characters that all columns need


def table(summary: dict[str, Any], pairs: Sequence[Pair], width: int) -> Table:
    """A line a task, then all of it."""
    peer = f" (a peer: {summary['peer']})" if summary["peer"] else ""
    title = f"{summary['model']}, draft={summary['method']}{peer}, hardware={summary['hardware']['name']}"
    found = Table(title=title, title_justify="left")
    columns = COLUMNS if width >= WIDE else SHORT
    for name in columns:
        found.add_column(name, justify="left" if name == "task" else "right", no_wrap=True)
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[pair.kind].append(pair)
    for kind, group in groups.items():
        cells = _cells(kind, group)
        found.add_row(*(cells[name] for name in columns))
    found.add_section()
    cells = _cells("all", pairs)
    found.add_row(*(cells[name] for name in columns), style="bold")
    return found


def _cells(name: str, pairs: Sequence[Pair]) -> dict[str, str]:
    ours, baseline = [pair.method for pair in pairs], [pair.baseline for pair in pairs]
    between = metrics.interval(pairs) if len({pair.prompt for pair in pairs}) >= metrics.FEW else None
    alpha = metrics.acceptance_rate([each for decoding in ours for each in decoding.rounds])
    return {
        "task": name,
        "answers": str(len(pairs)),
        "tokens": str(sum(len(each.ids) for each in ours)),
        "AR tok/s": f"{metrics.tokens_per_s(baseline):.1f}",
        "tok/s": f"{metrics.tokens_per_s(ours):.1f}",
        "speedup": metrics.in_words(metrics.speedup(pairs), between),
        "95% interval": "-" if between is None else f"{between[0]:.2f} to {between[1]:.2f}",
        "TTFT ms": _median_ms([each.ttft_s for each in ours]),
        "AR TTFT": _median_ms([each.ttft_s for each in baseline]),
        "tau": f"{metrics.block_efficiency(ours):.2f}",
        "alpha": "-" if alpha is None else f"{alpha:.2f}",
    }


def _median_ms(seconds: Sequence[float]) -> str:
    found = metrics.median_p95(seconds)
    return "-" if found is None else f"{1000 * found['median']:.0f}"


def verdict(summary: dict[str, Any]) -> str:
    """On identity, in a sentence."""
    if summary["identical"] is None:
        return f"identity: not compared ({summary['reasons']['identical']})"
    parted = [one for one in summary["parted"] if one["kind"] == ("tie" if summary["identical"] else "different")]
    places = "; ".join(
        f"{one['prompt']} turn {one['turn'] + 1} token {one['position'] + 1}"
        + (f", gap {one['gap']:.2g} where rounding reaches {one['tolerance']:.2g}" if one["gap"] is not None else "")
        for one in parted
    )
    if not summary["identical"] and summary["peer"]:
        return f"identity: false, the peer parted from the target in {len(parted)} of {summary['answers']} ({places})"
    if not summary["identical"]:
        return f"identity: FAILED, {len(parted)} of {summary['answers']} answers are not the target's own ({places})"
    equal = summary["answers"] - summary["ties"]
    ties = f", {summary['ties']} parted at a tie ({places})" if parted else ""
    return f"identity: true, {equal} of {summary['answers']} answers equal the target's own token for token{ties}"


def show(shown: Console, summary: dict[str, Any], results: Results, folder: str, answers: bool = True) -> None:
    """answers: whether those to prompts of the user's own are still to be shown."""
    pairs = results.pairs()
    for answer in results.answers if answers else ():
        if answer.prompt.kind == "prompt":  # a text of the user's own, who will want to read the answer
            shown.print(answer.text, markup=False)
    for disturbance in summary["disturbed"]:
        shown.print(f"disturbed: {disturbance}, so the times are in doubt", markup=False)
    if summary["reused_baselines"]:
        shown.print(f"note: {summary['reused_baselines']} of the baselines are those of earlier runs", markup=False)
    for note in summary["notes"]:
        shown.print(f"note: {note}", markup=False)
    if pairs:
        shown.print(table(summary, pairs, shown.width))
        shown.print(_where_time_went(summary), markup=False)
        if slower := why_slower(summary):
            shown.print(slower, markup=False)
    for failure in summary["failed"]:
        shown.print(f"failed: {failure['prompt']}: {failure['reason']}", markup=False)
    if summary["draft_failure"]:
        failure = summary["draft_failure"]
        shown.print(
            f"the drafter failed at {failure['prompt']}, the rest ran without it: {failure['reason']}", markup=False
        )
    shown.print(verdict(summary), markup=False)
    shown.print(folder, markup=False, soft_wrap=True)


def _where_time_went(summary: dict[str, Any]) -> str:
    if summary["draft_s"] is None or summary["target_s"] is None:
        return "nothing was drafted"
    step, one = summary["draft_s"]["median"], summary["target_s"]["median"]
    given = summary["budget"] or {}  # none where an earlier process had decoded everything
    budget = " ".join(str(value) for value in given.values() if value is not None) or "not kept"
    return (
        f"budget: {budget}; draft step {1000 * step:.1f} ms, target pass {1000 * one:.1f} ms (c = {step / one:.2f}); "
        f"the target waited {100 * summary['target_idle']:.0f}% of the time, "
        f"the drafter {100 * summary['draft_idle']:.0f}%"
    )


def why_slower(summary: dict[str, Any]) -> str | None:
    """In a sentence, from measured costs; None unless drafts made it slower beyond doubt."""
    cost, alpha, step = summary["round_cost"], summary["alpha"], summary["draft_s"]
    most = summary["speedup_high"] if summary["prompts"] >= metrics.FEW else summary["speedup"]
    if most >= 1 or None in (cost, alpha, step):
        return None
    return (
        f"slower: a round brings {cost['tokens']:.2f} tokens (alpha {alpha:.2f}) and takes as long as "
        f"{cost['verify'] + cost['wait']:.2f} target passes over one, {cost['verify']:.2f} to verify and "
        f"{cost['wait']:.2f} to wait for the draft, at {step['median'] / summary['target_s']['median']:.2f} a step; "
        f"that predicts a speedup of {cost['predicted_speedup']:.2f}"
    )
