"""`python -m duoexp.doctor KEY=VALUE`: looks at what `python -m duoexp KEY=VALUE` would need, and runs nothing."""

import logging
import os
import sys

import hydra
from omegaconf import DictConfig
from rich.table import Table

from duoexp.config import CONF, register
from duoexp.errors import tell

register()
_codes: list[int] = []


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def launch(cfg: DictConfig) -> None:
    from duoexp.doctor.checks import Finding, examine  # not before Hydra has answered --help: torch takes seconds
    from duoexp.terminal import console

    shown, found = console(), Table(show_lines=False, title="duoexp on this machine", title_justify="left")
    for name in ("", "what", "found", "what to do"):
        found.add_column(name)
    findings: list[Finding] = list(examine(cfg))
    for each in findings:
        found.add_row(each.mark, each.what, each.found, each.cure or "", style="bold" if each.stops else "")
    shown.print(found)
    stops = [each.what for each in findings if each.stops]
    shown.print(f"it cannot run: see {', '.join(stops)}" if stops else "it can run", markup=False)
    _codes.append(int(bool(stops)))


def main() -> None:
    """Exit code 0: the command would run; 1: something stops it; 2: the input is wrong."""
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s: %(message)s")
    _codes.clear()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that errors of composing reach this place
    try:
        launch()
    except Exception as error:
        sys.exit(tell(error))
    finally:
        os.environ.pop("HYDRA_FULL_ERROR", None)
    sys.exit(max(_codes, default=0))


if __name__ == "__main__":
    main()
