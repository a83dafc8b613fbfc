"""The live view: who wrote which token, whatever the text holds, and no other answer than without it."""

import io
from typing import Any

from conftest import engine, inline, prompt_of
from rich.console import Console

from duoexp.engine import Pieces, by_writer
from duoexp.live import DRAFTED, OWN, Answer, Watched
from duoexp.schedule import Round


def round_of(*tokens: int, accepted: int = 0, rejected: bool = False) -> Round:
    nothing: dict[str, Any] = {field: None for field in Round.__dataclass_fields__}
    facts = {"tokens": tokens, "accepted": accepted, "rejected": rejected, "verify_s": 0.1}
    return Round(**nothing | facts)


class Spelled:
    """A tokenizer whose ids are bytes."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")


def answer(console: Console) -> Answer:
    return Answer("vanilla", Pieces(Spelled()), console)  # type: ignore[arg-type]


def test_ids_are_spelled_as_they_come_and_a_character_comes_whole() -> None:
    pieces = Pieces(Spelled())  # type: ignore[arg-type]
    assert [pieces.add(byte) for byte in "aé€b".encode()] == ["a", "", "é", "", "", "€", "b"]


def test_neighbours_of_one_writer_are_one_piece() -> None:
    pieces = [("", True), ("a", False), ("b", False), ("c", True), ("", False), ("d", True)]
    assert by_writer(pieces) == [("ab", False), ("cd", True)]


def test_drafted_tokens_and_the_targets_own_look_different() -> None:
    seen = answer(Console(force_terminal=True))
    seen.add(round_of(*b"a"))
    seen.add(round_of(*b"bcd", accepted=2, rejected=True))
    assert [(seen.text().plain[span.start : span.end], span.style) for span in seen.text().spans] == [
        ("a", OWN),
        ("bc", DRAFTED),
        ("d", OWN),
    ]
    assert "4 tokens" in seen.rates() and "50% drafted, tau 2.00, alpha 0.67" in seen.rates()


def test_without_colours_drafted_tokens_stand_in_brackets_and_no_escape_reaches_the_screen() -> None:
    seen = answer(Console(file=io.StringIO(), force_terminal=False))
    seen.add(round_of(*b"a"))
    seen.add(round_of(*b"\x1b[31mb", accepted=5))
    assert seen.text().plain == "a⟦\N{REPLACEMENT CHARACTER}[31m⟧b"


def test_a_long_answer_shows_its_end_until_it_is_finished() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=20, height=10)
    seen = answer(console)
    seen.add(round_of(*b"one\n" * 30, *b"end"))
    console.print(seen.picture())
    assert "end" in console.file.getvalue() and console.file.getvalue().count("one") < 10  # type: ignore[attr-defined]
    seen.finished = True
    console.print(seen.picture())
    assert console.file.getvalue().count("one") >= 30  # type: ignore[attr-defined]


def test_watching_changes_no_answer() -> None:
    screen, method, prompt = io.StringIO(), inline("draft=dynamic"), prompt_of(12)
    plain = engine(limit=24)
    for terminal in (True, False):
        console = Console(file=screen, force_terminal=terminal, width=60)
        watched = Watched(**vars(plain), console=console)
        assert watched.decode(method, prompt).ids == plain.decode(method, prompt).ids
    assert "24 tokens" in screen.getvalue()
