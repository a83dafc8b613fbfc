"""Facts of the machine: its description, the memory that was used, and what decisions rest on."""

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

PACKAGES = ("duoexp", "torch", "transformers", "hydra-core", "omegaconf", "wandb", "datasets", "numpy")
VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "KMP_AFFINITY")
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16", "sve_bf16"}  # x86, Arm; the kernel's and torch's spelling
CPUS = Path("/sys/devices/system/cpu")
CLEAR_REFS = Path("/proc/self/clear_refs")


def describe() -> dict[str, Any]:
    """The machine and what runs on it, as JSON types; null where the system does not tell. No host name."""
    return {
        "cpu": _cpu(),
        "memory": {"total_bytes": psutil.virtual_memory().total, "available_bytes": psutil.virtual_memory().available},
        "gpus": [_gpu(index) for index in range(gpus())],
        "cuda": torch.version.cuda,
        "threads": {"torch": torch.get_num_threads(), "torch_interop": torch.get_num_interop_threads()},
        "environment": {name: os.environ.get(name) for name in VARIABLES},
        "tf32": {"matmul": _tf32(torch.backends.cuda.matmul), "cudnn": _tf32(torch.backends.cudnn)},
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "os": platform.platform(),
        "git": _git(Path(__file__).parent),
        "code": code(),
    }


def _cpu() -> dict[str, Any]:
    allowed = mask()
    governors = {read(CPUS / f"cpu{core}/cpufreq/scaling_governor") for core in allowed or ()} - {None}
    return {
        "model": _cpuinfo("model name") or _capabilities().get("cpu_name"),
        "architecture": platform.machine(),
        "cores": list(allowed) if allowed else None,  # the affinity mask
        "logical_cores": psutil.cpu_count(),
        "quota_cores": quota(),
        "bfloat16": bf16_cpu(),
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


def _git(folder: Path) -> dict[str, Any]:
    """Commit of the checkout that tracks `folder`, and whether the folder differs from it; or why there is none."""
    git = ("git", "--no-optional-locks", "-C", str(folder))
    if _output(*git, "ls-files", "--error-unmatch", "__init__.py") is None:
        return {"commit": None, "dirty": None, "reason": "git is not here, or is not what the package came from"}
    commit, changes = _output(*git, "rev-parse", "--verify", "HEAD"), _output(*git, "status", "--porcelain", ".")
    if commit is None or changes is None:
        return {"commit": None, "dirty": None, "reason": "the checkout has no commit yet, or git does not answer"}
    return {"commit": commit, "dirty": bool(changes), "reason": None}


def code() -> str:
    """16 hex digits of the package's sources as they are now, committed or not."""
    package = Path(__file__).parent
    sources = sorted(package.rglob("*.py"))
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{source.relative_to(package)}\0".encode() + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpus() -> int:
    """How many CUDA GPUs torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def mask() -> tuple[int, ...] | None:
    """The cores that this process may use; None where the system has no affinity calls."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None


def cores() -> int:
    """How many cores this process may use."""
    return len(mask() or ()) or psutil.cpu_count() or 1


def physical(core: int) -> tuple[int, str]:
    """The socket of a core and the list of its hardware threads; the core alone where the system does not tell."""
    topology = CPUS / f"cpu{core}/topology"
    return int(read(topology / "physical_package_id") or 0), read(topology / "thread_siblings_list") or str(core)


def throttles() -> int:
    """How often a core that this process may use was slowed for heat, since the system started; 0 where it is mute."""
    counts = [read(CPUS / f"cpu{core}/thermal_throttle/core_throttle_count") for core in mask() or ()]
    return sum(int(count) for count in counts if count)


def quota() -> float | None:
    """Cores' worth of time that a container may use, which the affinity mask does not show; None without a limit."""
    limit, _, period = (read(Path("/sys/fs/cgroup/cpu.max")) or "max").partition(" ")
    return None if limit == "max" else int(limit) / int(period)


def bf16_cpu() -> bool:
    """Whether the CPU has bfloat16 instructions: the kernel's word on Linux, torch's where it has one."""
    flags = set(re.findall(r"\w+", _cpuinfo("flags") or _cpuinfo("Features") or ""))
    return bool(BF16_FLAGS & flags) or any(_capabilities().get(flag) for flag in BF16_FLAGS)


def bf16_gpu(device: str) -> bool:
    """Whether a GPU computes in bfloat16."""
    return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (8, 0)


def in_use_bytes(device: str) -> int | None:
    """GPU memory in use by every program together; None where nvidia-smi does not tell."""
    used: int | None = _nvidia(device)["used_bytes"]
    return used


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
    gpu_bytes = {f"cuda:{device}": torch.cuda.max_memory_allocated(device) for device in range(_used_gpus())}
    peak = _peak_resident("self")
    if peak and _peak_resets():
        return {"rss_bytes": peak, "gpu_bytes": gpu_bytes, "note": None}
    note = "rss_bytes is the peak of the process's whole life, which this system cannot reset"
    return {"rss_bytes": _lifetime_peak(), "gpu_bytes": gpu_bytes, "note": note}


def peak_memory_of(pid: int) -> dict[str, Any]:
    """Bytes of another process: the peak resident set of its life; what it holds now where the system keeps no peak."""
    if peak := _peak_resident(str(pid)):
        return {"rss_bytes": peak, "note": None}
    note = "rss_bytes is what the process held at its end, as this system keeps no peak"
    return {"rss_bytes": psutil.Process(pid).memory_info().rss, "note": note}


def _peak_resident(process: str) -> int | None:
    found = re.search(r"VmHWM:\s+(\d+) kB", read(Path(f"/proc/{process}/status")) or "")
    return int(found[1]) * 1024 if found else None


def _peak_resets() -> bool:
    return os.access(CLEAR_REFS, os.W_OK)


def _used_gpus() -> int:
    """How many GPUs to ask for their memory; none before CUDA is in use, as asking would set it up."""
    return gpus() if torch.cuda.is_initialized() else 0


def _lifetime_peak() -> int:
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere


def _capabilities() -> Mapping[str, Any]:
    """What torch knows of the CPU; nothing before torch.cpu.get_capabilities came."""
    ask: Callable[[], Mapping[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)
    return ask()


def _cpuinfo(field: str) -> str | None:
    """The first value of a field of /proc/cpuinfo."""
    found = re.search(rf"^{field}\s*:\s*(.+)$", read(Path("/proc/cpuinfo")) or "", re.MULTILINE)
    return found[1] if found else None


def _output(*command: str) -> str | None:
    """What a command prints; None when it is not there, fails or takes more than 10 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
