"""Tasks: a name, a file or a text -> the prompts of an experiment."""

import hashlib
import json
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from duoexp.config import InputError, TaskConfig
from duoexp.templates import Prompt, encode, template_hash

__all__ = ["WARMUP", "Prompt", "encode", "here", "load", "prompts_hash", "template_hash"]

PACKAGED = "pkg://"  # a source that is installed with the package: pkg://PACKAGE/FILE
# Spec-Bench files MT-bench's prompts under these eight categories, not under one name.
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
FORM = 'one JSON object a line with "question_id", "category" and "turns" (HumanEval: "task_id" and "prompt")'

T = TypeVar("T")


class _Row(NamedTuple):
    where: str  # for errors
    number: int
    kind: str | None  # for a row that names none; None: not known
    fields: dict[str, Any]


# Not prompts of any task: what was run before must not be measured.
WARMUP = (
    Prompt("warmup-1", "prompt", ("Name three things that are usually found in a kitchen drawer.",), None),
    Prompt("warmup-2", "prompt", ("Explain in a few sentences how a bicycle stays upright.",), None),
)


def load(task: TaskConfig) -> list[Prompt]:
    """The prompts of a task, in the order of `task.kinds`, and within a kind in the order of the file.

    `task.limit` takes so many, spread evenly over the kinds and within each (`_shares`, `_spread`): always the same.
    A limit beyond what is there takes all. Raises InputError for input that is missing, malformed or empty.
    """
    if task.limit is not None and task.limit < 1:
        raise InputError(f"task.limit={task.limit} leaves no prompt; give 1 or more, or null for all")
    prompts = _single(task) or [prompt for row in _rows(task) for prompt in _prompts(row, task)]
    _check(prompts, task)
    kinds = [[prompt for prompt in prompts if prompt.kind == kind] for kind in dict.fromkeys(task.kinds)]
    shares = _shares([len(kind) for kind in kinds], len(prompts) if task.limit is None else task.limit)
    return [prompt for kind, share in zip(kinds, shares, strict=True) for prompt in _spread(kind, share)]


def of_length(prompts: Sequence[Prompt], tokens: int, length: Callable[[Prompt], int]) -> list[Prompt]:
    """Each prompt as one turn of at most `tokens` tokens: followed by the texts of the others, and cut there.

    length: of an encoded prompt. Raises InputError when not even a letter fits.
    """
    texts = [turn for prompt in prompts for turn in prompt.turns]
    made = []
    for number, prompt in enumerate(prompts):
        text = "\n\n".join([*prompt.turns, *texts[number:], *texts[:number]])

        def cut(letters: int, prompt: Prompt = prompt, text: str = text) -> Prompt:
            return Prompt(f"{prompt.id}-{tokens}", prompt.kind, (text[:letters],), None)

        while length(cut(len(text))) < tokens:
            text += "\n\n" + text
        letters = bisect(range(1, len(text)), tokens, key=lambda letters: length(cut(letters, text=text)))
        if not letters:
            raise InputError(f"task.prompt_tokens={tokens} has no room for a prompt beside its template; give more")
        made.append(cut(letters, text=text))
    return made


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    """16 hex digits of the ids, kinds and texts, in their order: equal only if the same was asked."""
    record = json.dumps([[prompt.id, prompt.kind, prompt.turns] for prompt in prompts])
    return hashlib.sha256(record.encode()).hexdigest()[:16]


def _spread(items: Sequence[T], count: int) -> list[T]:
    """`count` items at even distances from the first: 2 of 8 are the first and the fifth. All if there are no more."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def _shares(sizes: Sequence[int], limit: int) -> list[int]:
    """How many to take of each kind: one a round, of all that have more; in a last, short round of kinds `_spread`."""
    shares = [0] * len(sizes)
    while sum(shares) < min(limit, sum(sizes)):
        unspent = [kind for kind, size in enumerate(sizes) if shares[kind] < size]
        for kind in _spread(unspent, limit - sum(shares)):
            shares[kind] += 1
    return shares


def _single(task: TaskConfig) -> list[Prompt]:
    """The one prompt of `task.text`, or of a `.txt` file as it is; nothing if the task has neither."""
    text = task.text
    if text is not None and task.path is not None:
        raise InputError(f"task.text and task.path={task.path} are both given; give one of them")
    if task.path is not None and task.path.endswith(".txt"):
        text = _read(Path(task.path).expanduser())
    if text is None:
        return []
    if len(task.kinds) != 1:
        raise InputError(f"task {task.name} has {len(task.kinds)} kinds, so a single text has none; add task=prompt")
    if not text.strip():
        raise InputError(f"{task.path or 'task.text'} is an empty prompt; give task.text='...' or task.path=FILE.txt")
    return [Prompt(f"{task.kinds[0]}-1", task.kinds[0], (text,), None)]


def _rows(task: TaskConfig) -> Iterator[_Row]:
    only = task.kinds[0] if len(task.kinds) == 1 else None
    if task.path is not None:
        path = Path(task.path).expanduser()
        files = {kind: path / f"{kind}.jsonl" for kind in task.kinds} if path.is_dir() else {only: path}
        for kind, file in files.items():
            yield from _lines(file, kind)
    elif task.source is None:
        raise InputError(f"task {task.name} has no prompt; give task.text='...' or task.path=FILE")
    elif task.source.startswith(PACKAGED):
        package, _, name = task.source.removeprefix(PACKAGED).partition("/")
        with resources.as_file(resources.files(package) / name) as file:
            yield from _lines(file, only)
    elif "://" in task.source:
        yield from _lines(_download(task), only)
    else:
        yield from _data_set(task, only)


def _lines(file: Path, kind: str | None) -> Iterator[_Row]:
    """Read here, not by `datasets`: Arrow wants one type a column, its errors name no line, and it calls home."""
    empty = True
    for number, line in enumerate(_read(file).split("\n"), start=1):
        if not line.strip():
            continue
        empty, where = False, f"{file}, line {number}"
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{where} is not JSON ({error.msg}, column {error.colno}); write {FORM}") from None
        if not isinstance(fields, dict):
            raise InputError(f"{where} is a JSON {type(fields).__name__}, not an object; write {FORM}")
        yield _Row(where, number, kind, fields)
    if empty:
        raise InputError(f"{file} is empty; write {FORM}")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 (byte {error.start}); convert it") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}); check task.path") from None


def _download(task: TaskConfig) -> Path:
    """The file at an address, kept in the user's cache of `datasets`.

    `load_dataset` would ask the server for the file's version before it looks into the cache, and so fail offline.
    Without that the first copy serves for good, which is what an experiment wants.
    """
    from datasets import DownloadConfig, DownloadManager  # seconds, and mini needs none of it

    try:
        return Path(DownloadManager(download_config=DownloadConfig(use_etag=False)).download(task.source))
    except Exception as error:  # whatever the transport of the day raises
        raise _unreachable(task, error) from error


def here(task: TaskConfig) -> bool:
    """Whether the prompts are on this machine, as far as that can be told without a network."""
    if task.text is not None or task.path is not None or task.source is None or task.source.startswith(PACKAGED):
        return True
    from datasets import DownloadConfig, DownloadManager, config

    if "://" not in task.source:
        return any(Path(config.HF_DATASETS_CACHE).glob(f"{task.source.replace('/', '___')}/*"))
    try:
        DownloadManager(download_config=DownloadConfig(use_etag=False, local_files_only=True)).download(task.source)
    except Exception:  # whatever it raises for a file that it has not
        return False
    return True


def _data_set(task: TaskConfig, kind: str | None) -> Iterator[_Row]:
    from datasets import load_dataset

    if task.subset is None:  # a default would be another one online than in the cache
        raise InputError(f"task.source={task.source} names a data set without a configuration; give task.subset=NAME")
    try:
        rows = load_dataset(task.source, task.subset, split=task.split)
    except Exception as error:  # as above
        raise _unreachable(task, error) from error
    for number, fields in enumerate(rows, start=1):
        yield _Row(f"{task.source}, row {number}", number, kind, dict(fields))


def _unreachable(task: TaskConfig, error: Exception) -> InputError:
    reason = str(error).partition("\n")[0]
    files = " and ".join(f"{kind}.jsonl" for kind in task.kinds)
    return InputError(
        f"{task.source} is neither in the cache nor reachable ({type(error).__name__}: {reason}); run once with"
        f" network, or give task.path=FILE (that file, or a folder with {files}): {FORM}"
    )


def _prompts(row: _Row, task: TaskConfig) -> Iterator[Prompt]:
    """One prompt, or none if the row is of a kind that the task does not ask for."""
    where, number, only, fields = row
    kind = fields.get("category") or only
    if kind is None:
        raise InputError(f'{where} has no "category", and task {task.name} has several kinds; add it')
    if kind in MT_BENCH and kind not in task.kinds:
        kind = "mt_bench"
    if kind in task.kinds:
        given = fields.get("question_id", fields.get("task_id"))
        name = f"{kind}-{number}" if given is None else str(given)
        yield Prompt(name, kind, _turns(fields, f"{where} (id {name})"), _reference(fields))


def _turns(fields: dict[str, Any], where: str) -> tuple[str, ...]:
    turns = fields.get("turns", [fields.get("prompt")])
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise InputError(f"{where} has neither a list of texts as turns nor a text as prompt; write {FORM}")
    if not all(turn.strip() for turn in turns):
        raise InputError(f"{where} has an empty prompt; fill it in or take the row out")
    return tuple(turns)


def _reference(fields: dict[str, Any]) -> str | None:
    """One text: Spec-Bench has a list, of an answer for each turn; HumanEval has its solution."""
    found = fields.get("reference", fields.get("canonical_solution"))
    parts = found if isinstance(found, list) else [found]
    return "\n".join(str(part) for part in parts if part is not None) or None


def _check(prompts: Sequence[Prompt], task: TaskConfig) -> None:
    place, found = task.path or task.source, [prompt.kind for prompt in prompts]
    missing = [kind for kind in task.kinds if kind not in found]
    if missing or not prompts:
        wanted = ", ".join(missing) or "no kind"
        raise InputError(f"{place} has no prompt for {wanted}; give another task.path, or other task.kinds=[...]")
    twice = [name for name, count in Counter(prompt.id for prompt in prompts).items() if count > 1]
    if twice:
        raise InputError(f"id {twice[0]} is there twice in {place}, which would mix up the records; give it another")
