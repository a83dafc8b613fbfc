"""The checks: each yields findings. None of them asks the network, and none changes anything."""

import importlib.metadata
import netrc
import os
import platform
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from omegaconf import DictConfig, OmegaConf
from packaging.requirements import Requirement

from duoexp import machine, tasks
from duoexp.config import CONF, Config, InputError, TaskConfig, check, check_keys
from duoexp.hardware import Place, decide
from duoexp.lm import disk_cache, sources

BUSY = 0.5  # load for each core above which other programs take time from what is measured
ROOM_BYTES = 2 * 2**30  # free disk that a small model and its runs want


@dataclass(frozen=True)
class Finding:
    """`found` in words; `cure`: what to do about it, None where nothing is to be done; stops: a run would not begin."""

    what: str
    found: str
    cure: str | None = None
    stops: bool = False

    @property
    def mark(self) -> str:
        return "STOP" if self.stops else "note" if self.cure else "ok"


def examine(cfg: DictConfig) -> Iterator[Finding]:
    """What a run of this config would need. Raises InputError for a config that no machine could run."""
    check_keys(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
    config: Config = OmegaConf.to_object(cfg)  # type: ignore[assignment]
    check(config)
    yield from _processor()
    yield from _memory()
    yield from _gpus()
    yield from _packages()
    yield from _hardware(config)
    for side, source in (("model.target", config.model.target), ("model.draft", config.model.draft)):
        yield _model(side, source)
    yield _prompts(config.task)
    yield from _tracker(config)
    yield _folder("output_dir", Path(config.output_dir).expanduser())
    yield _folder("cache", disk_cache.root())


def _processor() -> Iterator[Finding]:
    about = machine.describe()["cpu"]
    cores, logical = machine.cores(), about["logical_cores"] or 1
    yield Finding("processor", f"{about['model'] or 'unknown'}, {about['architecture']}")
    few = "two models at the same time take two cores; use hardware=cpu" if cores < 2 else None
    taken = f", of {logical}; the affinity mask withholds the rest" if cores < logical else ""
    yield Finding("cores", f"{list(machine.mask() or range(cores))}{taken}", few)
    quota = machine.quota()
    if quota is not None and quota < cores:
        cure = "set hardware.target.threads and hardware.draft.threads to fit, or raise the limit of the container"
        yield Finding("quota", f"the time of {quota:g} of the {cores} cores", cure)
    slow = None if about["bfloat16"] else "both sides compute in float32, in twice the memory and time; nothing to mend"
    yield Finding("bfloat16", "has its instructions" if about["bfloat16"] else "lacks its instructions", slow)
    load = psutil.getloadavg()[0]
    busy = "wait for other programs, or end them: times would not stand" if load > BUSY * cores else None
    yield Finding("load", f"{load:.1f} over the last minute", busy)
    if about["governors"] not in (None, ["performance"]):
        cure = "`cpupower frequency-set -g performance` makes times steadier"
        yield Finding("frequency", f"governor {', '.join(about['governors'])}", cure)
    fixed = [f"{name}={os.environ[name]}" for name in machine.VARIABLES if "THREADS" in name and name in os.environ]
    if fixed:
        cure = "nothing: threads are hardware.target.threads and hardware.draft.threads all the same"
        yield Finding("environment", ", ".join(fixed), cure)


def _memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    short = "end other programs, or choose a smaller model" if memory.available < ROOM_BYTES else None
    yield Finding("memory", f"{_size(memory.available)} of {_size(memory.total)} available", short)


def _gpus() -> Iterator[Finding]:
    for index in range(machine.gpus()):
        device = f"cuda:{index}"
        properties, used = torch.cuda.get_device_properties(index), machine.in_use_bytes(device)
        taken = "" if used is None else f", {_size(used)} in use"
        crowded = (
            "another program may run on it: choose another hardware.target.device" if used and used > 2**30 else None
        )
        yield Finding(device, f"{properties.name}, {_size(properties.total_memory)}{taken}", crowded)
    if machine.gpus():
        return
    if shutil.which("nvidia-smi") and torch.version.cuda is None:
        cure = "install a torch that is built for CUDA (see pytorch.org), or use hardware=cpu"
        yield Finding("GPU", f"there may be one, but torch {torch.__version__} is built without CUDA", cure)
    elif torch.version.cuda is not None and (hidden := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        cure = "unset CUDA_VISIBLE_DEVICES, if it hides what you mean to use"
        yield Finding("GPU", f"none that torch sees, with CUDA_VISIBLE_DEVICES={hidden!r}", cure)
    else:
        yield Finding("GPU", "none that torch sees; hardware=auto, cpu_split and cpu do without")


def _packages() -> Iterator[Finding]:
    yield Finding("Python", platform.python_version())
    try:
        wanted = [Requirement(line) for line in importlib.metadata.requires("duoexp") or ()]
    except importlib.metadata.PackageNotFoundError:
        yield Finding("duoexp", "not installed, but run from its folder", 'pip install -e ".[test]"')
        return
    extras: dict[str, list[str]] = defaultdict(list)
    for requirement in wanted:
        fault = _fault(requirement)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", str(requirement.marker or ""))
        if extra:
            extras[extra[1]] += [fault] if fault else []
        elif fault and (requirement.marker is None or requirement.marker.evaluate()):
            yield Finding(
                requirement.name, fault, f'pip install "{requirement.name}{requirement.specifier}"', stops=True
            )
    for name, faults in extras.items():
        said = "; ".join(faults) or "installed"
        yield Finding(f"extra {name}", said, f'pip install "duoexp[{name}]", if you want it' if faults else None)


def _fault(requirement: Requirement) -> str | None:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{requirement.name} is not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} {version} is installed, and {requirement.specifier} is wanted"
    return None


def _hardware(config: Config) -> Iterator[Finding]:
    try:
        decided = decide(config.hardware, CONF / "hardware")
    except InputError as error:
        yield Finding("hardware", f"{config.hardware.name} does not fit", str(error), stops=True)
        return
    where = "in one process, in turn" if decided.worker == "inline" else "in two processes, at the same time"
    yield Finding("hardware", f"{decided.name}: {where}")
    yield Finding("target side", _side(decided.target))
    yield Finding("draft side", _side(decided.draft))
    for note in decided.notes:
        yield Finding("hardware", note)


def _side(place: Place) -> str:
    pinned = "not pinned" if place.cores is None else f"pinned to cores {list(place.cores)}"
    return f"{place.device}, {place.dtype}, {place.threads} thread(s), {pinned}"


def _model(side: str, source: str) -> Finding:
    try:
        size = sources.here(source)
    except InputError as error:
        return Finding(side, source, str(error), stops=True)
    if size is None:
        cure = (
            "nothing, with a network: the first run fetches it (a gated one after `hf auth login`); else name a folder"
        )
        return Finding(side, f"{source} is not on this machine", cure)
    return Finding(side, f"{source} is here" + (f", {_size(size)}" if size else ""))


def _prompts(task: TaskConfig) -> Finding:
    if not tasks.here(task):
        cure = "nothing, with a network: the first run fetches them; else task.path=FILE_OR_FOLDER"
        return Finding("prompts", f"{task.name}: {task.source} is not in the cache", cure)
    try:
        prompts = tasks.load(task)
    except InputError as error:
        return Finding("prompts", f"{task.name} cannot be read", str(error), stops=True)
    return Finding("prompts", f"{task.name}: {len(prompts)} of {len({prompt.kind for prompt in prompts})} kind(s)")


def _tracker(config: Config) -> Iterator[Finding]:
    if config.tracker.tracker.get("mode") != "online":
        yield Finding("tracker", f"{config.tracker.name}: needs no account")
        return
    host = re.sub(r"^https?://|/.*", "", os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    try:
        known = netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        known = False
    if known or "WANDB_API_KEY" in os.environ:
        yield Finding("tracker", f"{config.tracker.name}: a key for {host} is here")
    else:
        cure = "`wandb login`, or tracker=offline"
        yield Finding("tracker", f"{config.tracker.name}: there is no key for {host}", cure, stops=True)


def _folder(what: str, folder: Path) -> Finding:
    """Whether files can be made there, now or once its parents are made, and how much room is left."""
    nearest = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        way = "set DUOEXP_CACHE to a folder that can" if what == "cache" else "give another output_dir"
        return Finding(what, f"{folder} cannot be written", way, stops=True)
    free = shutil.disk_usage(nearest).free
    return Finding(what, f"{folder}, {_size(free)} free", "make room there" if free < ROOM_BYTES else None)


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
