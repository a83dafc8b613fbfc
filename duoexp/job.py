"""A job of a sweep in its own process: `python -m duoexp.job`, which is sent its config and its cores in a line."""

import json
import logging
import os
import signal
import sys

from omegaconf import OmegaConf

from duoexp.child import die_with_parent
from duoexp.config import CONF, Config
from duoexp.errors import told


def main() -> None:
    """Exit codes as of `python -m duoexp`."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("duoexp").setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    said = json.loads(die_with_parent())
    if said["cores"] is not None:
        os.sched_setaffinity(0, said["cores"])  # before torch counts them

    def job() -> None:
        from duoexp.runner import run  # torch takes seconds

        run(OmegaConf.merge(OmegaConf.structured(Config), said["config"]), CONF / "hardware")  # type: ignore[arg-type]

    sys.exit(told(job))


if __name__ == "__main__":
    main()
