"""Where each model runs: decide it, place it and pin it. The facts of the machine are `machine`'s."""

import contextlib
import logging
import os
import platform
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from omegaconf import OmegaConf

from duoexp import machine
from duoexp.config import DTYPES, WORKERS, HardwareConfig, InputError, SideConfig

log = logging.getLogger(__name__)

SIDES = ("target", "draft")
ON_DRAFT_FAILURE = ("raise", "continue")
CROWDED_BYTES = 2**30  # a GPU with so much of other programs' memory is in use; less is a desktop or a context

Cores = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """One side, everything decided. `cores` is what it is pinned to; None: not pinned."""

    device: str
    dtype: str
    threads: int
    cores: Cores | None


@dataclass(frozen=True)
class Hardware:
    """Both sides, everything decided. `notes` says in sentences what was chosen, skipped or looks wrong."""

    name: str
    target: Place
    draft: Place
    worker: str
    on_draft_failure: str
    notes: tuple[str, ...]


def decide(hardware: HardwareConfig, profiles: Path | Mapping[str, HardwareConfig]) -> Hardware:
    """Fills every null for this machine and checks every value; `profiles` is where `auto` chooses from.

    Call it before `placed`, which narrows the affinity mask that is split here. Raises InputError.
    """
    notes: list[str] = []
    hardware = _filled(hardware, profiles, notes)
    _check_choice("hardware.worker", hardware.worker, WORKERS)
    _check_choice("hardware.on_draft_failure", hardware.on_draft_failure, ON_DRAFT_FAILURE)
    sides = (hardware.target, hardware.draft)
    devices = [_device(f"hardware.{name}.device", side.device) for name, side in zip(SIDES, sides, strict=True)]
    each = (SIDES, sides, devices)
    dtypes = [_dtype(f"hardware.{name}", side.dtype, device, notes) for name, side, device in zip(*each, strict=True)]
    inline = hardware.worker == "inline"
    cores = _cores(sides, devices, inline, notes)
    threads = _threads(sides, devices, cores, inline, notes)
    _check_load(devices, inline, notes)
    target, draft = (Place(*fields) for fields in zip(devices, dtypes, threads, cores, strict=True))
    return Hardware(hardware.name, target, draft, str(hardware.worker), hardware.on_draft_failure, tuple(notes))


def _filled(given: HardwareConfig, profiles: Path | Mapping[str, HardwareConfig], notes: list[str]) -> HardwareConfig:
    """With the profile that fits the machine where a device or the worker is null; what is set stays."""
    if None not in (given.target.device, given.draft.device, given.worker):
        return given
    name = _fitting(given)
    chosen = _profile(profiles, name)
    target, draft = _over(given.target, chosen.target), _over(given.draft, chosen.draft)
    worker = given.worker or chosen.worker
    offer = f"{machine.gpus()} CUDA GPUs and {machine.cores()} cores"
    notes.append(f"hardware={given.name} runs as {name}: there are {offer}")
    # Other devices than the profile's make another setup, which must not carry its name.
    kept = (target.device, draft.device, worker) == (chosen.target.device, chosen.draft.device, chosen.worker)
    named = name if given.name == "auto" and kept else given.name
    return HardwareConfig(named, target, draft, worker, given.on_draft_failure)


def _fitting(hardware: HardwareConfig) -> str:
    """The profile for this machine that does not contradict what the user set."""
    target, draft, gpus = hardware.target.device, hardware.draft.device, machine.gpus()
    if target == "cpu" or not gpus:
        return "cpu" if machine.cores() < 2 or hardware.worker == "inline" else "cpu_split"
    if draft == "cpu":
        return "cpu_gpu"
    if gpus > 1:
        return "dual_gpu"
    return "gpu" if draft else "cpu_gpu"


def _profile(profiles: Path | Mapping[str, HardwareConfig], name: str) -> HardwareConfig:
    if isinstance(profiles, Mapping):
        return profiles[name]
    merged = OmegaConf.merge(OmegaConf.structured(HardwareConfig), OmegaConf.load(profiles / f"{name}.yaml"))
    profile = OmegaConf.to_object(merged)
    assert isinstance(profile, HardwareConfig)
    return profile


def _over(side: SideConfig, base: SideConfig) -> SideConfig:
    """`side`, with what is null in it from `base`."""
    return SideConfig(**(asdict(base) | {key: value for key, value in asdict(side).items() if value is not None}))


def _check_choice(key: str, value: str | None, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise InputError(f"{key}={value} is not known; use {_either(allowed)}")


def _device(key: str, device: str | None) -> str:
    """`device` with its index, when it is there."""
    gpus = machine.gpus()
    here = ["cpu", *(f"cuda:{index}" for index in range(gpus))]
    full = "cuda:0" if device == "cuda" else device
    if full in here:
        return str(full)
    if re.fullmatch(r"cuda(:\d+)?", str(device)):
        built = torch.version.cuda or torch.version.hip
        cause = f"torch sees {gpus} CUDA GPU(s)" if built else f"torch {torch.__version__} is built without CUDA"
    else:
        cause = "it is no device that duoexp knows"
    raise InputError(f"{key}={device} cannot be used: {cause}; use {_either(here)}, or hardware=auto")


def _dtype(side: str, dtype: str | None, device: str, notes: list[str]) -> str:
    """`dtype` when `device` can compute in it; the device's best when None."""
    able = _dtypes(device)
    if dtype is None:
        return able[0]
    if dtype not in DTYPES or dtype not in able:
        cause = f"{device} does not compute in it" if dtype in DTYPES else "it is not known"
        raise InputError(f"{side}.dtype={dtype} cannot be used: {cause}; use {_either(able)}")
    if device == "cpu" and dtype == "bfloat16" and able[0] != "bfloat16":
        _warn(notes, f"{side}.dtype=bfloat16 is emulated, this CPU lacks its instructions, so float32 is likely faster")
    return dtype


def _dtypes(device: str) -> tuple[str, ...]:
    """What `device` computes in, the best first. No float16 on a CPU: some processors sum in it, others emulate it."""
    if device == "cpu":
        return ("bfloat16", "float32") if machine.bf16_cpu() else ("float32", "bfloat16")
    if machine.bf16_gpu(device):
        return ("bfloat16", "float16", "float32")
    return ("float16", "float32")


def _cores(
    sides: tuple[SideConfig, SideConfig], devices: list[str], inline: bool, notes: list[str]
) -> tuple[Cores | None, Cores | None]:
    """What each side is pinned to."""
    mask = machine.mask()
    target, draft = (_asked_cores(name, side.cores, mask) for name, side in zip(SIDES, sides, strict=True))
    split = devices == ["cpu", "cpu"] and not inline
    if mask is None:
        if target or draft or split:
            notes.append(f"{platform.system()} has no calls to pin threads to cores, so nothing is pinned")
        return None, None
    if inline:
        if target and draft and target != draft:
            raise InputError(
                f"hardware.draft.cores={list(draft)} differ from the target's {list(target)}, but "
                "hardware.worker=inline runs both in one thread; use hardware.worker=process"
            )
        return target or draft, target or draft
    if target is None and draft is None:
        return _halves(mask) if split else (None, None)
    # A child process inherits its parent's mask, so once one side is pinned the other must be as well.
    target, draft = target or _rest(mask, draft), draft or _rest(mask, target)
    if shared := sorted(set(target) & set(draft)):
        _warn(notes, f"cores {shared} belong to the target and to the draft, so the two slow each other")
    return target, draft


def _asked_cores(name: str, cores: list[int] | None, mask: Cores | None) -> Cores | None:
    if cores is None:
        return None
    key = f"hardware.{name}.cores"
    if not cores:
        raise InputError(f"{key}=[] leaves no core to run on; use null for all of them")
    if mask and (outside := sorted(set(cores) - set(mask))):
        raise InputError(
            f"{key}={list(cores)} holds {outside}, outside this process's affinity mask; use cores of {list(mask)}"
        )
    return tuple(sorted(set(cores)))


def _rest(mask: Cores, taken: Cores | None) -> Cores:
    """The cores of the mask that are not taken; all of them when none is left."""
    return tuple(core for core in mask if core not in (taken or ())) or mask


def _halves(mask: Cores) -> tuple[Cores, Cores]:
    """Two disjoint halves, the larger first. Hardware threads of one core stay together, so halves share none."""
    if len(mask) < 2:
        raise InputError(
            f"two models on the CPU at the same time need two cores, but the affinity mask is {list(mask)}; "
            "use hardware=cpu"
        )
    physical: dict[tuple[int, str], list[int]] = {}
    for core in mask:
        physical.setdefault(machine.physical(core), []).append(core)
    groups = [physical[key] for key in sorted(physical, key=lambda key: (key[0], physical[key][0]))]
    if len(groups) == 1:
        groups = [[core] for core in mask]
    cut = (len(groups) + 1) // 2
    first, second = (tuple(sorted(core for group in half for core in group)) for half in (groups[:cut], groups[cut:]))
    return (first, second) if len(first) >= len(second) else (second, first)


def _threads(
    sides: tuple[SideConfig, SideConfig],
    devices: list[str],
    cores: tuple[Cores | None, Cores | None],
    inline: bool,
    notes: list[str],
) -> tuple[int, int]:
    """The threads of each side: what was asked, else what is available to it."""
    target, draft = (side.threads for side in sides)
    for name, asked in zip(SIDES, (target, draft), strict=True):
        if asked is not None and asked < 1:
            raise InputError(f"hardware.{name}.threads={asked} is below 1; use null or a count up to {machine.cores()}")
    if inline:
        if target and draft and target != draft:
            raise InputError(
                f"hardware.draft.threads={draft} differs from the target's {target}, but hardware.worker=inline "
                "has one pool for both; use hardware.worker=process"
            )
        target = draft = target or draft
    available = _available(devices, cores, inline)
    for name, asked, own in zip(SIDES, (target, draft), cores, strict=True):
        most = len(own) if own else machine.cores()
        if asked and asked > most:
            _warn(notes, f"hardware.{name}.threads={asked} are too many for {most} core(s): they wait for each other")
    return target or available[0], draft or available[1]


def _available(devices: list[str], cores: tuple[Cores | None, Cores | None], inline: bool) -> tuple[int, int]:
    """Threads that each side can have without starving the other."""
    count = machine.cores()
    if inline:  # in turn, so nobody starves; a GPU needs the launching thread alone
        each = len(cores[0]) if cores[0] else count
        return (each, each) if "cpu" in devices else (1, 1)
    # One core stays for the thread that launches the other side's kernels.
    free = ((count + 1) // 2, max(1, count // 2)) if devices == ["cpu", "cpu"] else (max(1, count - 1),) * 2
    target, draft = (
        1 if device != "cpu" else len(own) if own else share
        for device, own, share in zip(devices, cores, free, strict=True)
    )
    return target, draft


def _check_load(devices: list[str], inline: bool, notes: list[str]) -> None:
    """Warns of what makes times meaningless although it runs."""
    if not inline and devices[0] == devices[1] != "cpu":
        _warn(notes, f"both models run on {devices[0]} at the same time, so they slow each other")
    quota = machine.quota()
    if quota is not None and quota < machine.cores():
        cause = f"a control group limits this process to the time of {quota:g} of its {machine.cores()} core(s)"
        _warn(notes, f"{cause}, so set hardware.target.threads and hardware.draft.threads to fit")
    for device in sorted({device for device in devices if device != "cpu"}):
        used = machine.in_use_bytes(device)
        if used is not None and used - torch.cuda.memory_reserved(device) > CROWDED_BYTES:
            cause = f"{device} already holds {used / 2**30:.1f} GiB, so another program may run on it"
            _warn(notes, f"{cause}; give each of several jobs at once its own hardware.target.device")


def _warn(notes: list[str], text: str) -> None:
    notes.append(text)
    log.warning(text)


def _either(words: Sequence[str]) -> str:
    return " or ".join(words)


@contextmanager
def placed(place: Place) -> Iterator[None]:
    """Pins this thread and its pools to `place.cores`, with `place.threads` torch threads, until the end.

    A pool outlives a job, and its threads keep the mask that they were born with. So every thread that Python did not
    start is pinned too, and all get their own mask back at the end. Start other processes, such as a tracker's, before:
    a child inherits the mask. Raises RuntimeError where this torch cannot change its threads.
    """
    threads, masks = torch.get_num_threads(), _masks() if place.cores else {}
    own = threading.get_native_id()
    others = {thread.native_id for thread in threading.enumerate()} - {own}
    try:
        for thread in masks.keys() - others:
            _pin(thread, place.cores or ())
        _set_threads(place.threads)
        yield
    finally:
        torch.set_num_threads(threads)
        for thread in _masks() if masks else {}:  # those born meanwhile inherited the narrow mask
            _pin(thread, masks.get(thread, masks[own]))


def _set_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    if torch.get_num_threads() != threads:
        raise RuntimeError(
            f"{threads} torch threads were asked for but {torch.get_num_threads()} are in force, because this build of "
            "torch fixes them at their first use; start a process for each job"
        )


def _masks() -> dict[int, set[int]]:
    """The affinity mask of every thread of this process, or of this thread alone where no others can be seen."""
    if not hasattr(os, "sched_getaffinity"):
        return {}
    tasks = Path("/proc/self/task")
    threads = [int(task.name) for task in tasks.iterdir()] if tasks.exists() else [threading.get_native_id()]
    masks = {}
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            masks[thread] = set(os.sched_getaffinity(thread))
    return masks


def _pin(thread: int, cores: Iterable[int]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
        os.sched_setaffinity(thread, cores)
