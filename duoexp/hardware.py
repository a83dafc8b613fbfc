"""Where each model runs: decide it, describe the machine, place and pin, measure memory."""

import contextlib
import importlib.metadata
import logging
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from omegaconf import OmegaConf

from duoexp.config import DTYPES, WORKERS, HardwareConfig, InputError, SideConfig

log = logging.getLogger(__name__)

SIDES = ("target", "draft")
ON_DRAFT_FAILURE = ("raise", "continue")
PACKAGES = ("duoexp", "torch", "transformers", "hydra-core", "omegaconf", "wandb", "datasets", "numpy")
VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "KMP_AFFINITY")
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16", "sve_bf16"}  # x86, Arm; the kernel's and torch's spelling
CPUS = Path("/sys/devices/system/cpu")
CLEAR_REFS = Path("/proc/self/clear_refs")
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
    notes.append(f"hardware={given.name} runs as {name}: there are {_gpus()} CUDA GPUs and {_count()} cores")
    # Other devices than the profile's make another setup, which must not carry its name.
    kept = (target.device, draft.device, worker) == (chosen.target.device, chosen.draft.device, chosen.worker)
    named = name if given.name == "auto" and kept else given.name
    return HardwareConfig(named, target, draft, worker, given.on_draft_failure)


def _fitting(hardware: HardwareConfig) -> str:
    """The profile for this machine that does not contradict what the user set."""
    target, draft, gpus = hardware.target.device, hardware.draft.device, _gpus()
    if target == "cpu" or not gpus:
        return "cpu" if _count() < 2 or hardware.worker == "inline" else "cpu_split"
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
    here = ["cpu", *(f"cuda:{index}" for index in range(_gpus()))]
    full = "cuda:0" if device == "cuda" else device
    if full in here:
        return str(full)
    if re.fullmatch(r"cuda(:\d+)?", str(device)):
        built = torch.version.cuda or torch.version.hip
        cause = f"torch sees {_gpus()} CUDA GPU(s)" if built else f"torch {torch.__version__} is built without CUDA"
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
        return ("bfloat16", "float32") if _bf16_cpu() else ("float32", "bfloat16")
    if torch.version.hip or torch.cuda.get_device_capability(device) >= (8, 0):
        return ("bfloat16", "float16", "float32")
    return ("float16", "float32")


def _bf16_cpu() -> bool:
    """Whether the CPU has bfloat16 instructions: the kernel's word on Linux, torch's where it has one."""
    flags = set(re.findall(r"\w+", _cpuinfo("flags") or _cpuinfo("Features") or ""))
    return bool(BF16_FLAGS & flags) or any(_capabilities().get(flag) for flag in BF16_FLAGS)


def _capabilities() -> Mapping[str, Any]:
    """What torch knows of the CPU; nothing before torch.cpu.get_capabilities came."""
    ask: Callable[[], Mapping[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)
    return ask()


def _cores(
    sides: tuple[SideConfig, SideConfig], devices: list[str], inline: bool, notes: list[str]
) -> tuple[Cores | None, Cores | None]:
    """What each side is pinned to."""
    mask = _mask()
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
        physical.setdefault(_physical(core), []).append(core)
    groups = [physical[key] for key in sorted(physical, key=lambda key: (key[0], physical[key][0]))]
    if len(groups) == 1:
        groups = [[core] for core in mask]
    cut = (len(groups) + 1) // 2
    first, second = (tuple(sorted(core for group in half for core in group)) for half in (groups[:cut], groups[cut:]))
    return (first, second) if len(first) >= len(second) else (second, first)


def _physical(core: int) -> tuple[int, str]:
    """The socket of a core and the list of its hardware threads; the core alone where the system does not tell."""
    topology = CPUS / f"cpu{core}/topology"
    return int(_read(topology / "physical_package_id") or 0), _read(topology / "thread_siblings_list") or str(core)


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
            raise InputError(f"hardware.{name}.threads={asked} is below 1; use null or a count up to {_count()}")
    if inline:
        if target and draft and target != draft:
            raise InputError(
                f"hardware.draft.threads={draft} differs from the target's {target}, but hardware.worker=inline "
                "has one pool for both; use hardware.worker=process"
            )
        target = draft = target or draft
    available = _available(devices, cores, inline)
    for name, asked, own in zip(SIDES, (target, draft), cores, strict=True):
        most = len(own) if own else _count()
        if asked and asked > most:
            _warn(notes, f"hardware.{name}.threads={asked} are too many for {most} core(s): they wait for each other")
    return target or available[0], draft or available[1]


def _available(devices: list[str], cores: tuple[Cores | None, Cores | None], inline: bool) -> tuple[int, int]:
    """Threads that each side can have without starving the other."""
    count = _count()
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
    quota = _quota()
    if quota is not None and quota < _count():
        cause = f"a control group limits this process to the time of {quota:g} of its {_count()} core(s)"
        _warn(notes, f"{cause}, so set hardware.target.threads and hardware.draft.threads to fit")
    for device in sorted({device for device in devices if device != "cpu"}):
        used = _nvidia(device).get("used_bytes")
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


def reset_peak_memory() -> None:
    """Starts a new job's peak, so that a sweep in one process does not carry it over."""
    if _peak_resets():
        CLEAR_REFS.write_text("5")  # proc(5): sets the peak resident set size to the current one
    for device in range(_used_gpus()):
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory() -> dict[str, Any]:
    """Bytes of this process: the peak resident set since `reset_peak_memory`, and torch's peak on each GPU it used.

    `note` says when the system keeps only the peak of the process's whole life.
    """
    gpus = {f"cuda:{device}": torch.cuda.max_memory_allocated(device) for device in range(_used_gpus())}
    peak = _peak_resident("self")
    if peak and _peak_resets():
        return {"rss_bytes": peak, "gpu_bytes": gpus, "note": None}
    note = "rss_bytes is the peak of the process's whole life, which this system cannot reset"
    return {"rss_bytes": _lifetime_peak(), "gpu_bytes": gpus, "note": note}


def peak_memory_of(pid: int) -> dict[str, Any]:
    """Bytes of another process: the peak resident set of its life; what it holds now where the system keeps no peak."""
    if peak := _peak_resident(str(pid)):
        return {"rss_bytes": peak, "note": None}
    note = "rss_bytes is what the process held at its end, as this system keeps no peak"
    return {"rss_bytes": psutil.Process(pid).memory_info().rss, "note": note}


def _peak_resident(process: str) -> int | None:
    found = re.search(r"VmHWM:\s+(\d+) kB", _read(Path(f"/proc/{process}/status")) or "")
    return int(found[1]) * 1024 if found else None


def _peak_resets() -> bool:
    return os.access(CLEAR_REFS, os.W_OK)


def _used_gpus() -> int:
    """How many GPUs to ask for their memory; none before CUDA is in use, as asking would set it up."""
    return _gpus() if torch.cuda.is_initialized() else 0


def _lifetime_peak() -> int:
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere


def describe() -> dict[str, Any]:
    """The machine and what runs on it, as JSON types; null where the system does not tell. No host name."""
    return {
        "cpu": _cpu(),
        "memory": {"total_bytes": psutil.virtual_memory().total, "available_bytes": psutil.virtual_memory().available},
        "gpus": [_gpu(index) for index in range(_gpus())],
        "cuda": torch.version.cuda,
        "threads": {"torch": torch.get_num_threads(), "torch_interop": torch.get_num_interop_threads()},
        "environment": {name: os.environ.get(name) for name in VARIABLES},
        "tf32": {"matmul": _tf32(torch.backends.cuda.matmul), "cudnn": _tf32(torch.backends.cudnn)},
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "os": platform.platform(),
        "git": _git(Path(__file__).parent),
    }


def _cpu() -> dict[str, Any]:
    mask = _mask()
    governors = {_read(CPUS / f"cpu{core}/cpufreq/scaling_governor") for core in mask or ()} - {None}
    return {
        "model": _cpuinfo("model name") or _capabilities().get("cpu_name"),
        "architecture": platform.machine(),
        "cores": list(mask) if mask else None,  # the affinity mask
        "logical_cores": psutil.cpu_count(),
        "quota_cores": _quota(),
        "bfloat16": _bf16_cpu(),
        "governors": sorted(str(governor) for governor in governors) or None,
        "load": list(psutil.getloadavg()),  # over 1, 5 and 15 minutes: other work takes time from what is measured
    }


def _gpu(index: int) -> dict[str, Any]:
    device = f"cuda:{index}"
    properties = torch.cuda.get_device_properties(index)
    return {
        "device": device,
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
    } | _nvidia(device)


def _tf32(backend: Any) -> bool:
    """Whether float32 products may be rounded to TF32."""
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:  # torch refuses to read this name once the setting was made under its newer one
        return bool(backend.fp32_precision == "tf32")


def _nvidia(device: str) -> dict[str, Any]:
    """What torch does not tell without setting up a context on the GPU: its driver, and bytes in use by everyone."""
    unknown = {"driver": None, "used_bytes": None}
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", "?"))
    rows = _output("nvidia-smi", "--query-gpu=uuid,driver_version,memory.used", "--format=csv,noheader,nounits")
    for row in (rows or "").splitlines():
        name, driver, used = (cell.strip() for cell in row.split(","))
        if uuid in name:
            return {"driver": driver, "used_bytes": int(used) * 2**20 if used.isdigit() else None}
    return unknown


def _git(folder: Path) -> dict[str, Any]:
    """Commit of the checkout that tracks `folder`, and whether the folder differs from it; or why there is none."""
    git = ("git", "--no-optional-locks", "-C", str(folder))
    if _output(*git, "ls-files", "--error-unmatch", "__init__.py") is None:
        return {"commit": None, "dirty": None, "reason": "git is not here, or is not what the package came from"}
    commit, changes = _output(*git, "rev-parse", "--verify", "HEAD"), _output(*git, "status", "--porcelain", ".")
    if commit is None or changes is None:
        return {"commit": None, "dirty": None, "reason": "the checkout has no commit yet, or git does not answer"}
    return {"commit": commit, "dirty": bool(changes), "reason": None}


def _output(*command: str) -> str | None:
    """What a command prints; None when it is not there, fails or takes more than 10 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _mask() -> Cores | None:
    """The cores that this process may use; None where the system has no affinity calls."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None


def _count() -> int:
    return len(_mask() or ()) or psutil.cpu_count() or 1


def _quota() -> float | None:
    """Cores' worth of time that a container may use, which the affinity mask does not show; None without a limit."""
    limit, _, period = (_read(Path("/sys/fs/cgroup/cpu.max")) or "max").partition(" ")
    return None if limit == "max" else int(limit) / int(period)


def _cpuinfo(field: str) -> str | None:
    """The first value of a field of /proc/cpuinfo."""
    found = re.search(rf"^{field}\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")) or "", re.MULTILINE)
    return found[1] if found else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
