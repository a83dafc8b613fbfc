"""The report: one page that needs nothing beside it, and every table and picture as a file of its own."""

import base64
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from duoexp.config import InputError
from duoexp.report import figures, runs, style, tables
from duoexp.report.figures import Picture
from duoexp.report.methods import Method, machine, methods
from duoexp.report.runs import Answer, LeftOut, Run
from duoexp.report.tables import Table, templates
from duoexp.report.texts import STYLE, Text

PAGE = "report.html"


def write(folders: Sequence[Path], out: Path, against: Sequence[Path] = ()) -> Path:
    """The report over all runs at or below `folders`, into `out`; returns its page.

    against: the runs of before, which a table of ratios compares with.
    Raises InputError where there is no run, or `out` cannot be written.
    """
    found, left_out = runs.collect(folders)
    if not found:
        raise InputError(f"no run can be reported: {left_out[0].folder}: {left_out[0].reason}")
    before, lost = runs.collect(against) if against else ([], [])
    named = methods(found)
    made = tables.tables(named)
    if before:
        made.insert(1, tables.comparison(methods(before), named))
    drawn = figures.pictures(named)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for table in made:
            _write_table(table, out)
        images = [(picture, _write_picture(picture, out)) for picture in drawn]
        page = out / PAGE
        page.write_text(_page(named, found, [*left_out, *lost], made, images), encoding="utf-8")
    except OSError as error:
        raise InputError(f"the report cannot be written to {out} ({error.strerror}); give another --out") from error
    return page


def _write_table(table: Table, out: Path) -> None:
    (out / f"{table.name}.csv").write_text(table.csv, encoding="utf-8")
    for form in ("md", "tex"):
        (out / f"{table.name}.{form}").write_text(table.render(f"table.{form}"), encoding="utf-8")


def _write_picture(picture: Picture, out: Path) -> str:
    """The address of the picture within the page: its own bytes."""
    (out / f"{picture.name}.png").write_bytes(style.image(picture.figure, "png"))
    drawing = style.image(picture.figure, "svg")
    (out / f"{picture.name}.svg").write_bytes(drawing)
    return "data:image/svg+xml;base64," + base64.b64encode(drawing).decode()


def _page(
    named: Sequence[Method],
    found: Sequence[Run],
    left_out: Sequence[LeftOut],
    made: Sequence[Table],
    images: Sequence[tuple[Picture, str]],
) -> str:
    values: dict[str, Any] = {
        "title": ", ".join(dict.fromkeys(run.config["name"] for run in found)),
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "runs": found,
        "left_out": left_out,
        "machines": list(dict.fromkeys(machine(run) for run in found)),
        "warnings": warnings(named),
        "notes": list(dict.fromkeys(note for run in found for note in run.summary["notes"])),
        "identity": _identity(found),
        "tables": made,
        "images": images,
        "texts": list(texts(named)),
        "style": STYLE,
    }
    return templates.get_template("page.html").render(values)


def warnings(named: Sequence[Method]) -> list[str]:
    """What makes figures that stand side by side no equals."""
    said = []
    everything = [run for method in named for run in method.runs]
    if len({machine(run) for run in everything}) > 1:
        said.append("the runs come from different machines: compare speedups, not tokens per second")
    commits = {(run.machine.get("git") or {}).get("commit") for run in everything}
    if len(commits) > 1:
        said.append(f"the runs come from {len(commits)} different versions of the code")
    asked = [frozenset(pair.prompt for pair in method.pairs()) for method in named]
    if len(set(asked)) > 1:
        common = len(frozenset.intersection(*asked))
        said.append(f"the methods did not run the same prompts ({common} are common to all), so 'all' is not the same")
    if len(named) > figures.MOST:
        said.append(f"the pictures show the first {figures.MOST} of {len(named)} methods, the tables all of them")
    if repeated := [method.label for method in named if _repeated(method)]:
        said.append(f"some prompts were measured more than once, and all of it counts: {'; '.join(repeated)}")
    for run in everything:
        said += [f"{run.folder.name}, {run.summary['method']}: {each}" for each in run.summary.get("disturbed", ())]
    failed = sum(len(run.summary["failed"]) for run in everything)
    if failed:
        said.append(f"{failed} prompts failed and count nowhere")
    if lost := [run.folder.name for run in everything if run.summary.get("draft_failure")]:
        said.append(f"the drafter died on the way, and the rest ran without it: {', '.join(lost)}")
    return said


def _repeated(method: Method) -> bool:
    turns = [(answer.pair.prompt, answer.turn) for answer in method.answers]
    return len(set(turns)) < len(turns)


def _identity(found: Sequence[Run]) -> str:
    compared = [run for run in found if run.summary["identical"] is not None]
    if not compared:
        return "No answer was compared with the target's own."
    answers, ties = (sum(run.summary[key] for run in compared) for key in ("answers", "ties"))
    equal = f"{answers - ties} of {answers} answers equal the target's own, token for token"
    return equal + (f"; {ties} part where two tokens lie closer together than rounding." if ties else ".")


TEXTS = 4  # answers of each method that the page shows, each to a prompt of another kind


def texts(named: Sequence[Method]) -> Iterator[Text]:
    """The first answer to each kind of prompt, of each method that drafts, as far as the pieces are on record."""
    for method in named:
        first: dict[str, Answer] = {}
        for answer in method.answers:
            if answer.pieces and not method.alone:
                first.setdefault(answer.pair.kind, answer)
        for answer in list(first.values())[:TEXTS]:
            yield Text(method.label, answer)
