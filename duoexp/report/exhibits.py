"""What a tracker shows of one run, besides its figures."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duoexp import metrics
from duoexp.report import runs, style
from duoexp.report.tables import templates
from duoexp.report.texts import STYLE, Text
from duoexp.report.timeline import timeline

TEXTS = 20  # answers in colours; the table has all


@dataclass(frozen=True)
class Exhibits:
    """`acceptance`: position, alpha, how many were verified there. `answers`: rows of a table, of the same keys."""

    acceptance: tuple[tuple[int, float, int], ...]
    timeline: bytes | None  # PNG
    answers: tuple[dict[str, Any], ...]
    html: str


def exhibits(folder: Path) -> Exhibits:
    """Of the run of a folder, however far it came."""
    run = runs.read(folder)
    method = run.config["draft"]["name"]
    by_position = metrics.tests_by_position(each for pair in run.pairs for each in pair.method.rounds)
    drawn = style.image(timeline({method: run.pairs}), "png") if by_position else None
    texts = [Text(method, answer) for answer in run.answers]
    html = templates.get_template("texts.html").render(
        texts=[text for text in texts if text.pieces][:TEXTS], style=STYLE
    )
    return Exhibits(
        tuple((position, kept / tested, tested) for position, (kept, tested) in by_position.items()),
        drawn,
        tuple(_row(text) for text in texts),
        html,
    )


def _row(text: Text) -> dict[str, Any]:
    answer, pair = text.answer, text.answer.pair
    return {
        "prompt": pair.prompt,
        "turn": answer.turn,
        "task": pair.kind,
        "tokens": text.tokens,
        "drafted": text.drafted,
        "speedup": metrics.speedup([pair]),
        "tau": metrics.block_efficiency([pair.method]),
        "alpha": metrics.acceptance_rate(pair.method.rounds),
        "ttft_s": pair.method.ttft_s,
        "answer": text.marked,
    }
