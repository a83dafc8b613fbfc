"""REST and its datastore: what is found, what becomes of it, as many tokens a pass as the authors' algorithm, and what
is refused."""

import json
import random
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CONF, ECHO_PROMPT, Ids, autoregressive, engine, expected, inline, planned, prompt_of
from hydra import compose, initialize_config_dir

from duoexp.config import InputError
from duoexp.datastore import Datastore, build
from duoexp.datastore import __main__ as entry
from duoexp.datastore.texts import of_path
from duoexp.drafters import rest
from duoexp.drafters.rest import heaviest, own_datastore  # the real one: `conftest.cached` replaces it later
from duoexp.lm.tokenizer import tokenizer_hash
from duoexp.metrics import block_efficiency
from duoexp.tree import Draft


def tokenizer() -> Any:
    return planned().target.tokenizer


def stored(folder: Path, *texts: Sequence[int], shard: int = 1 << 20) -> Datastore:
    folder.mkdir(parents=True)
    build(folder, texts, Ids(tokenizer()), "a test", shard=shard)  # type: ignore[arg-type]
    return Datastore(folder, tokenizer_hash(tokenizer()))


def text_of(folder: Path) -> list[int]:
    return np.fromfile(folder / "tokens.bin", np.uint16).tolist()


def followers(text: list[int], words: list[int], length: int, shard: int) -> list[list[int]]:
    """By looking at every place of every shard."""
    found = []
    for begin in range(0, len(text), shard):
        part = text[begin : begin + shard]
        for start in range(len(part) - len(words) + 1):
            if part[start : start + len(words)] == words:
                row = part[start + len(words) :][:length]
                found.append(row + [-1] * (length - len(row)))
    return sorted(found)


@pytest.mark.parametrize("shard", (1 << 20, 500))
def test_the_longest_suffix_is_found_wherever_it_stands(tmp_path: Path, shard: int) -> None:
    chance = random.Random(0)
    texts = [[chance.randrange(6) for _ in range(chance.randrange(1, 60))] for _ in range(60)]
    store, text = stored(tmp_path / "store", *texts, shard=shard), text_of(tmp_path / "store")
    for _ in range(100):
        words = [chance.randrange(6) for _ in range(12)]
        rows = store.continuations(words, longest=8, shortest=2, most=10**6, length=4).tolist()
        wanted = next(found for n in range(8, 0, -1) if (found := followers(text, words[-n:], 4, shard)) or n == 1)
        assert rows == wanted


def test_too_many_hits_are_taken_evenly_and_too_short_a_suffix_is_none(tmp_path: Path) -> None:
    store = stored(tmp_path / "store", *([1, 2, first, 5] for first in range(3, 103)))
    rows = store.continuations([9, 1, 2], 16, 2, 10, 2)
    assert rows[:, 0].tolist() == list(range(3, 103, 10))
    assert not len(store.continuations([9, 2], 16, 2, 10, 2)) and not len(store.continuations([2], 16, 2, 10, 2))


def test_the_heaviest_nodes_of_the_trie_are_kept() -> None:
    rows = np.array([[1, 2, 3], [1, 2, 4], [1, 2, 4], [1, 5, 6], [7, 8, -1]])
    assert heaviest(rows, 3) == Draft((1, 2, 4), (-1, 0, 1))
    whole = heaviest(rows, 64)
    assert sorted(tuple(whole.tokens[node] for node in whole.path(leaf)) for leaf in whole.leaves()) == [
        (1, 2, 3), (1, 2, 4), (1, 5, 6), (7, 8),
    ]  # fmt: skip
    assert heaviest(rows[:0], 3) == Draft()


def test_a_trie_of_any_size_is_a_tree_of_the_heaviest_prefixes() -> None:
    chance = np.random.default_rng(0)
    for _ in range(50):
        rows = chance.integers(0, 3, (chance.integers(1, 80), 5))
        rows = rows[np.lexsort(rows.T[::-1])]
        count = int(chance.integers(1, 40))
        draft = heaviest(rows, count)
        weights = Counter(tuple(row[:n].tolist()) for row in rows for n in range(1, 6))
        kept = [weights[tuple(draft.tokens[i] for i in draft.path(node))] for node in range(len(draft))]
        assert sorted(kept, reverse=True) == sorted(weights.values(), reverse=True)[:count]


def authors(text: list[int], context: list[int], known: Sequence[int], most: int = 64) -> int:
    """Target passes that the published algorithm takes for `known`, by searching through the whole text."""
    done, passes = 1, 1  # the prompt's own pass brings the first token
    while done < len(known):
        words = [*context, *known[:done]]
        found = next((rows for n in range(16, 1, -1) if (rows := followers(text, words[-n:], 10, len(text)))), [])
        weights = Counter(tuple(row[:n]) for row in found for n in range(1, 11) if -1 not in row[:n])
        kept = {prefix for prefix, _ in sorted(weights.items(), key=lambda item: (-item[1], len(item[0])))[:most]}
        step = 0
        while tuple(known[done : done + step + 1]) in kept and done + step < len(known):
            step += 1
        done, passes = done + step + 1, passes + 1
    return passes


def test_tau_is_that_of_the_authors_algorithm(tmp_path: Path) -> None:
    """On a datastore of the target's answers with other seeds, in pieces."""
    sampling = {"temperature": 0.3}
    texts = [
        engine(limit=90, seed=seed, **sampling).decode(autoregressive(), prompt_of(16, seed % 4)).ids
        for seed in range(1, 17)
    ]
    stored(tmp_path / "store", *texts)
    method = inline("draft=rest", f"draft.drafter.datastore={tmp_path / 'store'}", **sampling)
    ours, passes, text = [], 0, text_of(tmp_path / "store")
    for prompt in (prompt_of(16, seed) for seed in range(4)):
        ours.append(engine(limit=90, **sampling).decode(method, prompt))
        passes += authors(text, prompt, expected(engine(limit=90, **sampling), prompt).ids)
    assert block_efficiency(ours) > 1.3, "it must find something, or nothing is compared"
    assert block_efficiency(ours) == pytest.approx(4 * 90 / passes, rel=0.1)


# What cannot be used


def spoilt(folder: Path, how: str) -> None:
    stored(folder, ECHO_PROMPT)
    card = json.loads((folder / "datastore.json").read_text())
    match how:
        case "missing":
            shutil.rmtree(folder)
        case "unfinished":
            (folder / "datastore.json").unlink()
        case "no JSON":
            (folder / "datastore.json").write_text('{"tokens": 1')
        case "truncated":
            (folder / "suffixes.bin").write_bytes((folder / "suffixes.bin").read_bytes()[:-4])
        case "without tokens":
            (folder / "tokens.bin").unlink()
        case "empty":
            (folder / "datastore.json").write_text(json.dumps(card | {"tokens": 0}))
        case "another tokenizer":
            (folder / "datastore.json").write_text(json.dumps(card | {"tokenizer": "0" * 64}))


@pytest.mark.parametrize(
    ("how", "said"),
    (
        ("missing", "does not exist"),
        ("unfinished", "was not finished"),
        ("no JSON", "cannot be read"),
        ("truncated", "truncated"),
        ("without tokens", "0 bytes"),
        ("empty", "empty"),
        ("another tokenizer", "another tokenizer"),
    ),
)
def test_a_datastore_that_cannot_be_used_is_refused_before_a_model_loads(how: str, said: str, tmp_path: Path) -> None:
    spoilt(tmp_path / "store", how)
    with pytest.raises(InputError, match=said) as refused:
        planned("draft=rest", f"draft.drafter.datastore={tmp_path / 'store'}")
    assert "python -m duoexp.datastore" in str(refused.value)


def config(*overrides: str) -> Any:
    from omegaconf import OmegaConf

    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_object(compose("datastore", overrides=["model=tiny", *overrides]))


def test_the_command_builds_a_datastore_of_files(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one two three")
    rows = [{"text": "four"}, {"text": ["five", "six"]}, {"text": [{"role": "user", "content": "seven"}]}]
    (tmp_path / "texts" / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    told = entry.make(config(f"path={tmp_path / 'texts'}", f"folder={tmp_path / 'store'}"))
    assert "5 texts" in told and sorted(path.name for path in tmp_path.iterdir()) == ["store", "texts"]
    assert tokenizer().decode(text_of(tmp_path / "store"), skip_special_tokens=True) == "one two threefourfivesixseven"
    planned("draft=rest", f"draft.drafter.datastore={tmp_path / 'store'}")


@pytest.mark.parametrize(
    ("overrides", "said"),
    (
        ((), "either path="),
        (("path=HERE/nothing",), "no file, nor a folder"),
        (("path=HERE/empty.txt",), "no text"),
        (("path=HERE/rows.jsonl",), "no field 'text'"),
        (("path=HERE/rows.jsonl", "field=number"), "int instead of text"),
        (("path=HERE/broken.jsonl",), "line 1 is no JSON"),
        (("path=HERE/latin.txt",), "not UTF-8"),
        (("path=HERE/empty.txt", "folder=HERE"), "exists"),
        (("path=HERE/empty.txt", "tokens=0"), "tokens=0"),
    ),
)
def test_what_no_datastore_can_be_made_of_is_refused_and_nothing_is_left(
    overrides: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "rows.jsonl").write_text('{"number": 3}')
    (tmp_path / "broken.jsonl").write_text("{")
    before = sorted(tmp_path.iterdir())
    given = [f"folder={tmp_path / 'store'}", *(each.replace("HERE", str(tmp_path)) for each in overrides)]
    with pytest.raises(InputError, match=said):
        entry.make(config(*given))
    assert sorted(tmp_path.iterdir()) == before


def test_a_build_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    (tmp_path / "a.txt").write_text("one two three")
    monkeypatch.setattr("duoexp.datastore.store._sorted", interrupted)
    with pytest.raises(KeyboardInterrupt):
        entry.make(config(f"path={tmp_path / 'a.txt'}", f"folder={tmp_path / 'store'}"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_the_command_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["datastore", "model=tiny", "path=nowhere"])
    with pytest.raises(SystemExit) as end:
        entry.main()
    assert end.value.code == 2 and "error: path=nowhere" in capsys.readouterr().err


def test_without_a_datastore_one_of_installed_text_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DUOEXP_CACHE", str(tmp_path))
    monkeypatch.setattr(rest, "OWN_TOKENS", 20_000)
    first = own_datastore(planned().target)
    assert len(capsys.readouterr().out.splitlines()) == 1, "one line says what is made"
    assert own_datastore(planned().target) == first and not capsys.readouterr().out
    assert Datastore(first, tokenizer_hash(tokenizer())).card.tokens == 20_000


def test_texts_of_a_folder_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.md", "a.py", "c.bin"):
        (tmp_path / name).write_text(name)
    assert list(of_path(tmp_path, "text")) == ["a.py", "b.md"]
