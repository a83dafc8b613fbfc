"""`tracker=trackio`: a dashboard on this machine, for which nobody needs an account. See it with `trackio show`."""

import contextlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from duoexp.config import InputError
from duoexp.masking import masked
from duoexp.tracking import spared


class Trackio:
    """Trackio, into its own data base on this machine (`TRACKIO_DIR`). Silent, and without system statistics."""

    def __init__(self, project: str = "duoexp") -> None:
        try:
            import trackio  # noqa: F401
        except ImportError as error:
            raise InputError("tracker=trackio needs trackio; pip install 'duoexp[trackio]', or tracker=none") from error
        self.project = project
        self._folder = Path()
        self._run: Any = None

    def start(self, folder: Path, group: str, job_type: str, config: dict[str, Any]) -> None:
        import trackio

        settings: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False, "resume": "allow"}
        settings["config"] = masked(config) | {"method": job_type}
        with _quiet(), spared("the start of the run"):
            self._run = trackio.init(self.project, folder.name, group, **settings)
            self._folder = folder

    def log(self, metrics: dict[str, float], step: int) -> None:
        if self._run is not None:
            with _quiet(), spared("a step"):
                self._run.log({f"prompt/{name}": value for name, value in metrics.items()}, step=step)

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        import trackio

        with _quiet():
            with spared("the summary"):
                run.log(dict(_numbers(summary)) | {"exit_code": exit_code})
            with spared("the pictures and texts"):
                if media := _media(self._folder):
                    run.log(media)
            with spared("the end of the run"):
                trackio.finish()  # of the run itself alone, trackio would tell at the exit of the process again


def _media(folder: Path) -> dict[str, Any]:
    """What a run has to show, as trackio's types; nothing where it came to no answer."""
    if not (folder / "prompts.jsonl").exists():
        return {}
    import pandas
    import trackio
    from PIL import Image

    from duoexp.report.exhibits import exhibits  # matplotlib takes a second, at the end of a run

    shown, found = exhibits(folder), dict[str, Any]()
    if shown.acceptance:
        rows = pandas.DataFrame(shown.acceptance, columns=["position", "alpha", "verified"])
        found["acceptance_by_position"] = trackio.Table(dataframe=rows)
    if shown.timeline:
        found["timeline"] = trackio.Image(Image.open(io.BytesIO(shown.timeline)))
    if shown.answers:
        found["texts"] = trackio.Table(dataframe=pandas.DataFrame(shown.answers))
    return found


def _numbers(summary: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    """Its figures, by dotted names."""
    for key, value in summary.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{path}{key}.")
        elif isinstance(value, int | float):
            yield f"{path}{key}", value


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Trackio prints what it does, between the lines of a run."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
