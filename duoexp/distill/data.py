"""The text to learn from: tokens of the target's own chats, or of a file."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, PreTrainedTokenizerBase

from duoexp import templates
from duoexp.config import InputError
from duoexp.distill import files
from duoexp.distill.settings import DataConfig
from duoexp.templates import Prompt

MARK = "\N{OBJECT REPLACEMENT CHARACTER}"  # stands for the user's words in a template
LONGEST = 1024  # tokens of a text; what is beyond is cut off
FORM = (
    '.npz with `tokens` and `lengths`; .jsonl with a line {"messages": [...]}, {"text": ...}, or {"prompt": ...} '
    "for the target to answer; or .txt with an empty line between texts"
)


@dataclass(frozen=True)
class Texts:
    """All texts one after the other. `starts`: where in each the answer begins, 0 where all of it counts."""

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    starts: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, text: int) -> NDArray[np.int32]:
        end = int(self._ends[text])
        return self.tokens[end - int(self.lengths[text]) : end]

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum(self.lengths, dtype=np.int64)

    @property
    def arrays(self) -> files.Arrays:
        return {"tokens": self.tokens, "lengths": self.lengths, "starts": self.starts}

    @classmethod
    def of(cls, rows: Sequence[tuple[Sequence[int], int]]) -> "Texts":
        """From (tokens, start) pairs, each once."""
        once = {tuple(tokens): start for tokens, start in rows if len(tokens) > start + 1}
        flat = [token for tokens in once for token in tokens]
        return cls(
            *(np.array(each, dtype=np.int32) for each in (flat, [len(row) for row in once], list(once.values())))
        )


@dataclass(frozen=True)
class Frame:
    """The ids that the template puts before the user's words, and between them and the answer."""

    header: list[int]
    middle: list[int]
    template: str = "auto"

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, template: str) -> "Frame":
        """Of the chat template; of a base model, its BOS and nothing."""
        text = templates.render(tokenizer, template, Prompt("", "prompt", (MARK,), None), ())
        before, _, after = text.partition(MARK)
        header = tokenizer.encode(before, add_special_tokens=False) if before else []
        bos = templates.own_bos(tokenizer)
        header = header if bos is None or header[:1] == [bos] else [bos, *header]
        return cls(header, tokenizer.encode(after, add_special_tokens=False) if after else [], template)


class Writer:
    """The target at its own words."""

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, frame: Frame, eos: frozenset[int],
        settings: DataConfig, seed: int,
    ) -> None:  # fmt: skip
        self.model, self.tokenizer, self.frame, self.eos = model, tokenizer, frame, eos
        self.settings, self.seed = settings, seed

    def write(self, number: int) -> Texts:
        """The batch of this number: questions sampled behind a few words, and their answers."""
        words = self.settings.beginnings[number % len(self.settings.beginnings)]
        begun = [*self.frame.header, *(self.tokenizer.encode(words, add_special_tokens=False) if words else [])]
        if not begun:
            raise InputError(
                f"data.beginnings holds {words!r}, and the target has neither a chat template nor a BOS to begin with; "
                "give some words"
            )
        torch.manual_seed(self.seed + 2 * number)
        asked = self._continued([begun] * self.settings.batch, self.settings.question_tokens, 1.0)
        return self.answer([self._asked(begun, row) for row in asked], number)

    def answer(self, prompts: Sequence[list[int]], number: int) -> Texts:
        """Greedy in a share of the numbers, which all others are spread between."""
        share = self.settings.greedy
        greedy = int((number + 1) * share) > int(number * share)
        torch.manual_seed(self.seed + 2 * number + 1)
        answers = self._continued(prompts, self.settings.answer_tokens, None if greedy else self.settings.temperature)
        return Texts.of([(prompt + answer, len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)])

    def _asked(self, begun: list[int], written: list[int]) -> list[int]:
        asked = begun + [token for token in written if token not in self.eos]
        return asked + self.frame.middle

    @torch.inference_mode()
    def _continued(self, rows: Sequence[list[int]], tokens: int, temperature: float | None) -> list[list[int]]:
        """Each up to its first EOS, included; greedy without a temperature, else from the likeliest 0.95."""
        width, pad = max(len(row) for row in rows), min(self.eos, default=0)
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=self.model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self.model.device)
        how = {} if temperature is None else {"do_sample": True, "temperature": temperature, "top_p": 0.95, "top_k": 0}
        config = GenerationConfig(max_new_tokens=tokens, eos_token_id=sorted(self.eos) or None, pad_token_id=pad, **how)
        output = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        return [self._ended(row[width:].tolist()) for row in output]

    def _ended(self, row: list[int]) -> list[int]:
        end = next((i for i, token in enumerate(row) if token in self.eos), len(row) - 1)
        return row[: end + 1]


def make(
    folder: Path, settings: DataConfig, writer: Writer, longest: int, progress: Callable[..., Iterator[int]]
) -> Texts:
    """The texts of the run, written once, a batch a file, into `folder`."""
    whole = folder / "texts.npz"
    if not whole.exists():
        longest = min(longest, LONGEST)
        prompts: list[list[int]] | None = None
        known = Texts.of([])
        if settings.path is not None:
            known, prompts = read(Path(settings.path).expanduser(), writer, longest)
        wanted = len(prompts) if prompts is not None else settings.chats
        parts = [known]
        for number in progress("data", range(-(-wanted // settings.batch))):
            part = folder / "texts" / f"{number:05d}.npz"
            if not part.exists():
                chosen = prompts and prompts[number * settings.batch : (number + 1) * settings.batch]
                written = writer.answer(chosen, number) if chosen else writer.write(number)
                files.write_arrays(part, written.arrays)
            parts.append(Texts(**files.read_arrays(part)))
        texts = Texts.of([(text[:longest].tolist(), start) for text, start in _rows(parts)])
        if len(texts) < 4:
            raise InputError(
                f"{settings.path or 'the target'} gave {len(texts)} texts, too few to learn from; give more"
            )
        files.write_arrays(whole, texts.arrays)
    return Texts(**files.read_arrays(whole))


def _rows(parts: Sequence[Texts]) -> Iterator[tuple[NDArray[np.int32], int]]:
    for part in parts:
        yield from ((part[i], int(part.starts[i])) for i in range(len(part)))


def read(path: Path, writer: Writer, longest: int) -> tuple[Texts, list[list[int]]]:
    """The texts of a file, and the prompts in it that have no answer yet. Raises InputError on another form."""
    try:
        if path.suffix == ".npz":
            return _arrays(path, writer), []
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"data.path={path} is not UTF-8 (byte {error.start}); convert it") from None
    except OSError as error:
        raise InputError(f"data.path={path} cannot be read ({error.strerror}); give {FORM}") from None
    rows: list[tuple[list[int], int]] = []
    prompts: list[list[int]] = []
    if path.suffix == ".txt":
        rows = [(_plain(writer, text, longest), 0) for text in content.split("\n\n") if text.strip()]
    elif path.suffix == ".jsonl":
        for number, line in enumerate(content.split("\n"), start=1):
            if line.strip():
                _line(f"data.path={path}, line {number}", line, writer, longest, rows, prompts)
    else:
        raise InputError(f"data.path={path} ends in neither .npz, .jsonl nor .txt; give {FORM}")
    if not rows and not prompts:
        raise InputError(f"data.path={path} is empty; give {FORM}")
    return Texts.of(rows), prompts


def _line(
    where: str, line: str, writer: Writer, longest: int, rows: list[tuple[list[int], int]], prompts: list[list[int]]
) -> None:
    try:
        fields: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON ({error.msg}, column {error.colno}); give {FORM}") from None
    match fields:
        case {"messages": [*messages]} if all(_is_message(each) for each in messages) and len(messages) > 1:
            if not writer.tokenizer.chat_template:
                raise InputError(f"{where} is a chat, and the target has no chat template; give its text")
            text, asked = (
                writer.tokenizer.encode(
                    writer.tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=ask),
                    add_special_tokens=False,
                )
                for part, ask in ((messages, False), (messages[:-1], True))
            )
            rows.append((text[:longest], min(len(asked), longest)))
        case {"text": str(text)} if text.strip():
            rows.append((_plain(writer, text, longest), 0))
        case {"prompt": str(text)} if text.strip():
            ids = templates.encode(writer.tokenizer, writer.frame.template, Prompt(where, "prompt", (text,), None))
            prompts.append(ids[-max(1, longest - writer.settings.answer_tokens) :])
        case _:
            raise InputError(f"{where} holds neither messages, a text nor a prompt; give {FORM}")


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
    )


def _plain(writer: Writer, text: str, longest: int) -> list[int]:
    return list(writer.tokenizer.encode(text.strip()))[:longest]


def _arrays(path: Path, writer: Writer) -> Texts:
    try:
        arrays = files.read_arrays(path)
    except ValueError as error:
        raise InputError(f"data.path={path} is no .npz of plain arrays ({error}); give {FORM}") from None
    tokens, lengths = (arrays.get(name, np.array([], np.int32)).astype(np.int32) for name in ("tokens", "lengths"))
    if not len(lengths) or lengths.sum() != len(tokens) or lengths.min() < 1:
        raise InputError(f"data.path={path} lacks `tokens` and `lengths` that agree; give {FORM}")
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < len(writer.tokenizer):
        raise InputError(
            f"data.path={path} holds ids beyond the target's {len(writer.tokenizer)} tokens; encode it anew"
        )
    known = Texts(tokens, lengths, np.zeros_like(lengths))
    starts = arrays.get("starts", np.array([_answer(known[i], writer.frame) for i in range(len(known))]))
    return Texts.of([(known[i].tolist(), int(starts[i])) for i in range(len(known))])


def _answer(tokens: NDArray[np.int32], frame: Frame) -> int:
    """Where the answer begins: behind the last turn of the assistant, 0 where there is none."""
    middle = frame.middle[1:]  # the user's last character may be one token with what follows it
    for end in range(len(tokens), len(middle) - 1, -1) if middle else ():
        if tokens[end - len(middle) : end].tolist() == middle:
            return end
    return 0
