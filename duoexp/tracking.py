"""Where a run is tracked besides its own files: Weights & Biases, online or offline, trackio, or nowhere."""

import contextlib
import io
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from duoexp.config import InputError
from duoexp.masking import masked

log = logging.getLogger(__name__)

MODES = ("offline", "online")
START_S = 10.0  # how long an online start waits for the server, unless WANDB_INIT_TIMEOUT says otherwise
EXTRAS_S = 4.0  # how long it waits for the server to take pictures and files
FINISH_S = 5.0  # how long the end of a run waits for its upload, unless WANDB_FINISH_TIMEOUT says otherwise
INTERRUPTED = 255  # the exit code that W&B shows as "killed"


class Tracker(Protocol):
    """Takes what a run reports. Nothing that it does may cost the run its results."""

    def start(self, folder: Path, group: str, job_type: str, config: dict[str, Any]) -> None:
        """Opens a run whose files go under `folder`. Comes before `hardware.placed`, and before any model is loaded.

        Raises InputError when the tracker is set up wrongly.
        """

    def log(self, metrics: dict[str, float], step: int) -> None:
        """One step is one prompt; steps grow."""

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """Closes the run, on every way out; a second call does nothing."""


class NoTracker:
    """Tracks nothing."""

    def start(self, folder: Path, group: str, job_type: str, config: dict[str, Any]) -> None: ...

    def log(self, metrics: dict[str, float], step: int) -> None: ...

    def finish(self, summary: dict[str, Any], exit_code: int) -> None: ...


class Wandb:
    """Weights & Biases. Silent; looks at no code and no git, and samples no system statistics, which would cost time.

    The first `start` launches W&B's service, one process for all runs of this one. It keeps the affinity mask that it
    is born with, so `start` comes before `hardware.placed`.
    """

    def __init__(
        self, mode: str = "offline", project: str = "duoexp", entity: str | None = None, tags: Sequence[str] = ()
    ) -> None:
        if mode not in MODES:
            raise InputError(f"tracker.tracker.mode={mode} is not known; use {' or '.join(MODES)}, or tracker=none")
        self.mode, self.project, self.entity, self.tags = mode, project, entity, tuple(dict.fromkeys(tags))
        self._folder = Path()
        self._run: Any = None

    def start(self, folder: Path, group: str, job_type: str, config: dict[str, Any]) -> None:
        """Raises InputError for a name that W&B refuses.

        Without a valid API key, or without a network, for which it waits START_S, it warns and goes on offline.
        """
        if not _writable(folder):  # W&B would turn to the system's temporary folder
            log.warning("%s cannot be written, so W&B does not track the run; the run goes on", folder)
            return
        asked = os.environ.get("WANDB_MODE", self.mode)
        mode = self.mode if asked == "online" else asked  # what runs offline is not sent by a setting of the machine
        config = masked(config)
        init: dict[str, Any] = {"dir": folder, "project": self.project, "entity": self.entity, "config": config}
        ours = {"name": folder.name, "run_group": group, "job_type": job_type, "tags": self.tags}
        names = {"run_group": "group"}  # what W&B calls it in `init`
        init |= {names.get(key, key): value for key, value in ours.items() if f"WANDB_{key.upper()}" not in os.environ}
        earlier = sorted(folder.glob("wandb/*run-*/run-*.wandb"))  # of a process whose run goes on in this one
        if earlier and "WANDB_RUN_ID" not in os.environ:
            init["id"] = earlier[-1].stem.removeprefix("run-")
        # Without a network, or after the service died, a second try keeps the run on disk, for `wandb sync`.
        begun = _begun(mode, init | ({"resume": "allow"} if "id" in init else {})) or _begun("offline", init)
        self._folder, self._run = folder, begun
        if self._run is not None:
            for each in earlier:  # all that it says is said anew, and one run would be sent twice
                if each.parent.name.startswith("offline-"):
                    shutil.rmtree(each.parent)
            with spared("the config"):
                self._run.config.update(_hidden(self._run.config, config))

    def log(self, metrics: dict[str, float], step: int) -> None:
        if self._run is not None:
            with spared("a step"):
                # Under names of their own: W&B lets the last of a series stand for the figure of the run.
                self._run.log({f"prompt/{name}": value for name, value in metrics.items()}, step=step)

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """Adds the pictures, texts and files of the run, and waits EXTRAS_S and FINISH_S at most for the network."""
        run, self._run = self._run, None
        if run is None:
            return
        with _environment(WANDB_DATA_DIR=run.dir, WANDB_CACHE_DIR=run.dir):  # not in a home that may be read-only
            with spared("the pictures and texts"):
                media = _media(self._folder)
                _bounded("the pictures and texts", partial(run.log, media))
            with spared("the summary"):
                run.summary.update(summary)
            _bounded("the files", partial(_keep_files, run, self._folder))
            with spared("the end of the run"):
                run.finish(exit_code=INTERRUPTED if summary.get("status") == "interrupted" else exit_code)


def _hidden(shown: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The axes that a W&B sweep hides: where its parameter is `draft`, the choice stands in place of all its keys."""
    hidden = {key: value for key, value in config.items() if isinstance(value, dict) and isinstance(shown[key], str)}
    return {"resolved": hidden} if hidden else {}


def _media(folder: Path) -> dict[str, Any]:
    """What a run has to show, as W&B's types."""
    if not (folder / "prompts.jsonl").exists():
        return {}  # it came to no answer
    import wandb
    from PIL import Image

    from duoexp.report.exhibits import exhibits  # matplotlib takes a second, at the end of a run

    shown, found = exhibits(folder), dict[str, Any]()
    if shown.acceptance:
        table = wandb.Table(["position", "alpha", "verified"], [list(row) for row in shown.acceptance])
        found["acceptance_by_position"] = wandb.plot.bar(table, "position", "alpha", "Acceptance rate by position")
    if shown.timeline:
        found["timeline"] = wandb.Image(Image.open(io.BytesIO(shown.timeline)))
    if shown.answers:
        found["texts"] = wandb.Table(list(shown.answers[0]), [list(row.values()) for row in shown.answers])
        found["texts_in_colour"] = wandb.Html(shown.html, inject=False)
    return found


def _keep_files(run: Any, folder: Path) -> None:
    """The run's own files as an artifact, by reference to where they lie; of the log, which goes on, a copy."""
    import wandb

    artifact = wandb.Artifact(f"run-{run.id}", "run", metadata={"folder": folder.name})
    for file in sorted(folder.iterdir()):
        if file.is_file():
            artifact.add_file(str(file), skip_cache=True, policy="mutable" if file.suffix == ".log" else "immutable")
    run.log_artifact(artifact)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Variables of the environment for a while, where the user has not set them."""
    ours = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _begun(mode: str, init: dict[str, Any]) -> Any:
    """A new W&B run; None, with a warning, when W&B fails. Raises InputError when it was asked for wrongly."""
    # W&B 0.31 reports its own errors and timings to its makers, even of offline runs, from a thread of this process.
    if mode == "offline":
        os.environ["WANDB_ERROR_REPORTING"] = "false"
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb  # half a second to seconds, which a run without it need not wait

    try:
        wandb.setup(wandb.Settings(silent=True))  # before the login, which would ask for a key on the console
        return wandb.init(**init, reinit="create_new", settings=wandb.Settings(**_settings(mode)))
    except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
        cause = str(error).splitlines()[0].rstrip(".")
        if "API key" in cause or isinstance(error, wandb.errors.AuthenticationError):
            log.warning("%s, so W&B keeps the run offline: run `wandb login`, and `wandb sync` to send it", cause)
            return None
        raise InputError(
            f"the tracker {init['project']} cannot start in mode {mode}: {cause}; correct it, or use tracker=none"
        ) from error
    except Exception as error:
        _warn("the start of the run" + (", so it is kept offline for `wandb sync`" * (mode != "offline")), error)
        with contextlib.suppress(Exception, SystemExit):  # what is left of a dead service cannot be closed in peace
            wandb.teardown()
        return None


def _settings(mode: str) -> dict[str, Any]:
    """W&B's settings: nothing on the console, no look at code, git or machine, and an end to every wait."""
    waits = {"init_timeout": START_S, "finish_timeout": FINISH_S}
    ours = {name: seconds for name, seconds in waits.items() if f"WANDB_{name.upper()}" not in os.environ}
    return ours | {
        "mode": mode,
        "console": "off",
        "finish_timeout_raises": True,  # else the end of the wait is silent too
        "host": os.environ.get("WANDB_HOST", ""),
        "save_code": False,
        "disable_code": True,
        "disable_git": True,
        "disable_job_creation": True,
        "x_disable_stats": True,
        "x_disable_machine_info": True,
        "x_save_requirements": False,
    }


def _bounded(what: str, action: Callable[[], object]) -> None:
    """Some of W&B's calls ask its server, and wait for it as long as they like: here EXTRAS_S at most, all together."""

    def tried() -> None:
        with spared(what):
            action()

    thread = threading.Thread(target=tried, daemon=True)
    thread.start()
    thread.join(EXTRAS_S / 2)
    if thread.is_alive():
        log.warning("the tracker did not take %s in %g s; the run goes on", what, EXTRAS_S / 2)


@contextmanager
def spared(what: str) -> Iterator[None]:
    """Turns whatever a tracker raises into a warning: the results are in the run's own files, and worth more."""
    try:
        yield
    except Exception as error:
        _warn(what, error)


def _warn(what: str, error: Exception) -> None:
    cause = " ".join(str(error).split()) or "no message"
    log.warning("the tracker did not take %s (%s: %s); the run goes on", what, type(error).__name__, cause)
