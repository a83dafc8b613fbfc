"""What a comparison is made of: its settings, and a checked plan for each that takes part."""

import shlex
from dataclasses import dataclass, field

from hydra import compose
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from duoexp.config import HardwareConfig, InputError, ModelConfig, SamplingConfig, TaskConfig
from duoexp.masking import masked_override

SHARED = ("name", "output_dir", "model", "hardware", "task", "sampling")  # with every experiment's config


@dataclass
class CompareConfig:
    name: str = "default"
    output_dir: str = "outputs"
    methods: list[str] = MISSING  # each a choice of draft=, with overrides of it if need be
    peers: list[str] = MISSING
    all_cores: bool = True  # let whatever works in turn run on all cores, too
    model: ModelConfig = MISSING
    hardware: HardwareConfig = MISSING
    task: TaskConfig = MISSING
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


def register() -> None:
    ConfigStore.instance().store(name="compare_schema", node=CompareConfig)


def entries(settings: CompareConfig) -> list[str]:
    """What is compared, autoregressive decoding first. Raises InputError for what cannot be one comparison."""
    named = ["none", *settings.peers, *settings.methods]
    if twice := sorted({name for name in named if named.count(name) > 1}):
        raise InputError(f"{twice[0]!r} is in the comparison twice; name it once (`none` is always there)")
    if settings.sampling.temperature > 0:
        raise InputError(
            f"sampling.temperature={settings.sampling.temperature} is not for a comparison, which decodes greedily: "
            "peers draw with random numbers of their own; set sampling.temperature=0"
        )
    return named


def without_secrets(entry: str) -> str:
    """As it is told and written: with *** for the secrets among its overrides."""
    parts = shlex.split(entry)
    hidden = [masked_override(part) for part in parts]
    return entry if hidden == parts else " ".join(hidden)


def experiment(cfg: DictConfig, entry: str) -> DictConfig:
    """The config of `python -m duoexp draft=ENTRY`, on the model, hardware, task and sampling of the comparison."""
    name, *overrides = shlex.split(entry)
    if strange := [each for each in overrides if not each.lstrip("+~").startswith("draft")]:
        raise InputError(f"{entry!r} overrides {strange[0]}, which is the same for all that are compared; leave it out")
    composed = compose("config", overrides=[f"draft={name}", "tracker=none", *overrides])
    merged = OmegaConf.merge(composed, OmegaConf.create({key: cfg[key] for key in SHARED}))
    assert isinstance(merged, DictConfig)
    return merged
