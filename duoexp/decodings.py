"""Decodings as JSON lines, and back: for a run that goes on where another process ended, and for a kept baseline.

All times are counted from the start of the decoding.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from duoexp.metrics import Decoding
from duoexp.rounds import Round


def side(decoding: Decoding, text: str) -> dict[str, Any]:
    """What a line of prompts.jsonl says of one side. `rest`: draft steps that no pass came after."""
    known = {span for each in decoding.rounds for span in each.spans}
    return {
        "tokens": len(decoding.ids),
        "ids": list(decoding.ids),
        "text": text,
        "reason": decoding.reason,
        "duration_s": decoding.duration_s,
        "ttft_s": decoding.ttft_s,
        "draft_tokens": decoding.draft_tokens,
        "cpu_j": decoding.cpu_j,
        "gpu_j": decoding.gpu_j,
        "rest": _moved([span for span in decoding.spans if span not in known], -decoding.start_s),
    }


def rows(decoding: Decoding) -> Iterator[dict[str, Any]]:
    """A line a target pass."""
    for number, each in enumerate(decoding.rounds):
        times = {"start_s": each.start_s - decoding.start_s, "spans": _moved(each.spans, -decoding.start_s)}
        yield {"round": number} | asdict(each) | times


def decoding(side: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Decoding:
    """The decoding that `side` and `rows` were made of, on a clock that began with it.

    Rows of an older version may lack a field of a round, which is then None.
    """
    rounds = tuple(_round(row) for row in rows)
    spans = [span for each in rounds for span in each.spans]
    return Decoding(
        ids=tuple(side["ids"]),
        reason=side["reason"],
        rounds=rounds,
        start_s=0.0,
        first_s=side["ttft_s"],
        end_s=side["duration_s"],
        spans=(*spans, *((start, end) for start, end in side.get("rest", ()))),
        cpu_j=side.get("cpu_j"),
        gpu_j=side.get("gpu_j"),
        draft_tokens=side.get("draft_tokens", sum(each.drafted for each in rounds)),
    )


def _round(row: Mapping[str, Any]) -> Round:
    spans = tuple((start, end) for start, end in row["spans"])
    return Round(
        **{each.name: row.get(each.name) for each in fields(Round)} | {"tokens": tuple(row["tokens"]), "spans": spans}
    )


def _moved(spans: Sequence[tuple[float, float]], by: float) -> list[list[float]]:
    return [[start + by, end + by] for start, end in spans]
