"""The files of a run: the truth, of which a tracker holds a copy. What is written is on disk before the next prompt."""

import hashlib
import json
import logging
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from omegaconf import OmegaConf

from duoexp.config import InputError


class Record:
    """`<output_dir>/runs/<name>/<time>-<hash>/`, which no other run shares."""

    def __init__(self, output_dir: str, name: str, config: Mapping[str, Any]) -> None:
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
        self.folder = _new_folder(Path(output_dir).expanduser() / "runs" / name, digest)
        (self.folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(dict(config))))
        self._open: dict[str, TextIO] = {}
        self._log = logging.FileHandler(self.folder / "run.log")
        self._log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(self._log)

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """A whole JSON file, there or not there, never half."""
        draft = self.folder / f".{name}"
        draft.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
        draft.rename(self.folder / name)

    def append(self, name: str, value: Mapping[str, Any]) -> None:
        """A line of a JSON lines file."""
        if name not in self._open:
            self._open[name] = (self.folder / name).open("w")
        self._open[name].write(json.dumps(value, allow_nan=False) + "\n")

    def log_traceback(self) -> None:
        """The traceback of the exception that is being handled, into the log alone: the console gets a sentence."""
        self._log.handle(logging.makeLogRecord({"name": "duoexp", "levelname": "ERROR", "msg": traceback.format_exc()}))

    def flush(self) -> None:
        for file in self._open.values():
            file.flush()

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        logging.getLogger().removeHandler(self._log)
        self._log.close()


def _new_folder(parent: Path, digest: str) -> Path:
    """mkdir is what makes it ours: of two runs of the same second and config, the later takes the next name."""
    stem = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{digest}"
    for attempt in range(1, 1000):
        folder = parent / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not parent.is_dir():
                raise InputError(f"output_dir: {parent} is not a folder; give another output_dir") from None
            continue
        except OSError as error:
            raise InputError(
                f"output_dir: {folder} cannot be made ({error.strerror}); give another output_dir"
            ) from None
        return folder
    raise InputError(f"output_dir: {parent} holds 1000 runs of this second; give another name")
