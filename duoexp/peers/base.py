"""What a peer is: another library's loop over the same target, whose passes are told as rounds of this one."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace

from transformers import GenerationConfig, PreTrainedModel

from duoexp.budget import Budget
from duoexp.config import InputError
from duoexp.hardware import Hardware, Place
from duoexp.lm.causal_lm import CausalLM
from duoexp.lm.load import Model, stock
from duoexp.rounds import Round
from duoexp.sampling import Sampler
from duoexp.schedule import Stop
from duoexp.verify import Rule
from duoexp.worker import Worker


class Unavailable(InputError):
    """A peer that this machine, or this pair of models, cannot have. One sentence: why, and the way out."""


class Stock:
    """transformers' own models, each loaded once for all peers that share it. They bring no habits of generation.

    A model that is its own draft is loaded twice, so that each of the two can be heard.
    """

    def __init__(self) -> None:
        self._held: dict[object, PreTrainedModel] = {}

    def __call__(self, model: Model, place: Place, side: str) -> PreTrainedModel:
        key = (side, model.checkpoint, place.device, place.dtype)
        if key not in self._held:
            self._held[key] = stock(model, place.device, place.dtype)
            # A checkpoint's own may penalise repetition, say, and greedy output would not be the target's.
            self._held[key].generation_config = GenerationConfig()
        return self._held[key]


class Peer(ABC):
    """A peer decodes greedily and in turn, at one place, and nothing of this engine is in its way.

    package: whose loop it is, with its version.
    """

    needs_model = False
    package = ""

    @abstractmethod
    def check(self, target: str, stop: Sequence[str]) -> None:
        """Before any weights are read. target: its source. Raises Unavailable."""

    def note(self, target: Model, draft: Model | None) -> str:
        """What a reader of its numbers must know."""
        return f"a peer: the loop and the model of {self.package}, without this engine"

    @abstractmethod
    def start(self, target: Model, draft: Model | None, hardware: Hardware, place: Place, stock: Stock) -> None:
        """Loads what it runs. place: where it runs, which is not always `home(hardware)`."""

    @abstractmethod
    def rounds(self, prompt: Sequence[int], stop: Stop) -> Sequence[Round]:
        """The answer to `prompt`, from an empty cache: a round for each pass of the target."""

    def schedule(
        self,
        target: CausalLM,
        worker: Worker,
        rule: Rule,
        sampler: Sampler,
        prompt: Sequence[int],
        budget: Budget,
        stop: Stop,
    ) -> Iterator[Round]:
        """`rounds` as a `duoexp.schedule.Schedule`, so that one clock, counter and comparison serve all methods."""
        yield from self.rounds(prompt, stop)

    def close(self) -> None:  # noqa: B027  # most have nothing to end
        """Ends what it started."""


def home(hardware: Hardware) -> Place:
    """Where a peer runs that is given what the target has, and the draft's threads when the draft alone is on a CPU."""
    target, draft = hardware.target, hardware.draft
    if target.device != "cpu" and draft.device == "cpu":
        return replace(target, threads=draft.threads, cores=draft.cores)
    return target
