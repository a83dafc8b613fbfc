"""What else goes on while a run measures: others' work, throttling, energy."""

import time
from pathlib import Path

import pytest

from duoexp import machine, meters, nvml
from duoexp.meters import Conditions, Energy, Watch, disturbances


def conditions(others_s: float = 0.0, stolen_s: float = 0.0, throttled: tuple[str, ...] = ()) -> Conditions:
    return Conditions(seconds=10.0, cores=4, others_s=others_s, stolen_s=stolen_s, throttled=throttled)


def test_a_quiet_machine_is_not_marked() -> None:
    assert disturbances([conditions(others_s=1.0, stolen_s=0.1)] * 3) == []
    assert disturbances([]) == []


def test_a_loaded_stolen_or_throttled_machine_is_marked_with_how_much() -> None:
    turns = [conditions(others_s=10, stolen_s=2), conditions(others_s=10, throttled=("cpu", "cuda:0")), conditions()]
    assert disturbances(turns) == [
        "other programs took 17% of the cores' time",
        "cpu was throttled in 1 of 3 turns",
        "cuda:0 was throttled in 1 of 3 turns",
    ]
    assert disturbances([conditions(stolen_s=2)]) == ["the hypervisor took 5% of the cores' time"]


def test_a_process_does_not_take_its_own_work_for_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound: the system's clocks tick a hundred times a second."""
    busy = iter((100.0, 103.0))
    monkeypatch.setattr(
        meters._Counters, "read", lambda: meters._Counters(next(clock), next(busy), 0.0, next(own), next(throttles))
    )
    clock, own, throttles = iter((0.0, 2.0)), iter((10.0, 12.5)), iter((7, 7))
    watch = Watch(["cpu"])
    assert watch.conditions() == Conditions(2.0, machine.cores(), 0.5, 0.0, ())


def test_own_work_is_counted() -> None:
    before, end = meters._Counters.read(), time.process_time() + 0.2
    while time.process_time() < end:
        pass
    now = meters._Counters.read()
    assert now.own_s - before.own_s >= 0.15 and now.busy_s - before.busy_s >= 0.15


def package(root: Path, number: int, microjoules: int) -> Path:
    folder = root / f"intel-rapl:{number}"
    folder.mkdir(exist_ok=True)
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text("10000000\n")
    (root / f"intel-rapl:{number}:0").mkdir(exist_ok=True)  # a part of it, which would count twice
    (root / f"intel-rapl:{number}:0" / "energy_uj").write_text("1\n")
    return folder


def test_energy_is_the_sum_over_sockets_and_goes_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "POWERCAP", tmp_path)
    package(tmp_path, 0, 1_000_000)
    package(tmp_path, 1, 9_000_000)
    energy = Energy(["cpu"])
    package(tmp_path, 0, 3_000_000)
    package(tmp_path, 1, 500_000)
    assert energy.joules().cpu == pytest.approx(2 + 1.5)
    assert energy.joules().gpu is None and energy.reasons == {"gpu": "no GPU is used"}


def test_energy_that_is_not_told_is_none_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "POWERCAP", tmp_path)
    energy = Energy(["cpu"])
    assert energy.joules() == meters.Joules(None, None) and "RAPL" in energy.reasons["cpu"]
    package(tmp_path, 0, 1)

    def denied(*_: object) -> str:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", denied)
    assert "root alone" in Energy(["cpu"]).reasons["cpu"]


def test_energy_of_gpus_is_nvmls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "POWERCAP", tmp_path)
    monkeypatch.setattr(nvml, "handle", lambda device: device)
    with monkeypatch.context() as patch:
        patch.setattr(nvml, "energy_j", lambda _: None)
        assert "NVML" in Energy(["cuda:0"]).reasons["gpu"]
    values = iter((1.0, 1.0, 4.5))
    monkeypatch.setattr(nvml, "energy_j", lambda _: next(values))
    energy = Energy(["cuda:0", "cpu", "cuda:0"])
    assert energy.joules().gpu == 3.5
