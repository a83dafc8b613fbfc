"""Answers with the writer of each token told: the draft model, or the target."""

from dataclasses import dataclass

from duoexp.engine import by_writer
from duoexp.report.runs import Answer

# Shaded against underlined, so that it can be told without colours.
STYLE = """
.text { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #ddd; padding: .5rem .8rem; margin: .3rem 0 }
.drafted { background: #cfe6f7 } .own { border-bottom: 2px solid #D55E00 }
"""
MARKS = "⟦{}⟧"


@dataclass(frozen=True)
class Text:
    """An answer under the name of its method."""

    method: str
    answer: Answer

    @property
    def drafted(self) -> int:
        """How many of its tokens the draft model wrote."""
        return sum(self.answer.drafted)

    @property
    def tokens(self) -> int:
        return len(self.answer.drafted)

    @property
    def pieces(self) -> list[tuple[str, bool]]:
        """Text, and whether the draft model wrote it."""
        return by_writer(zip(self.answer.pieces, self.answer.drafted, strict=True))

    @property
    def marked(self) -> str:
        """Plain text with the accepted draft tokens in brackets; as it is where the pieces are not on record."""
        found = "".join(MARKS.format(piece) if drafted else piece for piece, drafted in self.pieces)
        return found or self.answer.text
