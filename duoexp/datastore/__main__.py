"""`python -m duoexp.datastore model=NAME path=FILE_OR_FOLDER`: makes a datastore for draft=rest."""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from duoexp.__main__ import CONF, DEBUGGING
from duoexp.config import InputError, ModelConfig
from duoexp.errors import is_input, sentence


@dataclass
class DatastoreConfig:
    """conf/datastore.yaml says what each is."""

    model: ModelConfig = MISSING
    folder: str = MISSING
    path: str | None = None
    source: str | None = None
    subset: str | None = None
    split: str = "train"
    field: str = "text"
    tokens: int | None = None


ConfigStore.instance().store(name="datastore_schema", node=DatastoreConfig)
_failed: list[Exception] = []  # at most one: Hydra would print a traceback of it


def make(config: DatastoreConfig) -> str:
    """Writes the datastore beside `folder` and moves it there when it is whole. Returns what to tell."""
    from duoexp.datastore.progress import shown  # not before Hydra has answered --help and the like
    from duoexp.datastore.store import build
    from duoexp.lm.load import describe
    from duoexp.lm.sources import resolve

    folder = Path(config.folder).expanduser().absolute()
    if folder.exists():
        raise InputError(f"folder={config.folder} exists; remove it, or give another one")
    if config.tokens is not None and config.tokens < 1:
        raise InputError(f"tokens={config.tokens} leaves no text; give 1 or more, or null for all")
    texts = _texts(config)
    target = describe(config.model.target, resolve(config.model.target), config.model.trust_remote_code)
    unfinished = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)  # what a killed build left
    try:
        unfinished.mkdir(parents=True)
        with shown(f"datastore of {config.path or config.source} for {target.source}") as told:
            card = build(unfinished, texts, target.tokenizer, str(config.path or config.source), told, config.tokens)
        unfinished.rename(folder)
    except OSError as error:
        raise InputError(f"folder={config.folder} cannot be written ({error}); make room or give another") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return (
        f"{card.tokens:,} tokens of {card.texts:,} texts in {folder}; use it with "
        f"model={config.model.name} draft=rest draft.drafter.datastore={config.folder}"
    )


def _texts(config: DatastoreConfig) -> Iterator[str]:
    from duoexp.datastore.texts import of_data_set, of_path

    if (config.path is None) == (config.source is None):
        raise InputError("give either path=FILE_OR_FOLDER or source=DATA_SET to build a datastore from")
    if config.path is not None:
        return of_path(Path(config.path).expanduser(), config.field)
    return of_data_set(str(config.source), config.subset, config.split, config.field)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="datastore")
def launch(cfg: Any) -> None:
    try:
        print(make(OmegaConf.to_object(cfg)))  # type: ignore[arg-type]
    except InputError as error:
        if DEBUGGING:
            raise
        _failed.append(error)


def main() -> None:
    """Exit code 0: done; 2: the input cannot be used, in a sentence; 130: stopped on the way."""
    _failed.clear()
    try:
        launch()
    except KeyboardInterrupt:
        print("stopped; nothing was kept", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if DEBUGGING or not is_input(error):
            raise
        _failed.append(error)
    if _failed:
        print(f"error: {sentence(_failed[0])}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
