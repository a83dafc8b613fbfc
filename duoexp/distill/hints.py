"""What a student may copy behind every token of the texts, and the phrases that it will carry with it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duoexp.distill import files
from duoexp.distill.data import Texts
from duoexp.lm.copying import SHARES, SIZES, Copier, Phrases, keys

FOLDS = 8
FEWEST = 2  # occurrences of an end that make it a phrase


@dataclass(frozen=True)
class Hints:
    """[positions, sources]: found tokens and their kinds, -1 where a source found none."""

    tokens: Tensor
    kinds: Tensor

    @classmethod
    def of(cls, found: Iterable[Sequence[Sequence[int]]]) -> "Hints":
        tokens, kinds = torch.tensor(list(found), dtype=torch.int32).unbind(-1)
        return cls(tokens, kinds)

    def __getitem__(self, part: slice) -> "Hints":
        return Hints(self.tokens[part], self.kinds[part])

    @classmethod
    def joined(cls, parts: Sequence["Hints"]) -> "Hints":
        return cls(torch.cat([each.tokens for each in parts]), torch.cat([each.kinds for each in parts]))


def phrases(texts: Texts, numbers: Sequence[int], count: int) -> Phrases:
    """The commonest ends of the `count` most frequent beginnings in these texts."""
    parts = [_ends(texts, numbers, size, 3 * i) for i, size in enumerate(SIZES)]
    key, token, kind, often = (np.concatenate(each) for each in zip(*parts, strict=True))
    kept = np.sort(np.argsort(-often, kind="stable")[:count])
    return Phrases(*(torch.from_numpy(each[kept]) for each in (key, token, kind)))


def _ends(texts: Texts, numbers: Sequence[int], size: int, first_kind: int) -> tuple[NDArray[np.int64], ...]:
    """Keys of all beginnings of one size, their commonest end, its kind, and how often it stood there."""
    rows = [texts[n].astype(np.int64) for n in numbers if texts.lengths[n] > size]
    key = np.concatenate([keys([row[i : len(row) - size + i] for i in range(size)]) for row in rows])
    end = np.concatenate([row[size:] for row in rows])
    order = np.lexsort((end, key))
    key, end = key[order], end[order]
    starts = np.flatnonzero(np.r_[True, (key[1:] != key[:-1]) | (end[1:] != end[:-1])])
    often, key, end = np.diff(np.r_[starts, len(key)]), key[starts], end[starts]
    groups = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
    share = often / np.repeat(np.add.reduceat(often, groups), np.diff(np.r_[groups, len(key)]))
    order = np.lexsort((-often, key))  # the commonest end of each beginning first
    best = order[np.flatnonzero(np.r_[True, np.diff(key[order]) != 0])]
    best = best[often[best] >= FEWEST]
    kind = first_kind + np.searchsorted(SHARES, share[best], side="right")
    return key[best], end[best].astype(np.int32), kind.astype(np.uint8), often[best]


def make(
    path: Path, texts: Texts, kept: Sequence[int], match: int, count: int,
    progress: Callable[[Iterable[int]], Iterator[int]],
) -> dict[int, Hints]:  # fmt: skip
    """The hints of every text, once.

    A kept text is hinted at by the phrases of the others: by its own, they would seem surer than they are.
    """
    if not path.exists():
        held_out = sorted(set(range(len(texts))) - set(kept))
        folds = [
            (held_out, kept),
            *((kept[i::FOLDS], [n for j, n in enumerate(kept) if j % FOLDS != i]) for i in range(FOLDS)),
        ]
        found: dict[int, Hints] = {}
        for fold in progress(range(len(folds))):
            hinted, others = folds[fold]
            copier = Copier(match, phrases(texts, others, count) if count else None)
            found |= {n: Hints.of(copier.along(texts[n].tolist())) for n in hinted}
        whole = Hints.joined([found[n] for n in range(len(texts))])
        files.write_arrays(path, {"tokens": whole.tokens.numpy(), "kinds": whole.kinds.numpy().astype(np.int8)})
    arrays = files.read_arrays(path)
    whole = Hints(torch.from_numpy(arrays["tokens"]), torch.from_numpy(arrays["kinds"]))
    ends = np.cumsum(texts.lengths)
    return {n: whole[int(ends[n] - texts.lengths[n]) : int(ends[n])] for n in range(len(texts))}


def odds(texts: Texts, numbers: Sequence[int], hints: dict[int, Hints], kinds: int, skip: int) -> Tensor:
    """[kinds]: log of how often a token of this kind was right over how often it was wrong."""
    right, seen = torch.zeros(kinds), torch.zeros(kinds)
    for n in numbers:
        said, hint = torch.from_numpy(texts[n][skip:])[:, None], hints[n][skip - 1 : -1]
        found = hint.kinds >= 0
        seen += torch.bincount(hint.kinds[found].long(), minlength=kinds)
        right += torch.bincount(hint.kinds[found & (hint.tokens == said)].long(), minlength=kinds)
    return ((right + 0.5) / (seen - right + 0.5)).log()
