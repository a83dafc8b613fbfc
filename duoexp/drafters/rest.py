"""Retrieval-based speculative decoding: what followed the last words in a datastore of text (REST, 2311.08252)."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from duoexp.config import InputError
from duoexp.datastore import Datastore, build
from duoexp.datastore.progress import shown
from duoexp.datastore.texts import of_packages
from duoexp.drafters.base import Drafter
from duoexp.lm import disk_cache
from duoexp.lm.causal_lm import CausalLM
from duoexp.lm.load import Model
from duoexp.lm.tokenizer import tokenizer_hash
from duoexp.sampling import Sampler
from duoexp.tree import Draft

OWN_TOKENS = 1_000_000  # of the datastore that is made where none is named


class Rest(Drafter):
    """Needs no model. The longest suffix of the context that the datastore holds, of `longest` down to `shortest`
    tokens, is looked up; up to `hits` continuations of `length` tokens make a trie, and its heaviest nodes, as many as
    the budget, are the draft (sections 3.2 and 3.3; 16, 2, 5000, 10 and a budget of 64 are the authors' settings).

    datastore: a folder of `python -m duoexp.datastore`; None: a small one of the text of installed packages.
    """

    def __init__(
        self, datastore: str | None = None, longest: int = 16, shortest: int = 2, hits: int = 5000, length: int = 10
    ) -> None:
        for name, value in (("longest", longest), ("shortest", shortest), ("hits", hits), ("length", length)):
            if not isinstance(value, int) or value < 1:
                raise InputError(f"draft.drafter.{name}={value!r} is out of range; allowed: 1 or more")
        if shortest > longest:
            raise InputError(f"draft.drafter.shortest={shortest} exceeds longest={longest}; swap them")
        self.datastore, self.longest, self.shortest, self.hits, self.length = datastore, longest, shortest, hits, length

    def prepare(self, target: Model) -> None:
        self._tokenizer = tokenizer_hash(target.tokenizer)
        self._folder = Path(self.datastore).expanduser() if self.datastore else own_datastore(target)
        Datastore(self._folder, self._tokenizer)  # opened anew where the drafter runs

    def start(self, load: Callable[[], CausalLM] | None, sampler: Sampler, sampled: bool) -> None:
        self._store = Datastore(self._folder, self._tokenizer)

    def propose(self, context: Sequence[int], pending: Draft, budget: int, depth: int | None = None) -> Iterator[Draft]:
        tip = pending.tip()
        length = self.length if depth is None else min(self.length, depth - pending.depth(tip))
        if budget < 1 or length < 1:
            return
        text = [*context[-self.longest :], *(pending.tokens[node] for node in pending.path(tip))]
        rows = self._store.continuations(text, self.longest, self.shortest, self.hits, length)
        if len(draft := heaviest(rows, budget)):
            yield pending.hang(tip, draft)


def heaviest(rows: NDArray, count: int) -> Draft:
    """The `count` nodes of the trie of `rows` that lie on the most rows, the heavier first among siblings.

    rows [sequences, length] in lexicographic order, each ended by -1 where it is shorter. No node weighs more than its
    parent, and of equal ones the parent goes first, so what is chosen is a tree. So too, below a node that is not among
    the heaviest of its own level none is, and its rows need not be looked at again: most are gone after a level or two.
    """
    tokens, parents, weights = list[int](), list[int](), list[int]()
    alive, above = np.arange(len(rows)), np.full(len(rows), -1)  # rows, and the node of each a level further up
    for column in rows.T:
        words = column[alive]
        differs = (words[1:] != words[:-1]) | (above[1:] != above[:-1])
        starts = np.flatnonzero(np.append(len(alive) > 0, differs))
        weight = np.where(words[starts] >= 0, np.diff(starts, append=len(alive)), 0)
        kept = np.argsort(-weight, kind="stable")[:count]
        kept = kept[weight[kept] > _least(weights, count)]
        if not len(kept):
            break
        names = np.full(len(starts), -1)
        names[kept] = np.arange(len(tokens), len(tokens) + len(kept))
        tokens += words[starts[kept]].tolist()
        parents += above[starts[kept]].tolist()
        weights += weight[kept].tolist()
        above = np.repeat(names, np.diff(starts, append=len(alive)))
        alive, above = alive[above >= 0], above[above >= 0]
    chosen = sorted(np.argsort(-np.array(weights, int), kind="stable")[:count].tolist())
    places = {-1: -1} | {node: place for place, node in enumerate(chosen)}
    return Draft(tuple(tokens[node] for node in chosen), tuple(places[parents[node]] for node in chosen))


def _least(weights: list[int], count: int) -> int:
    """What a node must weigh more than, to be among the `count` heaviest when these are there already."""
    return sorted(weights, reverse=True)[count - 1] if len(weights) >= count else 0


def own_datastore(target: Model) -> Path:
    """A small datastore for the target's tokenizer, made once: of the text that the installed packages carry."""

    def fill(folder: Path) -> None:
        what = "note: no draft.drafter.datastore is given: a small one is made, once, of installed packages' text"
        with shown(what) as told:
            build(folder, of_packages(), target.tokenizer, "installed packages", told, OWN_TOKENS)

    return disk_cache.made(f"datastore-{tokenizer_hash(target.tokenizer)[:20]}", fill)
