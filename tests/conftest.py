"""What the tests share: no network, one thread, a cache of their own, and a tiny pair of models."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported, here and in every process that a test starts
os.environ["OMP_NUM_THREADS"] = "1"

import signal
import socket
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

# The same examples each time, so that a change alone makes a test fail; nothing is judged by the clock.
settings.register_profile("seeded", derandomize=True, deadline=None, database=None)
settings.load_profile("seeded")

# A shell starts jobs in the background deaf to interrupts, and what they start is deaf as well.
signal.signal(signal.SIGINT, signal.default_int_handler)

CONF = Path(__file__).parent.parent / "conf"
# The files of conf/draft: this project's methods, and the loops of others, which are bound to less.
_FIRST = {path.stem: path.read_text().partition("\n")[0] for path in sorted((CONF / "draft").glob("*.yaml"))}
PEERS = [name for name, line in _FIRST.items() if line.startswith("# A peer: ")]
DRAFTS = [name for name in _FIRST if name not in PEERS]
TEMPERATURES = (0.0, 0.8)
# What a prompt lookup can find: a text that repeats itself.
ECHO_PROMPT = [256, *(list(b"one two three, ") * 3)]


@pytest.fixture(scope="session", autouse=True)
def closed() -> Iterator[None]:
    """No connection but to a socket of this machine's file system, as W&B's own service has one."""
    connect = socket.socket.connect

    def checked(self: socket.socket, address: Any) -> None:
        assert self.family == socket.AF_UNIX, f"a test asked for the network: {address}"
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", checked)
        yield


@pytest.fixture(scope="session", autouse=True)
def cached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Random models are written once, and not into the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DUOEXP_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("duoexp.drafters.rest.own_datastore", own_datastore)
        yield


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def composed(*overrides: str) -> Any:
    """The config of a command line: the tiny pair on one core, one process and in float32, unless told otherwise."""
    from hydra import compose, initialize_config_dir

    from duoexp.config import register

    register()
    tiny = ["model=tiny", "hardware=cpu", "tracker=none", "task=prompt", "task.text=a"]
    sides = [f"hardware.{side}.{key}" for side in ("target", "draft") for key in ("dtype=float32", "threads=1")]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=[*tiny, *sides, *overrides])


@cache
def planned(*overrides: str) -> Any:
    """`runner.prepare` of such a config."""
    from duoexp.runner import prepare

    return prepare(composed(*overrides), CONF / "hardware")


def loaded(model: Any, engine: str = "auto", dtype: str = "float32") -> Any:
    """A model of a plan, as the runner loads it."""
    from duoexp.lm.load import load

    return load(model, engine, "cpu", dtype, model.tokens)


@cache
def target_of(*overrides: str) -> Any:
    """The target of such a config."""
    plan = planned(*overrides)
    return loaded(plan.target, plan.config.model.engine, plan.hardware.target.dtype)


@cache
def inline(*overrides: str, **sampling: Any) -> Any:
    """The method of such a config, its drafter started in this process. sampling: a cheap way to change it."""
    from duoexp.engine import Method
    from duoexp.runner import schedule_of, worker_of
    from duoexp.sampling import Sampler
    from duoexp.verify import RULES

    plan = planned(*overrides)
    draft = plan.config.draft
    worker = worker_of(replace(plan, drafter=deepcopy(plan.drafter), sampler=Sampler(**sampling)))
    return Method(schedule_of(draft), worker, RULES[draft.rule], fixed(draft.budget))


def fixed(budget: Any, otherwise: int = 4) -> Any:
    """`draft.budget`, or a number where it would have to be measured."""
    from duoexp.budget import Fixed
    from duoexp.config import budget_of

    given = budget_of(budget)
    return Fixed(given.tokens if given.kind == "fixed" else otherwise)


def engine(
    target: Any = None, *, limit: int = 31, eos: Iterable[int] = (), stop: Sequence[str] = (), **sampling: Any
) -> Any:
    """An engine over the tiny target, which ends at no EOS unless told."""
    from duoexp.config import SamplingConfig
    from duoexp.engine import Engine
    from duoexp.sampling import Sampler

    settings = SamplingConfig(max_new_tokens=limit, stop=list(stop))
    tokenizer = planned().target.tokenizer
    return Engine(target or target_of(), tokenizer, "plain", settings, Sampler(**sampling), frozenset(eos))


@cache
def autoregressive() -> Any:
    """Decoding with the target alone."""
    from duoexp.budget import Fixed
    from duoexp.drafters import Drafter
    from duoexp.engine import Method
    from duoexp.schedule import serial
    from duoexp.verify import match
    from duoexp.worker import Inline

    return Method(serial, Inline(Drafter(), 259), match, Fixed(0))


class Ids:
    """A tokenizer as a datastore needs it, of texts that are ids already."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.eos_token_id, self.convert_ids_to_tokens = tokenizer.eos_token_id, tokenizer.convert_ids_to_tokens

    def __len__(self) -> int:
        return len(self.tokenizer)

    def __call__(self, texts: Sequence[Any], **_: Any) -> Any:
        return SimpleNamespace(input_ids=[list(text) for text in texts])


def own_datastore(target: Any) -> Path:
    """For draft=rest: what the tiny target says to the prompts of the tests, as no human text would help it."""
    from duoexp.datastore import build
    from duoexp.lm.disk_cache import made

    def fill(folder: Path) -> None:
        texts = [
            [*prompt, *engine(limit=60, temperature=temperature).decode(autoregressive(), prompt).ids]
            for prompt in (prompt_of(16), ECHO_PROMPT)
            for temperature in TEMPERATURES
        ]
        build(folder, texts, Ids(target.tokenizer), "the tests")  # type: ignore[arg-type]

    return made("datastore-of-the-tests", fill)


_EXPECTED: dict[Any, Any] = {}


def expected(ours: Any, prompt: Sequence[int]) -> Any:
    """The autoregressive answer, decoded once for all tests that ask the same."""
    key = (id(ours.target), ours.sampler, ours.settings.max_new_tokens, *ours.settings.stop, ours.eos, tuple(prompt))
    if key not in _EXPECTED:
        _EXPECTED[key] = (ours, ours.decode(autoregressive(), prompt))  # with its engine, so that the id stays its own
    return _EXPECTED[key][1]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """BOS and random bytes, `length` ids in all."""
    ids = torch.randint(256, (length - 1,), generator=torch.Generator().manual_seed(seed))
    return [256, *ids.tolist()]


@st.composite
def drafts(draw: st.DrawFn, most: int = 12, tokens: int = 4) -> Any:
    """Trees of every shape, siblings of one token among them."""
    from duoexp.tree import Draft

    parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, most)))]
    return Draft(tuple(draw(st.integers(0, tokens - 1)) for _ in parents), tuple(parents))
