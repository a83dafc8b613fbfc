"""`python -m duoexp.compare`: this project's methods beside what a user would take instead."""

import logging
import os
import signal
import sys

import hydra
from omegaconf import DictConfig

from duoexp.__main__ import DEBUGGING
from duoexp.compare.settings import register
from duoexp.config import CONF
from duoexp.errors import tell

register()
_failed: list[Exception] = []  # at most one: Hydra would print a traceback of it


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="compare")
def launch(cfg: DictConfig) -> None:
    from duoexp.compare.race import run  # not before Hydra has answered --help and the like: torch takes seconds

    try:
        run(cfg, CONF / "hardware")
    except Exception as error:
        if DEBUGGING:
            raise
        _failed.append(error)


def main() -> None:
    """Exit code 0: the result stands; 1: it does not; 2: the input cannot be run; 130: interrupted."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("duoexp").setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's end is an interrupt: files are closed
    _failed.clear()
    if DEBUGGING:
        launch()
        return
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that errors of composing reach this place
    try:
        launch()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        _failed.append(error)
    finally:
        os.environ.pop("HYDRA_FULL_ERROR", None)
    sys.exit(max((tell(error) for error in _failed), default=0))


if __name__ == "__main__":
    main()
