"""transformers' own loops: `generate` alone, with an assistant model (2211.17192), and with prompt lookup."""

import importlib.util
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers import __version__ as VERSION
from transformers.generation.streamers import BaseStreamer

from duoexp.config import InputError
from duoexp.hardware import Hardware, Place
from duoexp.lm.load import Model, load
from duoexp.peers.assistant import Assistant
from duoexp.peers.base import Peer, Stock
from duoexp.rounds import Round
from duoexp.schedule import Stop


class Generate(Peer):
    """`generate` of the stock model, greedy."""

    package = f"transformers {VERSION}"

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}  # further ones, of transformers' GenerationConfig

    def check(self, target: str, stop: Sequence[str]) -> None:
        pass

    def start(self, target: Model, draft: Model | None, hardware: Hardware, place: Place, stock: Stock) -> None:
        self._target: Any = stock(target, place, "target")  # a PreTrainedModel, whose `generate` its types hide

    def rounds(self, prompt: Sequence[int], stop: Stop) -> Sequence[Round]:
        eos = sorted(stop.eos) or None
        config = GenerationConfig(
            max_new_tokens=stop.left, do_sample=False, eos_token_id=eos, pad_token_id=0, **self.settings
        )
        ids = torch.tensor([list(prompt)], device=self._target.device)
        heard = _Listener(stop)
        with ExitStack() as hooks:
            self._listen(heard, hooks)
            self._target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                streamer=heard,
                stopping_criteria=StoppingCriteriaList([heard]),
                **self._assistance(),
            )
        return heard.rounds

    def _listen(self, heard: "_Listener", hooks: ExitStack) -> None:
        hooks.callback(self._target.register_forward_pre_hook(heard.verifies, with_kwargs=True).remove)

    def _assistance(self) -> dict[str, Any]:
        return {}


class PromptLookup(Generate):
    """Its candidates are what followed the last words when they stood in the text before (Saxena, 2023)."""

    def __init__(self, prompt_lookup_num_tokens: int = 10, max_matching_ngram_size: int = 3) -> None:
        for name, value in (
            ("prompt_lookup_num_tokens", prompt_lookup_num_tokens),
            ("max_matching_ngram_size", max_matching_ngram_size),
        ):
            _whole(name, value)
        self.settings = {
            "prompt_lookup_num_tokens": prompt_lookup_num_tokens,
            "max_matching_ngram_size": max_matching_ngram_size,
        }


class Assisted(Generate):
    """Its candidates come from the pair's draft. The settings are transformers', under its own names.

    The draft is a stock model where its source is one. A rounded or distilled draft of this project is none, and one
    with other padding of its vocabulary is refused there: these go as they are, behind `Assistant`. Each answer starts
    from the settings given here; transformers would carry adapted ones over to the next prompt.
    """

    needs_model = True
    SCHEDULES = ("constant", "heuristic", "heuristic_transient")

    def __init__(
        self,
        num_assistant_tokens: int = 20,
        num_assistant_tokens_schedule: str = "constant",
        assistant_confidence_threshold: float = 0.4,
    ) -> None:
        _whole("num_assistant_tokens", num_assistant_tokens)
        if num_assistant_tokens_schedule not in self.SCHEDULES:
            raise InputError(
                f"draft.drafter.num_assistant_tokens_schedule={num_assistant_tokens_schedule!r} is unknown; "
                f"choose {', '.join(self.SCHEDULES)}"
            )
        if not 0 <= assistant_confidence_threshold < 1:
            raise InputError(
                f"draft.drafter.assistant_confidence_threshold={assistant_confidence_threshold} is out of range; "
                "give 0 (never stop early) or more, below 1"
            )
        super().__init__()
        self._settings = {
            "num_assistant_tokens": num_assistant_tokens,
            "num_assistant_tokens_schedule": num_assistant_tokens_schedule,
            "assistant_confidence_threshold": assistant_confidence_threshold,
        }

    def note(self, target: Model, draft: Model | None) -> str:
        assert draft is not None
        notes = [super().note(target, draft), f"drafting with transformers' own model of {draft.source}"]
        if not _is_stock(draft, target):
            notes[1] = f"but for its draft {draft.source}, which transformers cannot run: that is the same pass as here"
        if self._settings["assistant_confidence_threshold"] and importlib.util.find_spec("sklearn") is None:
            notes.append("its confidence threshold stays as it is, which scikit-learn would adapt")
        return "; ".join(notes)

    def start(self, target: Model, draft: Model | None, hardware: Hardware, place: Place, stock: Stock) -> None:
        assert draft is not None  # as needs_model says
        super().start(target, draft, hardware, place, stock)
        device, dtype = hardware.draft.device, hardware.draft.dtype
        self._lm = None
        if _is_stock(draft, target):
            self._draft: PreTrainedModel = stock(draft, hardware.draft, "draft")
        else:
            self._lm = load(draft, "auto", device, dtype, min(target.tokens, draft.tokens))
            self._draft = Assistant(self._target.config, self._lm, device)

    def rounds(self, prompt: Sequence[int], stop: Stop) -> Sequence[Round]:
        if self._lm is not None:
            self._lm.clear()
        return super().rounds(prompt, stop)

    def _listen(self, heard: "_Listener", hooks: ExitStack) -> None:
        super()._listen(heard, hooks)
        hooks.callback(self._draft.register_forward_pre_hook(heard.drafts).remove)

    def _assistance(self) -> dict[str, Any]:
        self._draft.generation_config = GenerationConfig(**self._settings)
        return {"assistant_model": self._draft}


def _is_stock(draft: Model, target: Model) -> bool:
    """Whether transformers has a model of this draft, and takes it as the assistant of this target."""
    rounded, distilled = draft.checkpoint.bits is not None, draft.checkpoint.base is not None
    return not rounded and not distilled and draft.rows == target.rows


def _whole(name: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        raise InputError(f"draft.drafter.{name}={value!r} is no whole number of 1 or more; give one")


class _Listener(BaseStreamer, StoppingCriteria):
    """Makes rounds of what a loop does: draft steps begin, a pass of the target begins, its tokens arrive.

    Tokens arrive on the host, and each draft step ends in a look at its token there, so that the clock is read after
    the work is done on a GPU, too. A pass of the prompt may verify candidates already.
    """

    def __init__(self, stop: Stop) -> None:
        self.stop, self.rounds = stop, list[Round]()
        self._prompt = self._known = 0  # tokens; those that the next pass begins with, and that are no candidates
        self._passes: deque[tuple[float, int]] = deque()  # under way: when it began, and its candidates
        self._steps: list[float] = []  # when the draft steps since the last pass began
        self._since = time.perf_counter()  # the end of the last pass

    def drafts(self, *_: object) -> None:
        self._steps.append(time.perf_counter())

    def verifies(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._passes.append((time.perf_counter(), kwargs["input_ids"].shape[1] - self._known))
        self._known = 1

    def put(self, value: Tensor) -> None:
        """First the prompt, then the tokens of each pass; on a GPU these come when the next pass is under way."""
        now, tokens = time.perf_counter(), value.flatten().tolist()
        if not self._prompt:
            self._prompt = self._known = len(tokens)
            self._since = now
        elif self.stop.reason is None:
            self._end(tokens, now)

    def _end(self, tokens: list[int], now: float) -> None:
        (began, candidates), kept = self._passes.popleft(), self.stop.keep(tokens)
        drafted = candidates > 0
        steps = self._steps or [self._since] * drafted
        self.rounds.append(
            Round(
                tokens=kept,
                accepted=len(kept) - 1,
                # At the end of an answer transformers cuts accepted tokens off, which no test rejected.
                rejected=self.stop.reason is None and len(tokens) <= candidates,
                head=None,
                verified=candidates,
                drafted=candidates,
                sequences=int(drafted),
                start_s=began,
                verify_s=now - began,
                wait_s=began - self._since if drafted else 0.0,
                message_s=0.0,
                spans=tuple(zip(steps, [*steps[1:], began], strict=True)) if steps else (),
            )
        )
        self._steps, self._since = [], now

    def end(self) -> None:
        pass

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Whether the answer is at an end. Some loops ask before the last token is `put`, others behind it."""
        ends, answer = self.stop.ends, input_ids[0, self._prompt :]
        done = self.stop.reason is not None or (ends is not None and ends(answer.tolist()))
        return torch.full((len(input_ids),), done, device=input_ids.device)
