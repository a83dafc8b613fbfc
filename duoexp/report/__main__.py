"""The command: `python -m duoexp.report FOLDER...`, over all runs at or below these folders."""

import argparse
import sys
from pathlib import Path

from duoexp.config import InputError
from duoexp.report.page import write


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: the report is written; 2: the input was wrong."""
    parser = argparse.ArgumentParser("python -m duoexp.report", description="Tables and pictures over runs.")
    parser.add_argument("folders", nargs="+", type=Path, help="folders of runs, or above runs")
    parser.add_argument(
        "--against", action="append", default=[], type=Path, metavar="FOLDER", help="runs of before, to compare with"
    )
    parser.add_argument("--out", type=Path, help="where the report goes; by default 'report' in the first folder")
    given = parser.parse_args(arguments)
    try:
        page = write(given.folders, given.out or given.folders[0] / "report", given.against)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
