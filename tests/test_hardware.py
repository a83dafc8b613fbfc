"""Where models run: what is chosen, what is refused, and that pinning does what it says."""

import logging
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from duoexp import hardware
from duoexp.config import HardwareConfig, InputError, SideConfig
from duoexp.hardware import Hardware, Place, decide, placed

CONF = Path(__file__).parents[1] / "conf" / "hardware"
two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores to pin to"
)


@pytest.fixture
def machine(monkeypatch):
    """A function that makes this machine look like another."""

    def pretend(gpus=0, cores=(0, 1, 2, 3), capability=(9, 0), bf16=True, siblings=None, used_bytes=0):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 0)
        monkeypatch.setattr(torch.version, "cuda", "12.8" if gpus else None)
        monkeypatch.setattr("duoexp.machine.in_use_bytes", lambda device: used_bytes)
        monkeypatch.setattr("duoexp.machine.bf16_cpu", lambda: bf16)
        monkeypatch.setattr("duoexp.machine.physical", lambda core: (0, str(siblings[core] if siblings else core)))
        monkeypatch.setattr("duoexp.machine.quota", lambda: None)
        monkeypatch.setattr(os, "cpu_count", lambda: pytest.fail("os.cpu_count does not know the affinity mask"))
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores), raising=False)

    return pretend


def chosen(profile: str, **changes: object) -> Hardware:
    """The decision for a profile with `side__field=value` on top."""
    config = hardware._profile(CONF, profile)
    for path, value in changes.items():
        *parents, field = path.split("__")
        setattr(getattr(config, parents[0]) if parents else config, field, value)
    return decide(config, CONF)


@pytest.mark.parametrize(
    ("gpus", "cores", "name"),
    [(2, 8, "dual_gpu"), (8, 8, "dual_gpu"), (1, 8, "cpu_gpu"), (0, 2, "cpu_split"), (0, 1, "cpu")],
)
def test_auto_chooses_what_the_machine_offers(machine, gpus, cores, name):
    machine(gpus, cores=range(cores))
    got = chosen("auto")
    assert got.name == name
    assert (got.target, got.draft, got.worker) == (chosen(name).target, chosen(name).draft, chosen(name).worker)
    assert any(name in note for note in got.notes)


def test_auto_keeps_what_the_user_set(machine):
    machine(gpus=2)
    got = chosen("auto", draft__device="cpu", draft__threads=2, target__dtype="float16", on_draft_failure="continue")
    assert (got.name, got.target.device, got.draft.device) == ("cpu_gpu", "cuda:0", "cpu")
    assert (got.draft.threads, got.target.dtype, got.on_draft_failure) == (2, "float16", "continue")
    assert chosen("auto", target__device="cpu").name == "cpu_split"
    assert chosen("auto", target__device="cpu", worker="inline").name == "cpu"
    # A setup that is no profile's does not carry a profile's name.
    assert chosen("auto", target__device="cuda:1", draft__device="cuda:0").name == "auto"


def test_profiles_may_be_a_mapping(machine):
    machine(cores=(0,))
    profile = HardwareConfig("cpu", SideConfig("cpu", threads=1), SideConfig("cpu"), "inline")
    assert decide(HardwareConfig("auto"), {"cpu": profile}).name == "cpu"


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_profile_says_what_it_is_and_is_decided_whole(machine, path):
    machine(gpus=2)
    assert path.read_text().startswith("# ")
    got = chosen(path.stem)
    assert got.name == ("dual_gpu" if path.stem == "auto" else path.stem)
    for place in (got.target, got.draft):
        assert place.dtype == "bfloat16" and place.threads >= 1
    expected = {
        "cpu_gpu": ("cuda:0", "cpu", "process"),
        "dual_gpu": ("cuda:0", "cuda:1", "process"),
        "gpu": ("cuda:0", "cuda:0", "inline"),
        "cpu_split": ("cpu", "cpu", "process"),
        "cpu": ("cpu", "cpu", "inline"),
    }
    assert (got.target.device, got.draft.device, got.worker) == expected[got.name]


@pytest.mark.parametrize("count", range(2, 10))
def test_split_halves_are_disjoint_and_the_target_has_the_larger(machine, count):
    machine(cores=range(10, 10 + count))
    got = chosen("cpu_split")
    target, draft = got.target.cores, got.draft.cores
    assert sorted(target + draft) == list(range(10, 10 + count))
    assert 0 <= len(target) - len(draft) <= 1
    assert (got.target.threads, got.draft.threads) == (len(target), len(draft))


@pytest.mark.parametrize("siblings", [[0, 1, 2, 3, 0, 1, 2, 3], [0, 0, 1, 1, 2, 2, 3, 3]])
def test_split_halves_share_no_physical_core(machine, siblings):
    machine(cores=range(8), siblings=siblings)
    got = chosen("cpu_split")
    assert not {siblings[core] for core in got.target.cores} & {siblings[core] for core in got.draft.cores}
    assert len(got.target.cores) == len(got.draft.cores) == 4


def test_split_goes_through_one_physical_core_when_there_is_no_other(machine):
    machine(cores=(0, 1), siblings=[0, 0])
    got = chosen("cpu_split")
    assert (got.target.cores, got.draft.cores) == ((0,), (1,))


def test_split_of_one_core_is_refused(machine):
    machine(cores=(3,))
    with pytest.raises(InputError, match=r"\[3\].*hardware=cpu"):
        chosen("cpu_split")


def test_in_turn_both_have_all_cores_and_are_not_pinned(machine):
    machine()
    got = chosen("cpu")
    assert got.target == got.draft == Place("cpu", "bfloat16", 4, None)


@pytest.mark.parametrize(("cores", "threads"), [(8, 7), (2, 1), (1, 1)])
def test_draft_beside_a_gpu_leaves_a_core_to_the_launching_thread(machine, cores, threads):
    machine(gpus=1, cores=range(cores))
    got = chosen("cpu_gpu")
    assert (got.draft.threads, got.draft.cores, got.target.threads) == (threads, None, 1)


def test_draft_in_turn_with_a_gpu_has_all_cores(machine):
    machine(gpus=1)
    got = chosen("cpu_gpu", worker="inline")
    assert got.target.threads == got.draft.threads == 4


def test_more_threads_than_cores_are_warned_of_by_the_mask(machine, caplog):  # E9
    machine(cores=(0, 1))
    got = chosen("cpu", target__threads=4)
    assert got.target.threads == 4
    assert any("hardware.target.threads=4" in note and "2 core" in note for note in got.notes)
    assert "hardware.target.threads=4" in caplog.text
    got = chosen("cpu_split", draft__threads=2)
    assert any("hardware.draft.threads=2" in note and "1 core" in note for note in got.notes)
    caplog.clear()
    chosen("cpu", target__threads=2)
    assert not caplog.text


def test_quota_of_a_container_is_warned_of(machine, monkeypatch, caplog):
    machine()
    monkeypatch.setattr("duoexp.machine.quota", lambda: 1.5)
    assert any("1.5 of its 4 core" in note for note in chosen("cpu").notes)


def test_once_one_side_is_pinned_the_other_has_the_rest(machine, caplog):
    machine(gpus=1)
    got = chosen("cpu_gpu", draft__cores=[1, 2])
    assert (got.draft.cores, got.draft.threads, got.target.cores) == ((1, 2), 2, (0, 3))
    got = chosen("cpu_split", target__cores=[3])
    assert (got.target.cores, got.draft.cores) == ((3,), (0, 1, 2))
    assert not caplog.text


def test_overlapping_cores_are_warned_of(machine, caplog):
    machine()
    got = chosen("cpu_split", target__cores=[0, 1, 2], draft__cores=[2, 3])
    assert (got.target.cores, got.draft.cores) == ((0, 1, 2), (2, 3))
    assert "[2]" in caplog.text and any("[2]" in note for note in got.notes)
    chosen("cpu_split", target__cores=[0, 1, 2, 3])  # nothing is left for the draft
    assert "[0, 1, 2, 3]" in caplog.text


def test_one_gpu_for_both_at_once_and_a_gpu_in_use_are_warned_of(machine, caplog):
    machine(gpus=2)
    chosen("dual_gpu", target__device="cuda:1")
    assert "both models run on cuda:1" in caplog.text
    machine(gpus=1, used_bytes=12 * 2**30)
    chosen("gpu")
    assert "cuda:0 already holds 12.0 GiB" in caplog.text


@pytest.mark.parametrize(
    ("profile", "pretence", "dtype"),
    [
        ("gpu", {"gpus": 1, "capability": (8, 0)}, "bfloat16"),
        ("gpu", {"gpus": 1, "capability": (7, 5)}, "float16"),
        ("cpu", {"bf16": True}, "bfloat16"),
        ("cpu", {"bf16": False}, "float32"),
    ],
)
def test_dtype_is_the_best_that_the_device_computes_in(machine, profile, pretence, dtype):
    machine(**pretence)
    assert chosen(profile).target.dtype == dtype


def test_bfloat16_on_a_cpu_that_emulates_it_is_warned_of(machine, caplog):
    machine(bf16=False)
    assert chosen("cpu", draft__dtype="bfloat16").draft.dtype == "bfloat16"
    assert "hardware.draft.dtype=bfloat16" in caplog.text


@pytest.mark.parametrize(
    ("profile", "changes", "words"),
    [
        ("cpu", {"target__dtype": "fp17"}, ["hardware.target.dtype=fp17", "bfloat16 or float32"]),
        ("cpu", {"draft__dtype": "float16"}, ["hardware.draft.dtype=float16", "cpu", "bfloat16 or float32"]),
        ("cpu", {"target__threads": 0}, ["hardware.target.threads=0", "up to 4"]),
        ("cpu", {"draft__threads": -1}, ["hardware.draft.threads=-1", "up to 4"]),
        ("cpu", {"target__threads": 2, "draft__threads": 1}, ["hardware.draft.threads=1", "worker=process"]),
        ("cpu", {"target__cores": [0], "draft__cores": [1]}, ["hardware.draft.cores=[1]", "worker=process"]),
        ("cpu_split", {"draft__cores": [2, 9]}, ["hardware.draft.cores=[2, 9]", "[9]", "[0, 1, 2, 3]"]),
        ("cpu_split", {"target__cores": []}, ["hardware.target.cores=[]", "null"]),
        ("cpu", {"worker": "thread"}, ["hardware.worker=thread", "inline or process"]),
        ("cpu", {"on_draft_failure": "stop"}, ["hardware.on_draft_failure=stop", "raise or continue"]),
        ("cpu", {"target__device": "tpu"}, ["hardware.target.device=tpu", "use cpu, or hardware=auto"]),
        ("cpu", {"target__device": "cuda"}, ["hardware.target.device=cuda", "without CUDA", "use cpu"]),
        ("auto", {"target__device": "cuda"}, ["hardware.target.device=cuda", "without CUDA", "use cpu"]),
    ],
)
def test_wrong_value_names_key_value_and_what_is_allowed(machine, profile, changes, words):  # F5
    machine()
    with pytest.raises(InputError) as error:
        chosen(profile, **changes)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_gpu_that_is_not_there_or_lacks_a_dtype_is_refused(machine):
    machine(gpus=2, capability=(7, 5))
    with pytest.raises(InputError, match=r"hardware.draft.device=cuda:3 .*2 CUDA GPU.*cpu or cuda:0 or cuda:1"):
        chosen("dual_gpu", draft__device="cuda:3")
    with pytest.raises(InputError, match=r"hardware.target.dtype=bfloat16 .*cuda:0.*float16 or float32"):
        chosen("gpu", target__dtype="bfloat16")


def test_without_affinity_calls_nothing_is_pinned(machine, monkeypatch):
    machine()
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr("psutil.cpu_count", lambda: 5)
    got = chosen("cpu_split", draft__cores=[1])
    assert (got.target.cores, got.draft.cores) == (None, None)
    assert (got.target.threads, got.draft.threads) == (3, 2)
    assert any("nothing is pinned" in note for note in got.notes)
    with placed(replace(got.target, threads=1, cores=(0,))):
        assert torch.get_num_threads() == 1


def pool_masks() -> list[set[int]]:
    """The masks of this thread and of every thread that Python did not start, with torch's pool at work."""
    torch.ones(512, 512) @ torch.ones(512, 512)
    others = {thread.native_id for thread in threading.enumerate()} - {threading.get_native_id()}
    return [mask for thread, mask in hardware._masks().items() if thread not in others]


@two_cores
def test_placed_pins_the_pool_that_an_earlier_job_started(caplog):
    mask = os.sched_getaffinity(0)
    first, second, *_ = sorted(mask)
    torch.set_num_threads(2)
    assert all(found == mask for found in pool_masks())
    with placed(Place("cpu", "float32", 2, (second,))):
        assert len(pool_masks()) > 1 and all(found == {second} for found in pool_masks())
    with placed(Place("cpu", "float32", 2, (first,))):
        assert all(found == {first} for found in pool_masks())
    assert all(found == mask for found in hardware._masks().values())


@two_cores
def test_placed_restores_threads_and_masks_after_an_error():
    mask, first = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    torch.set_num_threads(2)
    with pytest.raises(ZeroDivisionError), placed(Place("cpu", "float32", 1, (first,))):
        threading.Thread(target=lambda: None).start()
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == mask and torch.get_num_threads() == 2


def test_thread_counts_of_a_sweep_in_one_process_are_in_force():  # E10
    seen = []
    for threads in (1, 2, 8, 1):
        with placed(Place("cpu", "float32", threads, None)):
            torch.ones(512, 512) @ torch.ones(512, 512)
            seen.append(torch.get_num_threads())
    assert seen == [1, 2, 8, 1]


def test_thread_count_that_torch_does_not_take_is_an_error(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    with pytest.raises(RuntimeError, match="7 torch threads"), placed(Place("cpu", "float32", 7, None)):
        pass


@two_cores
def test_placed_leaves_pythons_other_threads_alone():
    mask, stop = os.sched_getaffinity(0), threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with placed(Place("cpu", "float32", 1, (min(mask),))):
            assert os.sched_getaffinity(thread.native_id) == mask
    finally:
        stop.set()
        thread.join()


@two_cores
def test_child_inherits_the_mask_which_is_why_both_sides_are_pinned_or_none():
    first = min(os.sched_getaffinity(0))
    with placed(Place("cpu", "float32", 1, (first,))):
        child = subprocess.check_output([sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"])
    assert child.split() == [str(first).encode()]


@pytest.fixture(autouse=True)
def warnings_are_seen(caplog):
    caplog.set_level(logging.WARNING, logger="duoexp.hardware")


@pytest.fixture(autouse=True)
def threads_are_restored():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
