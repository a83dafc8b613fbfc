"""Files of a run: whole or absent, so that a run that was interrupted goes on where it stopped."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from duoexp.config import InputError

Arrays = dict[str, NDArray]


def write(path: Path, fill: Callable[[Path], object]) -> None:
    """`fill` writes a file beside `path`, which then takes its place."""
    temporary = path.with_name(f"{path.name}.tmp")
    with writable(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            fill(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    write(path, lambda temporary: temporary.write_text(text))


def write_arrays(path: Path, arrays: Arrays) -> None:
    def fill(temporary: Path) -> None:
        with temporary.open("wb") as file:  # given a name, numpy would append .npz to it
            np.savez(file, **arrays)  # type: ignore[arg-type]

    write(path, fill)


def read_arrays(path: Path) -> Arrays:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Raises InputError when the disk is full or the folder may not be written."""
    try:
        yield
    except Exception as error:
        # safetensors, written in Rust, and torch.save report a full disk in exceptions of their own
        words = ("os error", "No space left", "file write failed", "iostream error", "unexpected pos")
        if not isinstance(error, OSError) and not any(word in str(error) for word in words):
            raise
        raise InputError(
            f"{folder} cannot be written ({' '.join(str(error).split())}); make room there, or give another "
            "folder=..., and start again: what is finished stays"
        ) from error
