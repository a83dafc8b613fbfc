"""Every setting of the recipe, and the checks that need no model."""

from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from duoexp.config import InputError, ModelConfig, TrackerConfig

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "tvd")
BITS = (None, 8)


@dataclass
class DataConfig:
    """The text to learn from: of the target itself, or a file of the user's."""

    path: str | None = None  # .npz, .jsonl or .txt: see `data.read`; null: the target writes
    chats: int = 4096
    batch: int = 32  # chats that it writes at a time
    question_tokens: int = 64
    answer_tokens: int = 192
    greedy: float = 0.5  # share of the answers that are greedy, the others being sampled
    temperature: float = 0.7  # of the sampled ones
    beginnings: list[str] = field(default_factory=lambda: [""])  # seed words of the user's turn, in turns
    held_out: float = 0.02  # share of the chats that is kept for measuring


@dataclass
class StudentConfig:
    """The draft's shape. Its embedding and the rows of its head are the target's, turned by a square matrix each."""

    model: str | None = None  # a whole model instead: as in model.draft, or a folder with a config.json alone
    layers: list[int] = MISSING  # of the target, to start from, in their order
    head: int = 8192  # of the most frequent tokens of the data: the only ones that its layers can say
    match: int = 8  # tokens of the longest match in the context behind which it copies; 0: it does not copy
    phrases: int = 200_000  # beginnings of 2 to 4 tokens whose commonest end it knows from the data; 0: none
    bits: int | None = 8  # of an exported weight; null: float32


@dataclass
class TrainConfig:
    divergence: str = "forward_kl"  # DIVERGENCES, from the target's distribution to the student's
    teacher: int = 32  # how many of the target's likeliest tokens to keep at a position; 0: learn from the text alone
    negatives: int | None = None  # so many tokens of the head, drawn anew each step, stand for its rare ones; null: all
    steps: int = 2000
    tokens: int = 2048  # a step
    on_policy: float = 0.0  # share of the steps, the last ones, in which the student writes the answers
    on_policy_tokens: int = 24  # that it writes a chat
    lr: float = 1e-3
    warmup: int = 50  # steps
    weight_decay: float = 0.0
    clip: float = 1.0
    average: float = 0.998  # decay of the running mean of the weights, which is what is exported
    seed: int = 0
    threads: int | None = None
    compile: bool = False  # faster after a minute, given a C++ compiler
    save_every: int = 100  # steps
    measure_every: int = 100  # steps, of the acceptance on held-out text


@dataclass
class DistillConfig:
    folder: str = "outputs/distill/${model.name}"  # what every step leaves, and the draft in the end
    device: str = "cpu"
    dtype: str = "bfloat16"  # of the target, and of the student's arithmetic
    model: ModelConfig = MISSING
    tracker: TrackerConfig = MISSING
    data: DataConfig = field(default_factory=DataConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


def register() -> None:
    ConfigStore.instance().store(name="distill_schema", node=DistillConfig)


def check(data: DataConfig, student: StudentConfig, train: TrainConfig) -> None:
    """Raises InputError on what no target could be distilled with."""
    if train.divergence not in DIVERGENCES:
        raise InputError(f"train.divergence={train.divergence} is unknown; choose {', '.join(DIVERGENCES)}")
    if not train.teacher and train.divergence == "reverse_kl":
        raise InputError(
            "train.divergence=reverse_kl asks how likely the target holds each token; give train.teacher=32"
        )
    if train.negatives is not None and (train.divergence != "forward_kl" or train.negatives < 1):
        raise InputError(
            f"train.negatives={train.negatives} goes with divergence=forward_kl alone, and is 1 or more; take null"
        )
    if student.bits not in BITS:
        raise InputError(f"student.bits={student.bits} cannot be exported; give 8 or null")
    if not student.layers:
        raise InputError("student.layers=[] leaves nothing to train; give some layers of the target, as in [0,1]")
    if any(chars.isspace() and len(chars) > 1 for chars in data.beginnings):
        raise InputError("data.beginnings holds a beginning of spaces alone; give words, or ''")
    limits = {
        "data.chats": (data.chats, 4, 2**31), "data.batch": (data.batch, 1, 2**20),
        "data.question_tokens": (data.question_tokens, 1, 2**20), "data.answer_tokens": (data.answer_tokens, 1, 2**20),
        "data.greedy": (data.greedy, 0, 1), "data.held_out": (data.held_out, 1e-6, 0.5),
        "data.temperature": (data.temperature, 1e-3, 100), "student.head": (student.head, 1, 2**31),
        "student.match": (student.match, 0, 64), "student.phrases": (student.phrases, 0, 2**31),
        "train.teacher": (train.teacher, 0, 1024), "train.steps": (train.steps, 1, 2**31),
        "train.tokens": (train.tokens, 16, 2**31), "train.on_policy": (train.on_policy, 0, 1),
        "train.on_policy_tokens": (train.on_policy_tokens, 1, 2**20), "train.lr": (train.lr, 0, 10),
        "train.warmup": (train.warmup, 0, 2**31), "train.average": (train.average, 0, 1),
        "train.clip": (train.clip, 1e-9, 1e9), "train.save_every": (train.save_every, 1, 2**31),
        "train.measure_every": (train.measure_every, 1, 2**31),
    }  # fmt: skip
    for key, (value, low, high) in limits.items():
        if not low <= value <= high:
            raise InputError(f"{key}={value} is out of range; give {low:g} to {high:g}")
