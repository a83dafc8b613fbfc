"""`view=live`: an answer as it comes, with the writer of each token told, and the running rates."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from duoexp import metrics
from duoexp.engine import Engine, Method, Pieces, by_writer
from duoexp.metrics import Decoding
from duoexp.schedule import Round

DRAFTED, OWN = "cyan", "bold yellow"  # told apart without colours too
MARKS = "⟦{}⟧"  # around what was drafted, where there are no colours
AROUND = 6  # lines of a screen that the answer has not: its frame, the rates, and what stands above


@dataclass(frozen=True)
class Watched(Engine):
    """An engine whose answers are shown while they are decoded. The drawing takes some of the time that is measured."""

    console: Console = field(default_factory=Console)

    def decode(self, method: Method, prompt: Sequence[int], limit: int | None = None) -> Decoding:
        answer = Answer(method.name, Pieces(self.tokenizer), self.console)
        rounds = self.rounds(method, prompt, limit)
        screen = Live(get_renderable=answer.picture, console=self.console, refresh_per_second=8)
        with screen if self.console.is_terminal else nullcontext():
            while True:
                try:
                    answer.add(next(rounds))
                except StopIteration as end:
                    answer.finished, decoding = True, end.value
                    break
        if not self.console.is_terminal:  # nothing can be drawn over there
            self.console.print(answer.picture())
        found: Decoding = decoding
        return found


class Answer:
    """An answer so far. `add` is called between two passes, `picture` by the thread that draws."""

    def __init__(self, name: str, pieces: Pieces, console: Console) -> None:
        self.name, self.pieces, self.console = name, pieces, console
        self.parts: list[tuple[str, bool]] = []  # a text, and whether it was drafted
        self.rounds: list[Round] = []
        self.finished = False
        self.start_s = self.end_s = time.perf_counter()

    def add(self, each: Round) -> None:
        self.end_s = time.perf_counter()
        for place, token in enumerate(each.tokens):
            self.parts.append((self.pieces.add(token), place < each.accepted))
        self.rounds.append(each)

    def picture(self) -> Group:
        """The end of it that the screen has room for, until it is finished."""
        lines = self.text().wrap(self.console, max(1, self.console.width - 4))
        room = max(1, self.console.height - AROUND)
        shown = lines if self.finished else lines[-room:]
        return Group(Panel(Text("\n").join(shown), title=self.name, title_align="left"), Text(self.rates()))

    def text(self) -> Text:
        coloured = self.console.is_terminal
        found = Text()
        for part, drafted in by_writer(list(self.parts)):
            said = "".join(
                sign if sign.isprintable() or sign in "\n\t" else "\N{REPLACEMENT CHARACTER}" for sign in part
            )
            if coloured:
                found.append(said, DRAFTED if drafted else OWN)
            else:
                found.append(MARKS.format(said) if drafted else said)
        return found

    def rates(self) -> str:
        rounds = list(self.rounds)
        tokens = sum(len(each.tokens) for each in rounds)
        if not tokens:
            return "reading the prompt"
        seconds, first_s = self.end_s - self.start_s, rounds[0].verify_s
        said = [f"{tokens} tokens", f"{tokens / seconds:.1f} tokens/s", f"first after {1000 * first_s:.0f} ms"]
        alpha = metrics.acceptance_rate(rounds)
        if alpha is not None:
            drafted = sum(each.accepted for each in rounds)
            said += [f"{100 * drafted / tokens:.0f}% drafted", f"tau {tokens / len(rounds):.2f}", f"alpha {alpha:.2f}"]
        return ", ".join(said)
