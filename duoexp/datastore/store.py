"""A datastore: tokens and their suffix array, in memory-mapped files."""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from duoexp.config import InputError
from duoexp.lm.tokenizer import tokenizer_hash

TOKENS, SUFFIXES, CARD = "tokens.bin", "suffixes.bin", "datastore.json"
SHARD = 1 << 27  # tokens that are sorted at once: some 3 GB of memory
BATCH = 256  # texts that are tokenised at once
SAYS = "build it anew with `python -m duoexp.datastore`"

Told = Callable[[str, float], None]  # what is being done, and how much of it is


@dataclass(frozen=True)
class Card:
    """What the files hold; written last, so that files without one are not whole."""

    tokenizer: str  # `tokenizer_hash` of the tokenizer
    tokens: int
    texts: int
    width: int  # bytes of a token
    shard: int  # tokens of each part but the last; suffixes are sorted within a part, and count from its start
    source: str
    form: int = 1  # of these files


class Datastore:
    """Finds what followed a text's last words wherever they stand. Raises InputError where it cannot be used."""

    def __init__(self, folder: Path, tokenizer: str) -> None:
        """tokenizer: `tokenizer_hash` of the target's."""
        self.card = _card(folder)
        if self.card.tokenizer != tokenizer:
            raise InputError(
                f"the datastore in {folder} was built with another tokenizer than the target's; "
                "build one for it with `python -m duoexp.datastore`"
            )
        self._tokens = _mapped(folder / TOKENS, _type(self.card.width), self.card.tokens)
        self._suffixes = _mapped(folder / SUFFIXES, np.dtype(np.int32), self.card.tokens)

    def continuations(self, text: Sequence[int], longest: int, shortest: int, most: int, length: int) -> NDArray:
        """[hits, length], in lexicographic order: what follows the longest suffix of `text` that is found.

        The suffix has `longest` down to `shortest` tokens; of more than `most` hits some are taken, spread evenly.
        -1 where the text of the datastore ends. Without a hit there are no rows.
        """
        low, high = shortest - 1, min(longest, len(text))  # as a suffix of a found one is found, halve the range
        found: list[_Hits] = []
        while low < high:
            middle = (low + high + 1) // 2
            if hits := self._find(list(text[-middle:])):
                low, found = middle, hits
            else:
                high = middle - 1
        if not found:
            return np.empty((0, length), np.int32)
        step = max(1.0, sum(len(each.suffixes) for each in found) / most)
        rows = np.concatenate([each.following(low, step, length) for each in found])[:most]
        return rows if len(found) == 1 else rows[np.lexsort(rows.T[::-1])]

    def _find(self, words: list[int]) -> list["_Hits"]:
        return [hits for part in self._parts() if len((hits := part.find(words)).suffixes)]

    def _parts(self) -> Iterator["_Hits"]:
        for start in range(0, self.card.tokens, self.card.shard):
            part = slice(start, start + self.card.shard)
            yield _Hits(self._tokens[part], self._suffixes[part])


@dataclass(frozen=True)
class _Hits:
    """A stretch of the suffix array of `tokens`."""

    tokens: NDArray
    suffixes: NDArray

    def find(self, words: list[int]) -> "_Hits":
        def start_of(place: int) -> list[int]:
            suffix = self.suffixes[place]
            begun: list[int] = self.tokens[suffix : suffix + len(words)].tolist()
            return begun

        places = range(len(self.suffixes))
        first = bisect_left(places, words, key=start_of)
        return _Hits(self.tokens, self.suffixes[first : bisect_right(places, words, lo=first, key=start_of)])

    def following(self, words: int, step: float, length: int) -> NDArray:
        """[every step-th hit, length]: the tokens behind the first `words`, -1 beyond the end."""
        taken = np.arange(0, len(self.suffixes), step).astype(np.int64)
        places = (self.suffixes[taken] + np.int64(words))[:, None] + np.arange(length)
        rows = self.tokens.take(places, mode="clip").astype(np.int32)
        rows[places >= len(self.tokens)] = -1
        return rows


def build(
    folder: Path,
    texts: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    told: Told = lambda what, share: None,
    limit: int | None = None,
    shard: int = SHARD,
) -> Card:
    """Writes a datastore into an empty folder. limit: of tokens. Raises InputError for texts without a token."""
    kind = _type(2 if len(tokenizer) <= 1 << 16 else 4)
    count, written = 0, 0
    with (folder / TOKENS).open("wb") as file:
        for ids in _tokenised(texts, tokenizer):
            taken = np.asarray(ids if limit is None else ids[: limit - written], dtype=kind)
            taken.tofile(file)
            count, written = count + 1, written + len(taken)
            told(f"{written:,} tokens read", min(1.0, written / limit) if limit else 0.0)
            if written == limit:
                break
    if not written:
        raise InputError(f"{source} holds no text to build a datastore from; name another")
    tokens = np.memmap(folder / TOKENS, kind, "r")
    with (folder / SUFFIXES).open("wb") as file:
        for start in range(0, written, shard):
            told(f"sorting {written:,} tokens", start / written)
            _sorted(tokens[start : start + shard]).tofile(file)
    told(f"sorting {written:,} tokens", 1.0)
    card = Card(tokenizer_hash(tokenizer), written, count, kind.itemsize, shard, source)
    (folder / CARD).write_text(json.dumps(asdict(card), indent=2) + "\n")
    return card


def _tokenised(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Each with the token that ends a text behind it, if there is one: then no draft runs on into another text."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    stream = iter(texts)
    while batch := list(islice(stream, BATCH)):
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False).input_ids:
            if ids:
                yield ids + end


def _sorted(tokens: NDArray) -> NDArray[np.int32]:
    from pydivsufsort import divsufsort  # only who builds needs it

    suffixes: NDArray[np.int32] = divsufsort(np.array(tokens)).astype(np.int32, copy=False)
    return suffixes


def _type(width: int) -> np.dtype:
    return np.dtype(f"<u{width}")


def _card(folder: Path) -> Card:
    file = folder / CARD
    if not folder.is_dir():
        raise InputError(f"the datastore {folder} does not exist; check draft.drafter.datastore, or {SAYS}")
    try:
        card = Card(**json.loads(file.read_text()))
    except FileNotFoundError:
        raise InputError(f"{folder} holds no {CARD}, so it is no datastore or was not finished; {SAYS}") from None
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{file} cannot be read ({error}); {SAYS}") from error
    if card.form != 1 or card.tokens < 1 or card.shard < 1 or card.width not in (2, 4):
        raise InputError(f"{file} describes a datastore that is empty or of another version; {SAYS}")
    return card


def _mapped(file: Path, kind: np.dtype, count: int) -> NDArray:
    size = file.stat().st_size if file.is_file() else 0
    if size != count * kind.itemsize:
        raise InputError(f"{file} has {size:,} bytes instead of {count * kind.itemsize:,}: it is truncated; {SAYS}")
    return np.memmap(file, kind, "r", shape=(count,))
