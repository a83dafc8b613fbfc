"""What else went on while a prompt was decoded: other programs' work, throttling, and the energy that was drawn.

All of it is read from counters that the system keeps anyway, before and after: nothing runs beside what is measured.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from duoexp import machine, nvml

POWERCAP = Path("/sys/class/powercap")
PACKAGES = "intel-rapl:?"  # a socket each, AMD's too; their parts have one more number
BUSY = ("user", "nice", "system", "irq", "softirq")
OTHERS = 0.1  # share of the cores that others may take before a run is marked
SET_S = 0.5  # a clock that is off by so much has been set
STOLEN = 0.02  # share of the cores that a hypervisor may


@dataclass(frozen=True)
class Conditions:
    """While one turn of a prompt was decoded both ways. `others_s`, `stolen_s`: seconds of core time."""

    seconds: float
    cores: int  # that this process may use
    others_s: float  # that other programs took of them
    stolen_s: float  # that a hypervisor took
    throttled: tuple[str, ...]  # devices that ran slower for heat or for lack of power


def disturbances(conditions: Sequence[Conditions]) -> list[str]:
    """In sentences, what makes the times of a run doubtful; empty for a quiet machine."""
    core_s = sum(each.seconds * each.cores for each in conditions)
    if not core_s:
        return []
    found = []
    for seconds, who, most in (
        (sum(each.others_s for each in conditions), "other programs", OTHERS),
        (sum(each.stolen_s for each in conditions), "the hypervisor", STOLEN),
    ):
        if seconds > most * core_s:
            found.append(f"{who} took {100 * seconds / core_s:.0f}% of the cores' time")
    for device in sorted({device for each in conditions for device in each.throttled}):
        turns = sum(device in each.throttled for each in conditions)
        found.append(f"{device} was throttled in {turns} of {len(conditions)} turns")
    return found


class Setup:
    """What should stay as it was while a run lasts: the cores of both sides, their highest clock, the system's time.

    Durations come from a clock that nobody sets; the other one is only watched for what time stamps are worth.
    """

    def __init__(self, draft: int | None = None) -> None:
        """draft: the process that the drafter has for itself, if it has one."""
        self._processes = {"target": 0} | ({"draft": draft} if draft else {})
        self._was = self._read()

    def changes(self) -> list[str]:
        """In sentences; empty when all is as it was."""
        was, now = self._was, self._read()
        said = [
            f"{what} changed from {was[what]} to {now[what]}"
            for what in was.keys() - {"set_s"}
            if None not in (was[what], now[what]) and was[what] != now[what]
        ]
        if abs(moved := now["set_s"] - was["set_s"]) > SET_S:
            said.append(f"the system's clock was set by {moved:.1f} s")
        return sorted(said)

    def _read(self) -> dict[str, Any]:
        limits = {machine.read(machine.CPUS / f"cpu{core}/cpufreq/scaling_max_freq") for core in machine.mask() or ()}
        cores = {f"the cores of the {side}": _cores_of(process) for side, process in self._processes.items()}
        clock = {"the highest clock of the cores (kHz)": sorted(limit for limit in limits if limit) or None}
        return cores | clock | {"set_s": time.time() - time.perf_counter()}


def _cores_of(process: int) -> list[int] | None:
    """That it may use, 0 being this thread; None where the system does not tell, or the process is gone."""
    try:
        return sorted(os.sched_getaffinity(process)) if hasattr(os, "sched_getaffinity") else None
    except ProcessLookupError:
        return None


class Watch:
    """The conditions of what goes on between two calls."""

    def __init__(self, devices: Sequence[str]) -> None:
        """devices: of torch, those that the run uses."""
        gpus = sorted({device for device in devices if device != "cpu"})
        self._gpus = {device: handle for device in gpus if (handle := nvml.handle(device)) is not None}
        self._before = _Counters.read()

    def start(self) -> None:
        self._before = _Counters.read()

    def conditions(self) -> Conditions:
        """Since `start`."""
        before, now = self._before, _Counters.read()
        throttled = ["cpu"] if now.throttles > before.throttles else []
        throttled += [device for device, handle in self._gpus.items() if nvml.throttled(handle)]
        others_s = now.busy_s - before.busy_s - (now.own_s - before.own_s)
        return Conditions(
            seconds=now.at - before.at,
            cores=machine.cores(),
            others_s=max(0.0, others_s),  # the system's clock for it ticks a hundred times a second
            stolen_s=now.stolen_s - before.stolen_s,
            throttled=tuple(throttled),
        )


@dataclass(frozen=True)
class _Counters:
    at: float
    busy_s: float  # of the cores that this process may use
    stolen_s: float
    own_s: float  # of this process and its children
    throttles: int  # how often a core was slowed for heat

    @classmethod
    def read(cls) -> "_Counters":
        mask = machine.mask()
        times = [each for core, each in enumerate(psutil.cpu_times(percpu=True)) if mask is None or core in mask]
        return cls(
            at=time.perf_counter(),
            busy_s=sum(getattr(each, name, 0.0) for each in times for name in BUSY),
            stolen_s=sum(getattr(each, "steal", 0.0) for each in times),
            own_s=_own_s(),
            throttles=machine.throttles(),
        )


def _own_s() -> float:
    own = psutil.Process()
    times = own.cpu_times()
    ended = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return float(times.user + times.system + ended + sum(_seconds(child) for child in own.children(recursive=True)))


def _seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # it has just ended, and is among the ended ones next time
        return 0.0
    return float(times.user + times.system)


@dataclass(frozen=True)
class Joules:
    """Drawn by all processors, and by the GPUs of the run; None where the machine does not tell."""

    cpu: float | None
    gpu: float | None


class Energy:
    """Energy between two calls. `reasons` says for `cpu` and `gpu` why there is none."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.reasons: dict[str, str] = {}
        self._packages = [each for each in sorted(POWERCAP.glob(PACKAGES)) if (each / "energy_uj").exists()]
        if not self._packages:
            self.reasons["cpu"] = "the system offers no energy counter of its processors (RAPL)"
        gpus = sorted({device for device in devices if device != "cpu"})
        self._gpus = [handle for device in gpus if (handle := nvml.handle(device)) is not None]
        if not gpus:
            self.reasons["gpu"] = "no GPU is used"
        elif len(self._gpus) < len(gpus) or self._gpu() is None:
            self.reasons["gpu"] = "the driver offers no energy counter of its GPUs (NVML)"
        self.start()

    def start(self) -> None:
        self._before = (self._cpu(), self._gpu())

    def joules(self) -> Joules:
        """Since `start`."""
        cpu, gpu = self._before
        now = (self._cpu(), self._gpu())
        drawn = None if cpu is None or now[0] is None else sum(map(self._between, self._packages, cpu, now[0]))
        return Joules(drawn, None if gpu is None or now[1] is None else now[1] - gpu)

    def _cpu(self) -> list[int] | None:
        """Microjoules of each package."""
        if "cpu" in self.reasons:
            return None
        try:
            return [int((package / "energy_uj").read_text()) for package in self._packages]
        except PermissionError:
            self.reasons["cpu"] = "the energy counters of the processors (RAPL) are readable to root alone"
            return None

    @staticmethod
    def _between(package: Path, before: int, now: int) -> float:
        """Joules; the counter begins anew at its end."""
        around = int((package / "max_energy_range_uj").read_text()) if now < before else 0
        return (now - before + around) / 1e6

    def _gpu(self) -> float | None:
        if "gpu" in self.reasons or not self._gpus:
            return None
        read = [nvml.energy_j(handle) for handle in self._gpus]
        return None if None in read else sum(each for each in read if each is not None)
