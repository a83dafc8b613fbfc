"""Hydra's entry: `python -m duoexp`, and the command `duoexp`."""

import logging
import os
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from duoexp.config import InputError, register

_HERE = Path(__file__).parent
CONF = _HERE / "conf" if (_HERE / "conf").is_dir() else _HERE.parent / "conf"  # installed, or a checkout

register()
_failed: list[tuple[str, Exception]] = []  # the jobs of this process: Hydra goes on after one, and tells of the first


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def launch(cfg: DictConfig) -> None:
    from duoexp.runner import run  # not before Hydra has answered --help and the like: torch takes seconds

    try:
        run(cfg, CONF / "hardware")
    except Exception as error:
        _failed.append((" ".join(HydraConfig.get().overrides.task) or "defaults", error))
        raise


def main() -> None:
    """Exit code 0: the result stands; 1: it does not; 2: the input cannot be run."""
    _log_to_console()
    told = os.environ.get("HYDRA_FULL_ERROR") != "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that an error reaches this place, which tells it in a sentence
    try:
        launch()
    except Exception as error:
        for overrides, reason in _failed[:-1] if len(_failed) > 1 else []:
            print(f"failed: {overrides}: {reason}", file=sys.stderr)
        if not told or not _is_sentence(error):
            raise
        last = f"{_failed[-1][0]}: {_failed[-1][1]}" if len(_failed) > 1 else str(error)
        print(f"{'failed' if len(_failed) > 1 else 'error'}: {last}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError | HydraException | OmegaConfBaseException) else 1)


def _is_sentence(error: Exception) -> bool:
    """Whether it says to the user what is wrong, so that a traceback would only hide it."""
    known = isinstance(error, InputError | HydraException | OmegaConfBaseException)
    return known or type(error).__name__ in ("RunFailed", "DraftFailed")  # by name: their modules load torch


def _log_to_console() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("duoexp").setLevel(logging.INFO)


if __name__ == "__main__":
    main()
