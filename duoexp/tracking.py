"""Where a run is tracked besides its own files: Weights & Biases, online or offline, or nowhere."""

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from duoexp.config import InputError

log = logging.getLogger(__name__)

MODES = ("offline", "online")
START_S = 20.0  # how long an online start waits for the server, unless WANDB_INIT_TIMEOUT says otherwise
FINISH_S = 30.0  # how long the end of a run waits for its upload, unless WANDB_FINISH_TIMEOUT says otherwise

# A whole word of a key split at "_": hf_token and api_key hold secrets; max_new_tokens and eos_token_id do not.
SECRET = re.compile(
    r"(^|_)(token(?!_ids?(_|$))|key|apikey|secrets?|password|passwords|passwd|passphrase|credentials?)(_|$)"
)
OPEN = re.compile(r"tokenizer")  # tokenizer_key names a tokenizer


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

    def __init__(self, mode: str = "offline", project: str = "duoexp", entity: str | None = None) -> None:
        if mode not in MODES:
            raise InputError(f"tracker.tracker.mode={mode} is not known; use {' or '.join(MODES)}, or tracker=none")
        self.mode, self.project, self.entity = mode, project, entity
        self._run: Any = None

    def start(self, folder: Path, group: str, job_type: str, config: dict[str, Any]) -> None:
        """Raises InputError without a valid API key; without a network it waits START_S, warns and goes on offline."""
        if not _writable(folder):  # W&B would turn to the system's temporary folder
            log.warning("%s cannot be written, so W&B does not track the run; the run goes on", folder)
            return
        mode = os.environ.get("WANDB_MODE", "online") if self.mode == "online" else "offline"
        init = {"dir": folder, "name": os.environ.get("WANDB_NAME", folder.name), "group": group, "job_type": job_type}
        init |= {"project": self.project, "entity": self.entity, "config": masked(config)}
        # Without a network, or after the service died, a second try keeps the run on disk, for `wandb sync`.
        self._run = _begun(mode, init) or _begun("offline", init)

    def log(self, metrics: dict[str, float], step: int) -> None:
        if self._run is not None:
            with _spared("a step"):
                self._run.log(metrics, step=step)

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """Waits at most FINISH_S for an upload."""
        run, self._run = self._run, None
        if run is None:
            return
        with _spared("the summary"):
            run.summary.update(summary)
        with _spared("the end of the run"):
            run.finish(exit_code=exit_code)


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
        way = "run `wandb login`, or use tracker=offline" if "API key" in cause else "correct it, or use tracker=none"
        raise InputError(f"the tracker {init['project']} cannot start in mode {mode}: {cause}; {way}") from error
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


@contextmanager
def _spared(what: str) -> Iterator[None]:
    """Turns whatever W&B raises into a warning: the results are in the run's own files, and worth more."""
    try:
        yield
    except Exception as error:
        _warn(what, error)


def _warn(what: str, error: Exception) -> None:
    cause = " ".join(str(error).split()) or "no message"
    log.warning("W&B did not take %s (%s: %s); the run goes on", what, type(error).__name__, cause)


def masked(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with *** for the values of keys that name a secret, at any depth; None stays."""
    return {key: _masked(str(key), value) for key, value in config.items()}


def _masked(key: str, value: Any) -> Any:
    if SECRET.search(_words(key)) and not OPEN.match(_words(key)):
        return None if value is None else "***"
    if isinstance(value, dict):
        return masked(value)
    if isinstance(value, list | tuple):
        return [_masked("", item) for item in value]
    return value


def _words(key: str) -> str:
    """`key` in lower case with _ between its words: apiKey and API-KEY are api_key."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|\W+", "_", key).lower()
