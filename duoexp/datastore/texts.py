"""Where the text of a datastore comes from: files, a data set, or what the installed packages carry."""

import json
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from duoexp.config import InputError

PLAIN = (".txt", ".md", ".rst", ".py")
ROWS = (".jsonl", ".json")


def of_path(path: Path, field: str) -> Iterator[str]:
    """Of a file or of all files of a folder: plain ones whole, of JSON lines each row's `field`."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in PLAIN + ROWS)
    if not files:
        raise InputError(f"path={path} is no file, nor a folder with files in {', '.join(PLAIN + ROWS)}; check it")
    for file in files:
        if file.suffix in ROWS:
            yield from _rows(file, field)
        else:
            yield _read(file)


def of_data_set(source: str, subset: str | None, split: str, field: str) -> Iterator[str]:
    """Of a public data set, each row's `field`, as it streams in."""
    from datasets import load_dataset  # seconds

    try:
        rows: Iterable[Any] = load_dataset(source, subset, split=split, streaming=True)
        for number, row in enumerate(rows, start=1):
            yield from _texts(row, field, f"{source}, row {number}")
    except InputError:
        raise
    except Exception as error:  # whatever the transport of the day raises
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"source={source} cannot be read ({type(error).__name__}: {reason}); check its name and the network, "
            "or give path=FILE_OR_FOLDER"
        ) from error


def of_packages() -> Iterator[str]:
    """The descriptions of all installed packages, then the source of Python's own library."""
    found = {str(about["Name"]): about for about in (each.metadata for each in metadata.distributions())}
    for name in sorted(found):
        if text := found[name].json.get("description"):
            yield str(text)
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield file.read_text(encoding="utf-8", errors="replace")


def _rows(file: Path, field: str) -> Iterator[str]:
    for number, line in enumerate(_read(file).splitlines(), start=1):
        if line.strip():
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InputError(f"{where} is no JSON ({error}); give one object a line") from error
            yield from _texts(row, field, where)


def _texts(row: Any, field: str, where: str) -> Iterator[str]:
    """`field` holds a text, a list of them, or messages with a `content` each."""
    if not isinstance(row, Mapping) or field not in row:
        names = ", ".join(row) if isinstance(row, Mapping) else type(row).__name__
        raise InputError(f"{where} has no field {field!r} ({names}); set field=NAME")
    held = row[field]
    for part in held if isinstance(held, list) else [held]:
        text = part.get("content") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise InputError(f"{where}: field {field!r} holds {type(text).__name__} instead of text; set field=NAME")
        yield text


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 (byte {error.start}); convert it") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}); check path") from None
