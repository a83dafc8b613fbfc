"""Hydra's entry: `python -m duoexp`, and the command `duoexp`."""

import logging
import os
import signal
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from duoexp import sweep
from duoexp.config import CONF, InputError, as_text, register
from duoexp.errors import lacks_plugin, tell

DEBUGGING = os.environ.get("HYDRA_FULL_ERROR") == "1"  # the user wants tracebacks

register()
_failed: list[Exception] = []  # the run's, at most one: Hydra would print a traceback of it


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def launch(cfg: DictConfig) -> float | None:
    """The speedup, which a sweeper may maximise; None where there is none."""
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        return sweep.job(cfg)
    from duoexp.runner import run  # not before Hydra has answered --help and the like: torch takes seconds

    try:
        return run(cfg, CONF / "hardware")["speedup"]
    except Exception as error:
        if DEBUGGING:
            raise
        _failed.append(error)
        return None


def main() -> None:
    """Exit code 0: the result stands, or every job's; 1: not so; 2: the input cannot be run; 130: interrupted."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("duoexp").setLevel(logging.INFO)
    sweep.prefer_own_configs()
    sys.argv[1:] = [as_text(argument) for argument in sys.argv[1:]]
    if DEBUGGING:
        launch()
        sys.exit(int(any(job.status == "failed" for job in sweep.end())))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's end is an interrupt: files are closed
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that errors of composing reach this place
    code = 0
    try:
        launch()
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        if isinstance(error, OSError) and error.filename:  # a run tells its own; this comes of the folder of a sweep
            error = InputError(f"{error.filename} cannot be made ({error.strerror}); give another output_dir")
        if not isinstance(error, sweep.JobFailed):  # that is in the table
            _failed.append(lacks_plugin(error) or error)
    finally:
        os.environ.pop("HYDRA_FULL_ERROR", None)
    jobs = sweep.end()
    faults = [tell(error) for error in _failed]
    sys.exit(code or max(faults, default=0) or int(any(job.status == "failed" for job in jobs)))


if __name__ == "__main__":
    main()
