"""Every setting there is: one dataclass an axis, composed by Hydra from `conf/`, and the checks of their ranges."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from math import inf
from pathlib import Path
from typing import Any, get_type_hints

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import MISSING, OmegaConf

DTYPES = ("float32", "bfloat16", "float16")
SCHEDULES = ("serial", "overlapped")
RULES = ("match", "rejection")
WORKERS = ("inline", "process")
TEMPLATES = ("auto", "chat", "plain", "vicuna")
ENGINES = ("auto", "lean", "transformers", "static", "compiled")
VOCABULARY = ("strict", "warn", "off")
VIEWS = ("plain", "live")
BUDGETS = ("fixed", "measured", "deadline", "optimal")
BASELINES = ("paired", "cached")
ON_ERROR = ("continue", "stop")

MOST_TOKENS = 32  # of a measured target pass

_HERE = Path(__file__).parent
_ROOT = _HERE if (_HERE / "conf").is_dir() else _HERE.parent  # installed, or a checkout
CONF, SWEEPS = _ROOT / "conf", _ROOT / "sweeps"


class InputError(ValueError):
    """What the user gave cannot be run. One sentence: the value, the cause, the way out."""


@dataclass
class ModelConfig:
    """The pair. `target` and `draft` are sources: see `lm/sources.py` for their forms."""

    name: str = MISSING
    target: str = MISSING
    draft: str = MISSING
    template: str = "auto"  # how a prompt becomes text: TEMPLATES
    engine: str = (
        "auto"  # what runs both models: ENGINES; `static` and `compiled` leave a draft on a processor to `auto`
    )
    vocabulary: str = "strict"  # what to do when the two differ: VOCABULARY
    trust_remote_code: bool = False


@dataclass
class SideConfig:
    """Where one model runs. A null is chosen for the machine when the run starts, and recorded."""

    device: str | None = None  # cpu, cuda, cuda:1 ...
    dtype: str | None = None  # DTYPES
    threads: int | None = None
    cores: list[int] | None = None  # to pin to


@dataclass
class HardwareConfig:
    """Both sides, and whether the drafter lives in this process or in its own."""

    name: str = MISSING
    target: SideConfig = field(default_factory=SideConfig)
    draft: SideConfig = field(default_factory=SideConfig)
    worker: str | None = None  # WORKERS
    on_draft_failure: str = "raise"  # or "continue": go on autoregressively, and record it


@dataclass
class BudgetConfig:
    """Draft tokens a round, all sequences together: see `budget.py`."""

    kind: str = "fixed"  # BUDGETS
    tokens: int = 5  # of the kind `fixed`
    most: int = 32  # of the others


@dataclass
class DraftConfig:
    """The method: where tokens come from, in what shape, and how the two models take turns."""

    name: str = MISSING
    drafter: dict[str, Any] = MISSING  # `_target_` and its settings
    policy: dict[str, Any] | None = None
    schedule: str = "serial"
    budget: Any = MISSING  # what `budget_of` reads: a BudgetConfig, or its number or kind alone
    rule: str = "match"
    pre_verify: bool = True  # of the overlapped schedule
    post_verify: bool = True


@dataclass
class TaskConfig:
    """The prompts: a data set's name and place, or a text."""

    name: str = MISSING
    kinds: list[str] = MISSING  # the kinds of prompts inside
    path: str | None = None  # a file or folder of JSON lines; null: `source`
    source: str | None = None  # of the package (pkg://), or public: an address, or a data set with subset and split
    subset: str | None = None
    split: str = "train"
    text: str | None = None
    limit: int | None = None  # so many prompts, spread evenly; null: all
    prompt_tokens: int | None = None  # make each so long, of its own text and the others'; null: as they are


@dataclass
class SamplingConfig:
    temperature: float = 0.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int = 64
    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False


@dataclass
class ProfileConfig:
    """What measured times a run may use: see `profile/`."""

    fresh: bool = False  # measure anew, whatever was measured before
    repeats: int = 5  # of each pass; the median counts
    contexts: list[int] = field(default_factory=lambda: [64, 512, 2000])  # of `python -m duoexp.profile`, in tokens


@dataclass
class TrackerConfig:
    """`project` and `entity`: W&B's words for a group of experiments, and for whose it is."""

    name: str = MISSING
    project: str = "duoexp"
    entity: str | None = None
    tracker: dict[str, Any] = MISSING  # `_target_` and its settings


@dataclass
class SweepConfig:
    """How the jobs of a sweep are run; nothing of it changes what a job measures."""

    on_error: str = "continue"  # or "stop": ON_ERROR
    retries: int = 0  # more attempts for a job that failed, each going on where the one before ended
    timeout: float | None = None  # seconds of an attempt
    slots: int = 1  # parts of equal cores that a machine is cut in; each runs one job at a time
    dry_run: bool = False  # check every job, and start none
    report: bool = True  # write one at the end


@dataclass
class Config:
    """One experiment."""

    name: str = "default"  # the group of runs that this one belongs to
    output_dir: str = "outputs"
    model: ModelConfig = MISSING
    hardware: HardwareConfig = MISSING
    draft: DraftConfig = MISSING
    task: TaskConfig = MISSING
    tracker: TrackerConfig = MISSING
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    view: str = "plain"  # what a terminal shows of an answer: VIEWS
    repeats: int = 1  # of every prompt, each with models loaded anew and a seed of its own
    baseline: str = "paired"  # or "cached": BASELINES
    resume: bool = False  # go on with what the same config left in output_dir, as each job of a sweep does
    sweep: SweepConfig = field(default_factory=SweepConfig)


def check_keys(given: Mapping[str, Any], kind: type = Config, path: str = "") -> None:
    """Raises InputError for a key that the schema has not: what `+key=value` adds would be read by nobody."""
    known = {each.name: each.type for each in fields(kind)}
    for key, value in given.items():
        if key not in known:
            raise InputError(f"{path}{key} is no key of this config; {path[:-1] or 'it'} has {', '.join(known)}")
        inner = get_type_hints(kind)[key]
        if is_dataclass(inner) and isinstance(value, Mapping):
            check_keys(value, inner, f"{path}{key}.")  # type: ignore[arg-type]


def check(config: Config) -> None:
    """Raises InputError for the first value out of range; what depends on the machine is checked by `hardware`."""
    sampling, draft = config.sampling, config.draft
    check_name(config.name)
    budget_of(draft.budget)
    contexts = config.profile.contexts
    _within("profile.contexts", contexts, all(each > MOST_TOKENS for each in contexts), f"above {MOST_TOKENS}")
    _within("profile.repeats", config.profile.repeats, config.profile.repeats >= 1, "1 or more")
    _within("view", config.view, config.view in VIEWS, _either(VIEWS))
    _within("draft.schedule", draft.schedule, draft.schedule in SCHEDULES, _either(SCHEDULES))
    for key, on in (("pre_verify", draft.pre_verify), ("post_verify", draft.post_verify)):
        _within(f"draft.{key}", on, on or draft.schedule == "overlapped", "true, but with draft.schedule=overlapped")
    _within("draft.rule", draft.rule, draft.rule in RULES, _either(RULES))
    _within("model.template", config.model.template, config.model.template in TEMPLATES, _either(TEMPLATES))
    _within("model.engine", config.model.engine, config.model.engine in ENGINES, _either(ENGINES))
    _within("model.vocabulary", config.model.vocabulary, config.model.vocabulary in VOCABULARY, _either(VOCABULARY))
    _within("sampling.temperature", sampling.temperature, 0 <= sampling.temperature < inf, "0 (greedy) or more")
    _within("sampling.top_k", sampling.top_k, sampling.top_k >= 0, "0 (all tokens) or more")
    _within("sampling.top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0 and up to 1 (all tokens)")
    _within("sampling.max_new_tokens", sampling.max_new_tokens, sampling.max_new_tokens >= 1, "1 or more")
    length = config.task.prompt_tokens
    _within("task.prompt_tokens", length, length is None or length >= 1, "null or 1 or more")
    _within("baseline", config.baseline, config.baseline in BASELINES, _either(BASELINES))
    _within("repeats", config.repeats, config.repeats >= 1, "1 or more")
    _within("sampling.stop", sampling.stop, all(sampling.stop), "no empty string")


def check_name(name: str) -> None:
    """Raises InputError for a name that is no folder's of its own: it may not lead out of output_dir."""
    _within("name", name, bool(re.fullmatch(r"\w[\w.-]*", name)), "letters, digits, '.', '_' and '-'")


def check_sweep(sweep: SweepConfig) -> None:
    """Raises InputError for the first value out of range."""
    _within("sweep.on_error", sweep.on_error, sweep.on_error in ON_ERROR, _either(ON_ERROR))
    _within("sweep.slots", sweep.slots, sweep.slots >= 1, "1 or more")
    _within("sweep.retries", sweep.retries, sweep.retries >= 0, "0 or more")
    _within("sweep.timeout", sweep.timeout, sweep.timeout is None or sweep.timeout > 0, "null or seconds above 0")


def budget_of(given: Any) -> BudgetConfig:
    """`draft.budget` in any of its forms: a number, a kind, or a mapping. Raises InputError."""
    if isinstance(given, str):
        given = {"kind": given}
    elif not isinstance(given, Mapping):
        _within("draft.budget", given, type(given) is int and given >= 0, "0 or more")
        given = {"kind": "fixed", "tokens": given}
    check_keys(given, BudgetConfig, "draft.budget.")
    budget = BudgetConfig(**given)
    kinds = f"a whole number, {_either(BUDGETS)}"
    _within("draft.budget", budget.kind, budget.kind in BUDGETS, kinds)
    _within("draft.budget.tokens", budget.tokens, type(budget.tokens) is int and budget.tokens >= 0, "0 or more")
    fits = type(budget.most) is int and 0 <= budget.most <= MOST_TOKENS
    _within("draft.budget.most", budget.most, fits, f"0 to {MOST_TOKENS}")
    return budget


def _within(key: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise InputError(f"{key}={value!r} is out of range; allowed: {allowed}")


def _either(words: tuple[str, ...]) -> str:
    return ", ".join(words[:-1]) + " or " + words[-1]


def as_text(argument: str) -> str:
    """`key=1e3` with its value in quotes where the schema says text: Hydra would first make a number of it."""
    key, _, value = argument.partition("=")
    kind: Any = Config
    for part in key.split("."):
        kind = get_type_hints(kind).get(part) if is_dataclass(kind) else None
    if kind not in (str, str | None):
        return argument
    try:
        parsed = OverridesParser.create().parse_override(argument).value()
    except HydraException:
        return argument  # which Hydra will tell of
    guessed = isinstance(parsed, int | float) or (parsed is None and kind is str and value == "null")
    return f'{key}="{value}"' if guessed else argument


def register() -> None:
    """Makes the schema known to Hydra, which `conf/config.yaml` starts from, and the files of `sweeps` as choices."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for file in SWEEPS.glob("*.yaml"):  # not in `conf`, which is what a run is made of
        store.store(group="sweeps", name=file.stem, node=OmegaConf.load(file), package="_global_")
