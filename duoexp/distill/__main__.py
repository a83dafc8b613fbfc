"""`python -m duoexp.distill model=NAME`: makes a draft for a target."""

import sys
from collections.abc import Callable

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from duoexp.__main__ import CONF, DEBUGGING
from duoexp.config import InputError
from duoexp.distill.settings import register
from duoexp.errors import is_input
from duoexp.masking import masked_override

register()
_failed: list[Exception] = []  # at most one: Hydra would print a traceback of it


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="distill")
def launch(cfg: DictConfig) -> None:
    from duoexp.distill.recipe import run  # not before Hydra has answered --help and the like: torch takes seconds

    command = " ".join(["python -m duoexp.distill", *map(masked_override, HydraConfig.get().overrides.task)])
    told(lambda: print(run(cfg, command)))  # type: ignore[arg-type]


def told(job: Callable[[], None]) -> None:
    """Keeps an InputError of the job for `end`."""
    try:
        job()
    except InputError as error:
        if DEBUGGING:
            raise
        _failed.append(error)


def end(launch: Callable[[], None]) -> None:
    """Runs a Hydra entry. Exit code 0: done; 2: the input cannot be run, in a sentence; 130: stopped on the way."""
    _failed.clear()
    try:
        launch()
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if DEBUGGING or not is_input(error):
            raise
        _failed.append(error)
    if _failed:
        print(f"error: {' '.join(str(_failed[0]).split())}", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    end(launch)


if __name__ == "__main__":
    main()
