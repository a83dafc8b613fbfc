"""Every setting there is: one dataclass an axis, composed by Hydra from `conf/`, and the checks of their ranges."""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

DTYPES = ("float32", "bfloat16", "float16")
SCHEDULES = ("serial", "overlapped")
RULES = ("match", "rejection")
WORKERS = ("inline", "process")
TEMPLATES = ("auto", "chat", "plain", "vicuna")


class InputError(ValueError):
    """What the user gave cannot be run. One sentence: the value, the cause, the way out."""


@dataclass
class ModelConfig:
    """The pair. `target` and `draft` are sources: see `lm/sources.py` for their forms."""

    name: str = MISSING
    target: str = MISSING
    draft: str = MISSING
    template: str = "auto"  # how a prompt becomes text: TEMPLATES
    vocabulary: str = "strict"  # what happens when the two vocabularies differ: strict, warn, off
    trust_remote_code: bool = False


@dataclass
class SideConfig:
    """Where one model runs. A null is chosen for the machine when the run starts, and recorded."""

    device: str | None = None  # cpu, cuda, cuda:1 ...
    dtype: str | None = None  # DTYPES
    threads: int | None = None
    cores: list[int] | None = None  # to pin to; null: no pinning


@dataclass
class HardwareConfig:
    """Both sides, and whether the drafter lives in this process or in its own."""

    name: str = MISSING
    target: SideConfig = field(default_factory=SideConfig)
    draft: SideConfig = field(default_factory=SideConfig)
    worker: str | None = None  # WORKERS
    on_draft_failure: str = "raise"  # or "continue": go on autoregressively, and record it


@dataclass
class DraftConfig:
    """The method: where tokens come from, in what shape, and how the two models take turns."""

    name: str = MISSING
    drafter: dict[str, Any] = MISSING  # `_target_` and its settings
    policy: dict[str, Any] | None = None
    schedule: str = "serial"
    budget: int = MISSING  # draft tokens a round, all sequences together
    rule: str = "match"


@dataclass
class TaskConfig:
    """The prompts: a data set's name and place, or a text."""

    name: str = MISSING
    kinds: list[str] = MISSING  # the kinds of prompts inside
    path: str | None = None  # a file or folder of JSON lines; null: `source`
    source: str | None = None  # a public address that `datasets` reads
    split: str = "train"
    text: str | None = None
    limit: int | None = None  # so many prompts, spread evenly; null: all


@dataclass
class SamplingConfig:
    temperature: float = 0.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int = 128
    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False


@dataclass
class TrackerConfig:
    name: str = MISSING
    tracker: dict[str, Any] = MISSING  # `_target_` and its settings


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
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


def register() -> None:
    """Makes the schema known to Hydra; `conf/config.yaml` starts from it."""
    ConfigStore.instance().store(name="schema", node=Config)
