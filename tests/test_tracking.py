"""Trackers: silent, off the network when offline, one run a job, and never the reason that results are lost."""

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib
import psutil
import pytest
import torch
from conftest import composed
from hydra.utils import instantiate
from omegaconf import OmegaConf
from test_report import made
from wandb_service import KEY, Service, records

from duoexp import dashboard, tracking
from duoexp.config import InputError
from duoexp.hardware import Place, placed
from duoexp.local_tracking import Trackio
from duoexp.masking import masked
from duoexp.summary import FIGURES
from duoexp.tracking import NoTracker, Wandb

CONF = Path(__file__).parents[1] / "conf" / "tracker"
CONNECT_ANYWHERE = socket.socket.connect  # before the tests' own takes its place
FONTS = matplotlib.get_configdir()  # to find them anew in every home takes seconds
CLOSED = "http://127.0.0.1:9"  # nothing listens there: a machine without a network


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """No account, no settings of the user, and no service of an earlier test."""
    import wandb

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_BASE_URL", CLOSED)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NETRC", raising=False)
    yield
    wandb.teardown()


def written(folder: Path) -> dict[str, bytes]:
    """What each run's file holds, by its name. The service writes on after `finish`, until the process ends."""
    import wandb

    wandb.teardown()
    return {path.stem: path.read_bytes() for path in folder.glob("wandb/offline-run-*/run-*.wandb")}


@pytest.fixture
def said(caplog):
    """A function that gives what this package logged; W&B's own log goes to files, and to pytest alone."""
    return lambda: "\n".join(record.getMessage() for record in caplog.records if record.name == "duoexp.tracking")


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_yaml_says_what_it_is_and_makes_its_tracker(path, monkeypatch):
    assert path.read_text().startswith("# ")
    tracker = tracker_of(path.stem)
    assert isinstance(tracker, {"none": NoTracker, "trackio": Trackio}.get(path.stem, Wandb))
    if isinstance(tracker, Wandb):
        assert (tracker.mode, tracker.project) == ("online" if path.stem == "wandb" else "offline", "duoexp")
        assert tracker.tags == ("tiny", "cpu", "dynamic", "prompt")
        monkeypatch.setenv("WANDB_PROJECT", "mine")
        assert tracker_of(path.stem).project == "mine"
        tracker = tracker_of(path.stem, "tracker.project=theirs", "tracker.entity=them")
        assert (tracker.project, tracker.entity) == ("theirs", "them")


def tracker_of(name, *overrides):
    config = composed(f"tracker={name}", *overrides)
    assert config.tracker.name == name
    return instantiate(OmegaConf.to_container(config, resolve=True)["tracker"]["tracker"])


def test_no_tracker_leaves_nothing(tmp_path):
    tracker = NoTracker()
    tracker.start(tmp_path, "group", "none", {"a": 1})
    tracker.log({"tau": 1.0}, 0)
    tracker.finish({}, 0)
    assert not list(tmp_path.iterdir())


def test_unknown_mode_is_refused():
    with pytest.raises(InputError, match="mode=cloud is not known; use offline or online, or tracker=none"):
        Wandb(mode="cloud")


@pytest.mark.parametrize("finished", [True, False])
def test_two_runs_of_one_process_have_their_own_ids_and_configs(tmp_path, finished):  # G1
    for job in ("first", "second"):
        folder = tmp_path / job
        folder.mkdir()
        tracker = Wandb()
        config = {"draft": {"budget": [4, None], "name": f"config-of-{job}"}, "hub": {"token": "hunter2"}}
        tracker.start(folder, f"group-of-{job}", f"method-of-{job}", config)
        tracker.log({"tau": 2.5}, 0)
        if finished:
            tracker.finish({"summary-of": {job: 1.5}}, 0)
    ((one, first),) = written(tmp_path / "first").items()
    ((two, second),) = written(tmp_path / "second").items()
    assert one != two
    for data, mine, other in ((first, b"first", b"second"), (second, b"second", b"first")):
        for word in (b"config-of-", b"group-of-", b"method-of-"):
            assert word + mine in data
        assert (b"summary-of" in data) is finished
        assert b'{"budget":[4,null],"name":"config-of-' + mine in data.replace(b", ", b",").replace(b": ", b":")
        assert b"-of-" + other not in data
        assert b"hunter2" not in data


def test_files_lie_in_the_runs_folder_alone_and_name_no_host(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "gethostname", lambda: "name-of-this-host")
    (tmp_path / "run").mkdir()
    tracker = Wandb()
    tracker.start(tmp_path / "run", "group", "vanilla", {})
    tracker.finish({}, 0)
    assert {path.name for path in tmp_path.iterdir()} <= {"run", "home"}
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not any(b"name-of-this-host" in path.read_bytes() for path in files)
    assert not {"requirements.txt", "wandb-metadata.json", "output.log"} & {path.name for path in files}


def test_nothing_but_what_is_logged_is_watched(tmp_path):
    tracker = Wandb()
    tracker.start(tmp_path, "group", "vanilla", {})
    settings = tracker._run.settings
    print("words-on-the-console")
    tracker.finish({}, 0)
    (data,) = written(tmp_path).values()
    assert b"words-on-the-console" not in data and settings.console == "off"
    assert settings.x_disable_stats and settings.x_disable_machine_info  # threads and probes beside what is measured
    assert settings.disable_git and settings.disable_code and settings.save_code is False
    assert settings.disable_job_creation and not settings.run_tags


def test_finish_is_idempotent_and_comes_after_any_end(tmp_path, said):
    tracker = Wandb()
    tracker.finish({}, 0)  # before the start
    tracker.start(tmp_path, "group", "vanilla", {})
    run = tracker._run
    tracker.finish({}, 3)
    tracker.finish({"belated": 1}, 0)
    tracker.log({"tau": 1.0}, 1)
    assert run._exit_code == 3
    (data,) = written(tmp_path).values()
    assert b"belated" not in data and not said()


OFFLINE = """
import sys
from pathlib import Path
from duoexp.tracking import Wandb
for job in ("finished", "left"):
    tracker = Wandb()
    tracker.start(Path(sys.argv[1]) / job, "group", "vanilla", {"a": 1})
    tracker.log({"tau": 1.0}, 0)
    if job == "finished":
        tracker.finish({}, 1)
sys.exit(7)
"""
CONNECT = "import socket; socket.socket().connect_ex(('127.0.0.1', 9))"


def traced(folder: Path, script: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """A script in a process of its own, and every call of it and of its children that reaches for a network."""
    calls = ["-f", "-qq", "--seccomp-bpf", "-e", "trace=connect,sendto,sendmsg,sendmmsg", "-o", str(folder / "trace")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment["PYTHONPATH"] = str(CONF.parents[1])
    command = ["strace", *calls, sys.executable, "-c", script, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if not (folder / "trace").exists() or "ptrace" in done.stderr:
        pytest.skip("strace may not trace here")
    return done, re.findall(r".*AF_INET.*", (folder / "trace").read_text())


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace to see what W&B's service connects to")
def test_offline_reaches_for_no_network_prints_nothing_and_keeps_the_exit_code(tmp_path):  # H4
    for job in ("finished", "left"):
        (tmp_path / job).mkdir()
    assert traced(tmp_path, CONNECT)[1]  # the trace would show it
    done, calls = traced(tmp_path, OFFLINE)
    assert not calls
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
    assert len(written(tmp_path / "finished")) == len(written(tmp_path / "left")) == 1


@pytest.mark.parametrize(("key", "cause"), [(None, "No API key"), ("short", "API key must have")])
def test_online_without_a_valid_key_goes_on_offline(tmp_path, monkeypatch, capfd, said, key, cause):
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    started = time.perf_counter()
    tracker = Wandb(mode="online")
    tracker.start(tmp_path, "group", "vanilla", {"word": "kept"})
    tracker.finish({}, 0)
    assert time.perf_counter() - started < 10
    assert cause in said() and "`wandb login`" in said() and "`wandb sync`" in said()
    assert any(b"kept" in data for data in written(tmp_path).values())
    assert capfd.readouterr() == ("", "")


def test_wrong_project_is_refused(tmp_path):
    with pytest.raises(InputError, match="Invalid project name 'a/b'"):
        Wandb(project="a/b").start(tmp_path, "group", "vanilla", {})


def test_online_without_a_network_goes_on_offline(tmp_path, monkeypatch, said, capfd):  # G3
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
    tracker = Wandb(mode="online")
    started = time.perf_counter()
    tracker.start(tmp_path, "group", "vanilla", {"word": "kept"})
    assert time.perf_counter() - started < 2 + 5
    assert "wandb sync" in said() and KEY not in said()
    tracker.log({"tau": 1.0}, 0)
    started = time.perf_counter()
    tracker.finish({}, 0)
    assert time.perf_counter() - started < 5
    assert any(b"kept" in data for data in written(tmp_path).values())
    assert capfd.readouterr() == ("", "")


def test_mode_of_the_environment_wins_over_online(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = Wandb(mode="online")
    tracker.start(tmp_path, "group", "vanilla", {})  # no key, and none asked for
    tracker.finish({}, 0)
    assert len(written(tmp_path)) == 1


SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Stalls(BaseHTTPRequestHandler):
    '''Takes a run, and then never answers again.'''
    def do_POST(self):
        query = self.rfile.read(int(self.headers["content-length"] or 0)).decode()
        if "upsertBucket" not in query:
            time.sleep(1000)
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
        bucket = {"id": "x", "name": "r", "displayName": "r", "config": "{}", "historyLineCount": 0, "project": project}
        answer = json.dumps({"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
    do_GET = do_POST
    def log_message(self, *words): pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Stalls)
print(server.server_port, flush=True)
server.serve_forever()
"""


def test_finish_waits_no_longer_than_stated_for_a_server_that_went_away(tmp_path, monkeypatch, said):
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{int(server.stdout.readline())}")
            monkeypatch.setenv("WANDB_API_KEY", KEY)
            monkeypatch.setattr("duoexp.tracking.FINISH_S", 2.0)
            tracker = Wandb(mode="online")
            tracker.start(tmp_path, "group", "vanilla", {})
            assert not said()
            tracker.log({"tau": 1.0}, 0)
            started = time.perf_counter()
            tracker.finish({}, 0)
            assert 1 < time.perf_counter() - started < 2 + 5
            assert "did not take the end of the run (TimeoutError" in said()
        finally:
            server.kill()


@pytest.fixture
def service(monkeypatch):
    """A service on this machine, and an account with it."""
    found = Service()
    monkeypatch.setenv("WANDB_BASE_URL", found.address)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    yield found
    found.close()


SUMMARY = {"status": "finished", "speedup": 2.0, "ttft_s": {"median": 0.1}, "answers": 6}


def tracked(folder, tracker, code=0, **summary):
    """A run of a folder, as the runner tracks it; the id that W&B gave it."""
    tracker.start(folder, "a-sweep", "vanilla", {"draft": {"name": "vanilla", "budget": [1, None]}, "key": "hunter2"})
    for step in (1, 2):
        tracker.log({"speedup": 1.0 + step, "tau": 2.0}, step)
    run = tracker._run.id
    tracker.finish(SUMMARY | summary, code)
    return run


def test_service_gets_the_run_its_config_figures_pictures_texts_and_files(tmp_path, service, said):  # E4, G2
    run = tracked(made(tmp_path / "a"), Wandb(mode="online", project="p", tags=("tiny", "cpu", "cpu")))
    announced = service.runs[run]
    assert (announced["groupName"], announced["jobType"], announced["displayName"]) == ("a-sweep", "vanilla", "a")
    assert announced["tags"] == ["tiny", "cpu"] and announced["project"] == "p"
    config = json.loads(announced["config"])
    assert config["draft"]["value"] == {"name": "vanilla", "budget": [1, None]} and config["key"]["value"] == "***"
    assert [row["prompt/speedup"] for row in service.history(run) if "prompt/speedup" in row] == [2.0, 3.0]
    summary = service.summary(run)
    assert (summary["speedup"], summary["answers"], summary["ttft_s"]) == (2.0, 6, {"median": 0.1})
    assert {"acceptance_by_position", "timeline", "texts", "texts_in_colour"} <= {
        key.removesuffix("_table") for row in service.history(run) for key in row
    }
    files = {name.rpartition("_")[0].split("/")[-1]: data for name, data in service.files.items()}
    assert any(data.startswith(b"\x89PNG") for data in files.values())
    assert any("The⟦ sky is⟧".encode() in data or b"The\\u27e6" in data for data in files.values())
    assert any(b'class="drafted"' in data for data in files.values())
    assert service.exits == {run: 0} and not said()
    [artifact] = [each["input"] for each in service.of("CreateArtifact") if each["input"]["artifactTypeName"] == "run"]
    assert artifact["artifactCollectionName"] == f"run-{run}"


@pytest.mark.parametrize(("code", "status", "told"), [(0, "finished", 0), (1, "failed", 1), (1, "interrupted", 255)])
def test_service_is_told_how_the_run_ended(tmp_path, service, code, status, told):
    run = tracked(made(tmp_path / "a"), Wandb(mode="online"), code, status=status)
    assert service.exits == {run: told}


def test_a_run_without_answers_is_closed_all_the_same(tmp_path, service, said):
    run = tracked(made(tmp_path / "a", prompts=0), Wandb(mode="online"), 1)
    assert service.exits == {run: 1} and not said()


def test_files_of_offline_runs_hold_all_and_a_sync_sends_each_run_once(tmp_path, service):  # G5
    folder = made(tmp_path / "a")
    run = tracked(folder, Wandb(tags=("tiny",)))
    written(folder)
    [file] = folder.glob("wandb/offline-run-*/run-*.wandb")
    found = [(kind, getattr(record, kind)) for record in records(file) if (kind := record.WhichOneof("record_type"))]
    kinds = [kind for kind, _ in found]
    begun = found[kinds.index("run")][1]
    assert (begun.run_group, begun.job_type, begun.display_name, list(begun.tags)) == (
        "a-sweep",
        "vanilla",
        "a",
        ["tiny"],
    )
    kept = {
        entry.path
        for artifact in [each for kind, each in found if kind == "artifact"]
        for entry in artifact.manifest.contents
    }
    assert {"config.yaml", "machine.json", "summary.json", "prompts.jsonl", "rounds.jsonl"} <= kept
    assert kinds[-1] == "exit" and found[-1][1].exit_code == 0
    assert not service.calls
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "wandb", "sync", str(folder / "wandb")], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
    assert list(service.runs) == [run] and service.exits == {run: 0}
    assert [row["prompt/speedup"] for row in service.history(run) if "prompt/speedup" in row] == [2.0, 3.0]


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_a_run_that_goes_on_in_another_process_stays_one_run(tmp_path, service, mode):  # G5
    folder = made(tmp_path / "a")
    first = tracked(folder, Wandb(mode=mode), 1, status="interrupted")
    second = tracked(folder, Wandb(mode=mode))
    assert first == second
    written(folder)
    if mode == "offline":
        assert len(list(folder.glob("wandb/offline-run-*"))) == 1
        done = subprocess.run(
            [sys.executable, "-m", "wandb", "sync", str(folder / "wandb")], capture_output=True, cwd=tmp_path
        )
        assert done.returncode == 0
    assert list(service.runs) == [first] and service.exits == {first: 0}


def test_variables_of_wandb_are_respected(tmp_path, service, monkeypatch):
    for name, value in {"NAME": "n", "RUN_GROUP": "g", "JOB_TYPE": "j", "TAGS": "t", "NOTES": "o"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    run = tracked(made(tmp_path / "a"), Wandb(mode="online", tags=("tiny",)))
    keys = ("displayName", "groupName", "jobType", "tags", "notes")
    assert [service.runs[run][key] for key in keys] == ["n", "g", "j", ["t"], "o"]


def test_parameters_of_a_wandb_sweep_do_not_hide_the_config(tmp_path, monkeypatch):
    (tmp_path / "parameters.yaml").write_text("wandb_version: 1\ndraft:\n  value: vanilla\n")
    monkeypatch.setenv("WANDB_SWEEP_ID", "s")
    monkeypatch.setenv("WANDB_SWEEP_PARAM_PATH", str(tmp_path / "parameters.yaml"))
    tracker = Wandb()
    tracker.start(made(tmp_path / "a"), "group", "vanilla", {"draft": {"budget": 3}, "task": {"limit": 1}})
    config = dict(tracker._run.config)
    tracker.finish({}, 0)
    assert config["draft"] == "vanilla" and config["resolved"] == {"draft": {"budget": 3}}
    assert config["task"] == {"limit": 1}


def services() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "wandb" in child.name()]


def test_dead_service_costs_warnings_and_not_the_run_nor_the_next(tmp_path, said):
    tracker = Wandb()
    tracker.start(tmp_path, "group", "vanilla", {})
    for service in services():
        service.kill()
        service.wait()
    time.sleep(0.2)
    tracker.log({"tau": 1.0}, 0)
    tracker.finish({"tau": 1.0}, 0)
    assert "did not take" in said()
    tracker.start(tmp_path, "group", "vanilla", {"word": "of-the-next"})
    tracker.finish({}, 0)
    assert any(b"of-the-next" in data for data in written(tmp_path).values()), said()


def test_folder_that_cannot_be_written_costs_a_warning_alone(tmp_path, said, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where W&B would turn to
    (tmp_path / "file").write_text("")
    tracker = Wandb()
    tracker.start(tmp_path / "file" / "run", "group", "vanilla", {})
    tracker.log({"tau": 1.0}, 0)
    tracker.finish({}, 0)
    assert "file/run cannot be written" in said()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_no_prompt_for_a_key_on_a_terminal(tmp_path, monkeypatch, said):
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("sys.stderr", Terminal())
    tracker = Wandb(mode="online")
    tracker.start(tmp_path, "group", "vanilla", {})
    tracker.finish({}, 0)
    assert "No API key" in said()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def readline(self, size: int | None = -1, /) -> str:
        raise AssertionError("a prompt waits for an answer")


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores to pin to"
)
def test_service_started_before_placed_keeps_all_cores(tmp_path):
    mask, threads = os.sched_getaffinity(0), torch.get_num_threads()
    tracker = Wandb()
    tracker.start(tmp_path, "group", "vanilla", {})
    with placed(Place("cpu", "float32", 1, (min(mask),))):
        tracker.log({"tau": 1.0}, 0)
        for service in services():
            assert {frozenset(os.sched_getaffinity(thread.id)) for thread in service.threads()} == {frozenset(mask)}
        assert services()
    tracker.finish({}, 0)
    assert os.sched_getaffinity(0) == mask and torch.get_num_threads() == threads


SECRETS = """
token hf_token HF_TOKEN hfToken token_value api_key apiKey API-KEY apikey wandb.key access_key_id client_secret
secrets password db_password credentials
"""
OPEN = """
tokenizer tokenizer_key max_new_tokens tokens_per_second eos_token_id stop_token_ids keys monkey keyboard secretary
passwordless budget
"""


@pytest.mark.parametrize("key", SECRETS.split())
def test_secret_is_masked(key):  # G2
    config = {"hub": [{key: "hunter2", "other": 1}], key: {"deep": "hunter2"}}
    assert masked(config) == {"hub": [{key: "***", "other": 1}], key: "***"}
    assert "hunter2" in json.dumps(config)  # the caller's own is left as it was


@pytest.mark.parametrize("key", OPEN.split())
def test_what_is_no_secret_is_kept(key):
    assert masked({key: [5, "text", None]}) == {key: [5, "text", None]}


def test_secret_that_is_not_set_stays_null():
    assert masked({"token": None}) == {"token": None}


LAST = """
import os, sys, time
from pathlib import Path
from duoexp.report import exhibits  # what a run has loaded anyway
from duoexp import dashboard, tracking
from duoexp.tracking import Wandb
tracking.EXTRAS_S = tracking.FINISH_S = 1.0
tracker = Wandb(mode=sys.argv[2])
tracker.start(Path(sys.argv[1]), "group", "vanilla", {"a": 1})
tracker.log({"tau": 1.0}, 1)
print(time.time(), flush=True)
tracker.finish({"tau": 1.0}, 3)
sys.exit(3)
"""


def test_waits_for_a_service_add_up_to_ten_seconds():
    assert tracking.EXTRAS_S + tracking.FINISH_S < 10


def test_a_service_that_never_answers_costs_the_exit_no_more_than_the_stated_waits(tmp_path):  # G3
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            variables = {"WANDB_BASE_URL": f"http://127.0.0.1:{int(server.stdout.readline())}", "WANDB_API_KEY": KEY}
            done, took_s = ended(made(tmp_path / "a"), "online", variables)
        finally:
            server.kill()
    assert done.returncode == 3 and "did not take" in done.stderr, done.stderr
    assert took_s < 2 + 5, "five more for a machine that is busy"


def test_a_home_that_cannot_be_written_costs_nothing(tmp_path):  # G3
    home = tmp_path / "home"
    home.write_text("a file: not even the administrator can write below it")
    folder = made(tmp_path / "a")
    done, _ = ended(folder, "offline", {"HOME": str(home)})
    assert done.returncode == 3 and "did not take" not in done.stderr, done.stderr
    assert list(folder.glob("wandb/offline-run-*/run-*.wandb"))


def ended(folder, mode, variables):
    """A process that tracks a run, with variables of its own; how long its end took, in seconds."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"PYTHONPATH": str(CONF.parents[1]), "WANDB_INIT_TIMEOUT": "2", **variables}
    environment["MPLCONFIGDIR"] = os.environ.get(
        "MPLCONFIGDIR", matplotlib.get_configdir()
    )  # its fonts are known there
    done = subprocess.run(
        [sys.executable, "-c", LAST, str(folder), mode], capture_output=True, text=True, env=environment, timeout=60
    )
    return done, time.time() - float(done.stdout)


# W&B's sweeps, dashboard, and the dashboard of this machine


def words(parameters):
    """The command line that an agent makes of a sweep's parameters, as W&B's own code does."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    values = {
        name: {"value": each.get("value", (each.get("values") or [each.get("min")])[-1])}
        for name, each in parameters.items()
    }
    return create_sweep_command_args({"args": values})["args_no_hyphens"]


@pytest.mark.parametrize(
    "path", sorted((CONF.parents[1] / "sweeps" / "wandb").glob("*.yaml")), ids=lambda path: path.stem
)
def test_a_sweep_of_wandb_makes_commands_that_compose(path):  # G4
    from wandb.sdk.launch.sweeps.utils import load_sweep_config

    assert path.read_text().startswith("# ")
    sweep = load_sweep_config(str(path))
    assert sweep["command"][-1] == "${args_no_hyphens}" and sweep["metric"]["name"] in FIGURES
    config = composed(*words(sweep["parameters"]))
    assert config.tracker.name == "wandb" and config.name == f"wandb-{path.stem}"


def test_values_reach_hydra_by_the_rule_that_the_sweep_files_give():  # G4
    given = {"task.text": "one string", "sampling.stop": "[a,b]", "task.limit": "null", "resume": True}
    given |= {"sampling.top_p": 1e-4, "name": "'a-b'", "task.split": "'a = b'"}
    config = composed(*words({name: {"value": value} for name, value in given.items()}))
    assert (config.task.text, list(config.sampling.stop), config.task.limit) == ("one string", ["a", "b"], None)
    assert (config.resume, config.sampling.top_p, config.name, config.task.split) == (True, 1e-4, "a-b", "a = b")


def test_dashboard_shows_what_runs_send(service, capsys, monkeypatch):
    pytest.importorskip("wandb_workspaces")
    monkeypatch.setattr(socket.socket, "connect", CONNECT_ANYWHERE)  # its client runs in this process
    assert dashboard.main(["--project", "p"]) == 0
    assert capsys.readouterr().out.startswith(f"{service.address}/e/p")
    [saved] = service.of("UpsertView2")
    assert (saved["projectName"], saved["entityName"], saved["displayName"]) == ("p", "e", "duoexp")
    for key in (
        "acceptance_by_position_table",
        "timeline",
        "texts_in_colour",
        "prompt/speedup",
        "tau",
        "draft.value.name",
    ):
        assert key in saved["spec"]


def test_dashboard_without_an_account_says_so(capsys, monkeypatch):
    pytest.importorskip("wandb_workspaces")
    assert dashboard.main([]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("error: the dashboard of project duoexp") and "wandb login" in error and error.count("\n") == 1
    )


def test_dashboard_without_its_package_names_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert dashboard.main([]) == 2
    assert "pip install 'duoexp[dashboard]'" in capsys.readouterr().err


def test_trackio_keeps_a_run_on_this_machine(tmp_path, monkeypatch, capsys, said):
    trackio = pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    for module in ("trackio.utils", "trackio.sqlite_storage"):
        monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path / "data")
    folder = made(tmp_path / "a")
    tracker = Trackio("p")
    tracker.start(folder, "a-sweep", "vanilla", {"draft": {"name": "vanilla"}, "key": "hunter2"})
    tracker.log({"speedup": 2.0}, 1)
    tracker.finish({"speedup": 1.5, "ttft_s": {"median": 0.1}, "status": "finished"}, 0)
    rows = SQLiteStorage.get_logs("p", "a")
    assert trackio and rows[0]["prompt/speedup"] == 2.0 and rows[1]["ttft_s.median"] == 0.1
    assert {"timeline", "texts", "acceptance_by_position"} <= rows[-1].keys()
    config = SQLiteStorage.get_run_config("p", "a")
    assert config["key"] == "***" and config["draft"]["name"] == "vanilla" and config["_Group"] == "a-sweep"
    assert capsys.readouterr() == ("", "") and not said()


def test_trackio_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(InputError, match=r"pip install 'duoexp\[trackio\]'"):
        Trackio()


def test_ctrl_c_in_the_midst_of_a_run_is_told_to_the_service(tmp_path, service):
    """As a terminal does it: every process of the group is interrupted, W&B's service too."""
    words = ["model=tiny", "hardware=cpu", "tracker=wandb", "draft=vanilla", "task.limit=56", f"output_dir={tmp_path}"]
    words += ["sampling.max_new_tokens=256", "sampling.ignore_eos=true"]  # longer than any machine takes to get there
    environment = os.environ | {"PYTHONPATH": str(CONF.parents[1]), "MPLCONFIGDIR": FONTS}
    command = [sys.executable, "-m", "duoexp", *words]
    run = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.PIPE, text=True)
    assert run.stdout
    while not list(tmp_path.glob("runs/*/*/prompts.jsonl")):
        assert run.poll() is None
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)
    told_s = time.monotonic()
    run.communicate(timeout=60)
    assert run.returncode == 130 and time.monotonic() - told_s < 10 + 10, "ten more for a machine that is busy"
    assert list(service.exits.values()) == [255]
    [folder] = tmp_path.glob("runs/*/*")
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
