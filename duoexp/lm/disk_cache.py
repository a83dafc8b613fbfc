"""Folders made once and kept: converted, downloaded and generated models."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock

from duoexp.config import InputError


def root() -> Path:
    """`$DUOEXP_CACHE`, else `$XDG_CACHE_HOME/duoexp`, else `~/.cache/duoexp`."""
    chosen = os.environ.get("DUOEXP_CACHE")
    if not chosen:
        chosen = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "duoexp")
    return Path(chosen).expanduser().absolute()


def made(name: str, fill: Callable[[Path], None]) -> Path:
    """The entry `name`; where there is none, `fill` writes it into the empty folder that it is given.

    One process makes an entry while others wait for it. An entry is whole or absent: what a killed process leaves
    is a temporary folder, which the next one removes. Raises InputError when the cache cannot be written.
    """
    entry = root() / name
    if entry.is_dir():
        return entry
    with writing(entry.parent):
        entry.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{entry}.lock"):
            if not entry.is_dir():
                _make(entry, fill)
    return entry


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raises InputError when this folder of the cache cannot be written."""
    try:
        yield
    except Exception as error:
        if not _on_disk(error):
            raise
        raise InputError(
            f"the cache folder {folder} cannot be written ({error}); "
            "make room or give rights there, or set DUOEXP_CACHE to another folder"
        ) from error


def _make(entry: Path, fill: Callable[[Path], None]) -> None:
    # One name for all processes is enough: the lock's holder is the only one that uses it.
    temporary = entry.with_name(f"{entry.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        fill(temporary)
        temporary.rename(entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _on_disk(error: Exception) -> bool:
    # safetensors and tokenizers, written in Rust, report a full disk in exceptions of their own
    return isinstance(error, OSError) or "(os error " in str(error)
