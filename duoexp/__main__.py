"""Hydra's entry: `python -m duoexp`, and the command `duoexp`."""

import logging
import os
import sys
from pathlib import Path

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from duoexp.config import InputError, register

_HERE = Path(__file__).parent
CONF = _HERE / "conf" if (_HERE / "conf").is_dir() else _HERE.parent / "conf"  # installed, or a checkout

register()


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def launch(cfg: DictConfig) -> None:
    from duoexp.runner import run  # not before Hydra has answered --help and the like: torch takes seconds

    run(cfg, CONF / "hardware")


def main() -> None:
    """Exit code 0: the result stands; 1: it does not; 2: the input cannot be run."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        launch()
        return
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that errors reach this place, which tells them in a sentence
    try:
        launch()
    except (InputError, HydraException, OmegaConfBaseException) as error:
        sys.exit(_told(error, 2))
    except RuntimeError as error:
        if type(error).__name__ not in ("RunFailed", "DraftFailed"):
            raise
        sys.exit(_told(error, 1))


def _told(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
