"""Hydra's entry: `python -m duoexp`, and the command `duoexp`."""

import logging
import os
import signal
import sys
import traceback
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from duoexp.config import InputError, register
from duoexp.errors import is_input, is_told, sentence

_HERE = Path(__file__).parent
CONF = _HERE / "conf" if (_HERE / "conf").is_dir() else _HERE.parent / "conf"  # installed, or a checkout

DEBUGGING = os.environ.get("HYDRA_FULL_ERROR") == "1"  # the user wants tracebacks

register()
_failed: list[tuple[str, Exception]] = []  # the jobs of this process, by their overrides


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def launch(cfg: DictConfig) -> None:
    from duoexp.runner import run  # not before Hydra has answered --help and the like: torch takes seconds

    settings = HydraConfig.get()
    if settings.mode is RunMode.MULTIRUN:
        print(f"== {' '.join(settings.overrides.task)}", flush=True)
    try:
        run(cfg, CONF / "hardware")
    except Exception as error:
        if DEBUGGING or (settings.mode is RunMode.MULTIRUN and "BasicLauncher" not in settings.launcher._target_):
            raise  # a launcher with processes of its own must see that the job failed
        # Hydra would tell of the first alone: so all are kept, and `main` tells of them when the others have run.
        _failed.append((" ".join(settings.overrides.task), error))


def main() -> None:
    """Exit code 0: the result stands; 1: it does not; 2: the input cannot be run; 130: interrupted."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("duoexp").setLevel(logging.INFO)
    if DEBUGGING:
        launch()
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's end is an interrupt: files are closed
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that errors of composing reach this place
    try:
        launch()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if isinstance(error, OSError) and error.filename:  # a run tells its own; this comes of the folder of a sweep
            error = InputError(f"{error.filename} cannot be made ({error.strerror}); give another output_dir")
        if not is_input(error):
            raise
        _failed.append(("", error))
    finally:
        os.environ.pop("HYDRA_FULL_ERROR", None)
    for overrides, fault in _failed:
        if not is_told(fault):
            traceback.print_exception(fault)
        print(f"{f'failed: {overrides}' if len(_failed) > 1 else 'error'}: {sentence(fault)}", file=sys.stderr)
    if _failed:
        sys.exit(2 if all(is_input(fault) for _, fault in _failed) else 1)


if __name__ == "__main__":
    main()
