"""One prompt, one method, one answer: the target and what all methods share."""

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from duoexp import templates
from duoexp.budget import Budget
from duoexp.config import InputError, SamplingConfig
from duoexp.lm.causal_lm import CausalLM
from duoexp.metrics import Decoding
from duoexp.sampling import Sampler
from duoexp.schedule import Round, Schedule, Stop
from duoexp.tasks import Prompt
from duoexp.verify import Rule
from duoexp.worker import Worker


@dataclass(frozen=True)
class Method:
    """How to decode: all that autoregressive decoding and the method under test differ in."""

    schedule: Schedule
    worker: Worker
    rule: Rule
    budget: Budget
    name: str = ""


class Pieces:
    """Spells ids one by one, as they come."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._before: list[int] = []  # decoded with what follows, since some ids change the spelling of the one before
        self._open: list[int] = []  # within a character

    def add(self, token: int) -> str:
        """The text that it adds; "" where it ends within a character, which the id that completes it adds."""
        self._open.append(token)
        before, after = self._text(self._before), self._text(self._before + self._open)
        if after.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._before, self._open = self._open, []
        return after[len(before) :]

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def by_writer(pieces: Iterable[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Text, and whether the draft model wrote it: neighbours of one writer become one piece.

    A character that takes several ids is its last one's.
    """
    found: list[tuple[str, bool]] = []
    for piece, drafted in pieces:
        if found and found[-1][1] == drafted:
            found[-1] = (found[-1][0] + piece, drafted)
        elif piece:
            found.append((piece, drafted))
    return found


@dataclass(frozen=True)
class Engine:
    """`eos`: the ids that end an answer. `template`: of `config.TEMPLATES`."""

    target: CausalLM
    tokenizer: PreTrainedTokenizerBase
    template: str
    settings: SamplingConfig
    sampler: Sampler
    eos: frozenset[int]

    def encode(self, prompt: Prompt, answers: Sequence[str]) -> list[int]:
        """Ids of the next turn. Raises InputError for a prompt that leaves no room for an answer."""
        ids = templates.encode(self.tokenizer, self.template, prompt, answers)
        if len(ids) >= self.target.context_size:
            raise InputError(
                f"prompt {prompt.id} has {len(ids)} tokens, but the target's context holds {self.target.context_size}; "
                "shorten it"
            )
        return ids

    def decode(self, method: Method, prompt: Sequence[int], limit: int | None = None) -> Decoding:
        """The answer to `prompt`, of at most `limit` tokens, from an empty cache."""
        rounds = self.rounds(method, prompt, limit)
        while True:
            try:
                next(rounds)
            except StopIteration as end:
                decoding: Decoding = end.value
                return decoding

    def rounds(
        self, method: Method, prompt: Sequence[int], limit: int | None = None
    ) -> Generator[Round, None, Decoding]:
        """The same, round by round; the answer's time goes on while a round is looked at."""
        self.target.clear()
        room = self.target.context_size - len(prompt)
        stop = Stop(self.eos, min(limit or self.settings.max_new_tokens, room), self._ends())
        rounds, start_s = [], time.perf_counter()
        for each in method.schedule(self.target, method.worker, method.rule, self.sampler, prompt, method.budget, stop):
            rounds.append(each)
            method.budget.observe(each)
            yield each
        end_s = time.perf_counter()
        rest = method.worker.rest()  # idle from here on, so that it takes nothing from what is timed next
        return Decoding(
            ids=tuple(token for each in rounds for token in each.tokens),
            reason=str(stop.reason),
            rounds=tuple(rounds),
            start_s=start_s,
            first_s=rounds[0].start_s + rounds[0].verify_s,
            end_s=end_s,
            spans=(*(span for each in rounds for span in each.spans), *rest.spans),
            draft_tokens=sum(each.drafted for each in rounds) + rest.tokens,
        )

    def text(self, ids: Sequence[int]) -> str:
        """Without special tokens, and without what begins at a stop string."""
        text = str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
        found = [text.find(stop) for stop in self.settings.stop if stop in text]
        return text[: min(found)] if found else text

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each id adds."""
        pieces = Pieces(self.tokenizer)
        return [pieces.add(token) for token in ids]

    def _ends(self) -> Callable[[list[int]], bool] | None:
        if not self.settings.stop:
            return None
        # Each token spells at least a byte, or nothing: a few more for those, and for a character cut in two.
        reach = max(len(stop.encode()) for stop in self.settings.stop) + 8
        return lambda ids: any(stop in self.tokenizer.decode(ids[-reach:]) for stop in self.settings.stop)
