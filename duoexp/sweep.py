"""A sweep: Hydra says which jobs there are and where; each is run here, in its own process, and told of in a table.

`job` is what every launcher runs, so that jobs end, are retried, resumed and recorded alike under all of them.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from rich.markup import escape
from rich.table import Table

from duoexp import child
from duoexp.config import CONF, InputError, SweepConfig, check_name, check_sweep
from duoexp.errors import is_interrupt, is_told, sentence, tell, told
from duoexp.masking import masked, masked_override
from duoexp.record import writing

if TYPE_CHECKING:
    from duoexp.runner import Plan
    from duoexp.slots import Slot

COMMAND = (sys.executable, "-m", "duoexp.job")


class JobFailed(RuntimeError):
    """For a sweeper that must know; what failed is in the job's record."""


@dataclass(frozen=True)
class Job:
    """A line of the table. status: done, failed, skipped, interrupted, planned; `reason` says why in a line."""

    number: int
    overrides: tuple[str, ...]
    status: str
    reason: str | None = None
    folder: str | None = None  # of the run
    log: str | None = None  # all that the process printed
    seconds: float | None = None
    attempts: int = 0
    speedup: float | None = None
    interval: tuple[float, float] | None = None
    disturbed: bool = False  # its times are in doubt: why is in its summary


class Begun(Callback):
    """Hydra's callback: remembers where the sweep's records are, which `end` tells of."""

    folder: Path | None = None
    report = True

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        code = told(lambda: check_name(config.name)) or told(lambda: check_secrets(config))
        if code:  # before Hydra makes the folder; it would turn an exception of a callback into a warning
            sys.exit(code)
        Begun.folder, Begun.report = Path(config.hydra.sweep.dir), config.sweep.report


def check_secrets(config: DictConfig) -> None:
    """Raises InputError where the launcher would write a secret to disk: submitit pickles the settings as given."""
    if "submitit" not in str(config.hydra.launcher._target_):
        return
    given: dict[str, Any] = OmegaConf.to_container(config)  # type: ignore[assignment]  # as given, not what it refers to
    overrides = given.pop("hydra")["overrides"]["task"]
    hidden = [shown for each in overrides if (shown := masked_override(each)) != each]
    if hidden or masked(given) != given:
        raise InputError(
            f"{hidden[0] if hidden else 'a file of the config'} holds a secret, and submitit would write it to disk; "
            "give it in a variable of the environment, as 'key=${oc.env:NAME}'"
        )


def prefer_own_configs() -> None:
    """Makes Hydra take the launchers and sweepers of `conf/hydra` for themselves.

    It would take a plugin's config of the same name for their schema, and warn of that or refuse it.
    """
    Plugins.instance()  # imports the plugins, each of which stores its config
    for group in ("launcher", "sweeper"):
        stored = ConfigStore.instance().repo["hydra"][group]
        for file in (CONF / "hydra" / group).glob("*.yaml"):
            stored.pop(file.name, None)


def job(cfg: DictConfig) -> float | None:
    """Runs one job and writes its record into the sweep's folder; returns its speedup.

    A failure is recorded, and raised only for a sweeper other than Hydra's basic one, which would end the sweep.
    Raises InputError for wrong settings of the sweep itself.
    """
    hydra = HydraConfig.get()
    os.chdir(hydra.runtime.cwd)  # a launcher's worker may live elsewhere
    settings: SweepConfig = OmegaConf.to_object(cfg.sweep)  # type: ignore[assignment]
    check_sweep(settings)
    folder, number = Path(hydra.sweep.dir), int(hydra.job.num)
    # Hydra's copy of all settings has secrets in the clear; what it tells is in the records, and in the runs' configs.
    (folder / "multirun.yaml").unlink(missing_ok=True)
    overrides = tuple(masked_override(each) for each in hydra.overrides.task)
    begun = Job(number, overrides, "interrupted", log=str(folder / f"{number:03}.log"))
    alone = "BasicLauncher" in hydra.launcher._target_
    if alone:
        print(f"== {' '.join(begun.overrides)}", flush=True)
    ended = begun
    try:
        ended = _run(cfg, settings, begun, folder, alone)
    except Exception as error:
        ended = replace(begun, status="failed", reason=sentence(error))
        raise
    finally:
        _write(folder, ended)
    if not alone:
        print(f"== {' '.join(begun.overrides)}: {ended.status}", flush=True)
    if ended.status == "failed" and "BasicSweeper" not in hydra.sweeper._target_:
        raise JobFailed(ended.reason)
    return ended.speedup


def _run(cfg: DictConfig, settings: SweepConfig, begun: Job, folder: Path, shown: bool) -> Job:
    if settings.on_error == "stop" and any(each.status == "failed" for each in jobs(folder)):
        return replace(begun, status="skipped", reason="a job before it failed, and sweep.on_error=stop")
    from duoexp import runner, slots  # torch takes seconds

    try:
        plan = runner.prepare(cfg, CONF / "hardware")
    except Exception as error:  # what is wrong with this job is no fault of the others
        if is_interrupt(error):
            raise KeyboardInterrupt from error
        if not is_told(error):
            tell(error)
        return replace(begun, status="failed", reason=sentence(error), log=None)
    if settings.dry_run:
        return replace(begun, status="planned", reason=_planned(plan), log=None)
    begun = replace(begun, folder=str(plan.folder))
    if runner.stands(plan.folder):
        return replace(_done(begun), status="skipped", reason="done before")
    given: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    with slots.taken(settings.slots) as slot:
        return _attempted(given | {"resume": True}, settings, slot, begun, shown)


def _planned(plan: "Plan") -> str:
    from duoexp import runner
    from duoexp.estimate import estimate

    return "done before" if runner.stands(plan.folder) else str(estimate(plan))


def _attempted(given: dict[str, Any], settings: SweepConfig, slot: "Slot", begun: Job, shown: bool) -> Job:
    """Each attempt goes on where the one before ended."""
    said = json.dumps({"config": given, "cores": slot.cores})
    environment = {} if slot.gpu is None else {"CUDA_VISIBLE_DEVICES": _visible(slot.gpu)}
    job = replace(begun, seconds=0.0)
    while True:
        end = child.run(COMMAND, said, Path(str(job.log)), settings.timeout, shown, environment)
        job = replace(job, seconds=job.seconds + end.seconds, attempts=job.attempts + 1)  # type: ignore[operator]
        if end.reason is None:
            return _done(job)
        if end.code == 2 or job.attempts > settings.retries:  # wrong input stays wrong
            return replace(job, status="failed", reason=end.reason)


def _visible(gpu: int) -> str:
    """The name of a GPU that this process sees, for another to see it alone."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return own.split(",")[gpu] if own else str(gpu)


def _done(job: Job) -> Job:
    """With what its summary says."""
    from duoexp.metrics import FEW
    from duoexp.runner import summary_of

    folder = Path(str(job.folder))
    if not (folder / "summary.json").is_file():  # it is under the key of other sources
        return replace(job, status="failed", reason="the package was changed as the job began; run it again")
    summary = summary_of(folder)
    return replace(
        job,
        status="done",
        speedup=summary["speedup"],
        interval=(summary["speedup_low"], summary["speedup_high"]) if summary["prompts"] >= FEW else None,
        disturbed=bool(summary["disturbed"]),
    )


def _write(folder: Path, job: Job) -> None:
    """A file a job, whole or not there: jobs of other processes and machines write beside it."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{job.number:03}.json"
        draft.write_text(json.dumps(asdict(job), indent=2) + "\n")
        draft.rename(folder / f"{job.number:03}.json")


def jobs(folder: Path) -> list[Job]:
    """The jobs of a sweep that have ended so far."""
    found = [json.loads(file.read_text()) for file in sorted(folder.glob("[0-9]*.json"))]
    tuples = ("overrides", "interval")
    return [Job(**each | {name: each[name] and tuple(each[name]) for name in tuples}) for each in found]


def end() -> list[Job]:
    """Tells of all jobs of the sweep that this process ran, if it did; each failed one in a line on stderr."""
    folder, Begun.folder = Begun.folder, None
    ended = jobs(folder) if folder is not None else []
    if folder is None or not ended:
        return []
    from duoexp.terminal import console

    console().print(table(ended))
    for each, settings in zip(ended, axes(ended), strict=True):
        if each.status == "failed":
            where = f" ({each.log})" if each.log else ""
            print(f"failed: {settings}: {each.reason}{where}", file=sys.stderr, flush=True)
    print(folder, flush=True)
    _report(ended, folder / "report")
    return ended


def _report(jobs: Sequence[Job], out: Path) -> None:
    """Over the runs of this sweep's jobs, if it wants one."""
    runs = [Path(job.folder) for job in jobs if job.folder is not None and job.status in ("done", "skipped")]
    if not runs or not Begun.report:
        return
    from duoexp import report

    try:
        print(report.write(runs, out), flush=True)
    except Exception as error:  # the results are on disk, and `python -m duoexp.report` can be asked again
        print("no report was written", file=sys.stderr)
        tell(error)


def table(jobs: Sequence[Job]) -> Table:
    """A line a job."""
    from duoexp.metrics import in_words

    counts = Counter(job.status for job in jobs)
    found = Table(title=", ".join(f"{count} {status}" for status, count in counts.items()), title_justify="left")
    for name in ("job", "settings", "status", "speedup", "time", "folder, or why not"):
        wide = name in ("settings", "folder, or why not")
        found.add_column(name, justify="right" if name in ("job", "speedup", "time") else "left", no_wrap=not wide)
    for job, settings in zip(jobs, axes(jobs), strict=True):
        speedup = "-" if job.speedup is None else in_words(job.speedup, job.interval)
        status = f"{job.status}, disturbed" if job.disturbed else job.status
        time = "-" if job.seconds is None else f"{job.seconds:.0f} s"
        found.add_row(str(job.number), escape(settings), status, speedup, time, escape(job.reason or job.folder or ""))
    return found


def axes(jobs: Sequence[Job]) -> list[str]:
    """The overrides of each job that not all of them share; all of them where there is one job."""
    common = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    return [" ".join(each for each in job.overrides if each not in common) for job in jobs]
