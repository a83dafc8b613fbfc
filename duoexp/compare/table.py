"""The comparison as figures, and as the table that a person sees."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from duoexp import metrics
from duoexp.identity import Comparison
from duoexp.metrics import Pair

Laps = Sequence[tuple[Pair, Comparison]]

FIGURES: dict[str, Callable[[Sequence[Pair]], Any]] = {
    "answers": len,
    "tokens": lambda pairs: sum(len(pair.method.ids) for pair in pairs),
    "tokens_per_s": lambda pairs: metrics.tokens_per_s([pair.method for pair in pairs]),
    "speedup": metrics.speedup,
    "interval": metrics.interval,
    "ttft_s": lambda pairs: metrics.median_p95([pair.method.ttft_s for pair in pairs]),
    "tau": lambda pairs: metrics.block_efficiency([pair.method for pair in pairs]),
    "alpha": lambda pairs: metrics.acceptance_rate([each for pair in pairs for each in pair.method.rounds]),
}
KINDS = ("equal", "tie", "different")


def summarize(
    entrants: Mapping[str, dict[str, Any]], laps: Mapping[str, Laps], absent: Mapping[str, str]
) -> dict[str, Any]:
    """A line of figures for each entrant; null for one that is absent, with the reason."""
    lines = []
    for name in dict.fromkeys([*entrants, *absent]):
        about, reason = entrants.get(name, {"draft": name}), absent.get(name)
        ran = laps.get(name, ()) if reason is None else ()
        pairs = [pair for pair, _ in ran]
        figures = {key: figure(pairs) if pairs else None for key, figure in FIGURES.items()}
        counts = {kind: sum(one.kind == kind for _, one in ran) if ran else None for kind in KINDS}
        reason = reason or (None if ran else "no prompt was decoded")
        lines.append({"name": name, **about, **figures, **counts, "reason": reason})
    prompts = {pair.prompt for ran in laps.values() for pair, _ in ran}
    return {"prompts": len(prompts), "entrants": lines, "fastest": _fastest(lines, laps)}


def _fastest(lines: Sequence[dict[str, Any]], laps: Mapping[str, Laps]) -> dict[str, Any] | None:
    """The fastest of this project's methods, and how it does over each other line: a paired ratio with its interval."""
    ours = [line for line in lines if line.get("peer") is None and line["draft"] != "none" and line["speedup"]]
    if not ours:
        return None
    best = max(ours, key=lambda line: line["speedup"])["name"]
    over = {}
    for line in lines:
        if line["speedup"] is None or line["name"] == best:
            continue
        pairs = [
            Pair(pair.prompt, pair.kind, theirs.method, pair.method)
            for (pair, _), (theirs, _) in zip(laps[best], laps[line["name"]], strict=True)
        ]
        over[line["name"]] = {"ratio": metrics.speedup(pairs), "interval": metrics.interval(pairs)}
    return {"name": best, "over": over}


def fault(summary: dict[str, Any]) -> str | None:
    """Why the result does not stand, if it does not. That a peer parts from the target is a result."""
    wrong = [line["name"] for line in summary["entrants"] if line["different"] and line.get("peer") is None]
    if wrong:
        return f"answers of {', '.join(wrong)} are not the target's own; see answers.jsonl"
    if not any(line["answers"] for line in summary["entrants"]):
        return "no prompt could be run"
    return None


def show(shown: Console, summary: dict[str, Any], folder: str) -> None:
    for note in summary["notes"]:
        shown.print(f"note: {note}", markup=False)
    shown.print(_table(summary))
    shown.print(
        "cores: target | draft; without a stroke, what runs takes turns on them. speedup: over `none`", markup=False
    )
    for line in summary["entrants"]:
        if line["reason"]:
            shown.print(f"{line['name']}: null, since {line['reason']}", markup=False)
        elif line.get("note") and not line["name"].endswith(", all cores"):
            shown.print(f"{line['name']}: {line['note']}", markup=False)
    for failure in summary["failed"]:
        shown.print(f"failed: {failure['prompt']}: {failure['reason']}", markup=False)
    shown.print(folder, markup=False, soft_wrap=True)


def _table(summary: dict[str, Any]) -> Table:
    fastest = summary["fastest"] or {"name": None, "over": {}}
    title = f"{summary['model']}, hardware={summary['hardware']['name']}, greedy; peers are marked *"
    found = Table(title=title, title_justify="left")
    over = f"{fastest['name']} over it" if fastest["name"] else "over it"
    heads = ("", "cores", "tok/s", "speedup", "TTFT ms", "tau", "eq/tie/part", over)
    for name in heads:
        found.add_column(name, justify="left" if name in ("", "cores") else "right", no_wrap=True)
    enough = summary["prompts"] >= metrics.FEW
    for line in summary["entrants"]:
        ratio = fastest["over"].get(line["name"])
        found.add_row(
            *_cells(line, enough), "-" if ratio is None else _ratio(ratio["ratio"], ratio["interval"], enough)
        )
    return found


def _cells(line: dict[str, Any], enough: bool) -> list[str]:
    name = line["draft"] + " *" * bool(line.get("peer"))
    if line["reason"]:
        return [name, line.get("cores") or "-", *["-"] * 5]
    return [
        name,
        line["cores"],
        f"{line['tokens_per_s']:.1f}",
        "1" if line["name"] == "none" else _ratio(line["speedup"], line["interval"], enough),
        f"{1000 * line['ttft_s']['median']:.0f}",
        f"{line['tau']:.2f}",
        "/".join(str(line[kind]) for kind in KINDS),
    ]


def _ratio(ratio: float, interval: Sequence[float] | None, enough: bool) -> str:
    return f"{ratio:.2f}" + (f" ({interval[0]:.2f}-{interval[1]:.2f})" if interval and enough else "")
