"""What a job will take, from its plan alone: no weights are read, nothing is started."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from duoexp import templates
from duoexp.lm.load import Model

if TYPE_CHECKING:
    from duoexp.runner import Plan


@dataclass(frozen=True)
class Estimate:
    """Bytes of weights and cache on each device, what there is, and seconds that it takes at least."""

    needed: dict[str, int]
    available: dict[str, int]
    at_least_s: float
    too_long: int  # prompts that the target's context does not hold

    def __str__(self) -> str:
        """In words; what does not fit comes first."""
        said = [f"{device} {_gib(size)}" for device, size in self.needed.items()]
        lacking = [each for each, size in self.needed.items() if size > self.available[each]]
        short = [f"DOES NOT FIT: {each} has {_gib(self.available[each])}" for each in lacking]
        if self.too_long:
            short.append(f"{self.too_long} prompts are longer than the target's context")
        return "; ".join([*short, f"memory {', '.join(said)}", f"at least {self.at_least_s:.0f} s"])


def estimate(plan: "Plan") -> Estimate:
    """Every token reads all weights of the target once, as fast as memory is copied: that is the least of its time.

    A draft that runs in turn, verification and the prompts come on top; what a method saves is taken off by nobody.
    """
    hardware, sampling = plan.hardware, plan.config.sampling
    lengths = [len(templates.encode(plan.target.tokenizer, plan.config.model.template, each)) for each in plan.prompts]
    sides = [(plan.target, hardware.target)] + ([(plan.draft, hardware.draft)] if plan.draft else [])
    needed: dict[str, int] = {}
    for model, place in sides:
        size = weights_bytes(model, place.dtype) + cache_bytes(
            model, place.dtype, max(lengths) + sampling.max_new_tokens
        )
        needed[place.device] = needed.get(place.device, 0) + size
    turns = sum(len(prompt.turns) for prompt in plan.prompts)
    tokens = turns * sampling.max_new_tokens * plan.config.repeats * 2  # both ways
    place = hardware.target
    seconds = tokens * weights_bytes(plan.target, place.dtype) / _bandwidth(place.device)
    context = plan.target.config.get_text_config(decoder=True).max_position_embeddings
    too_long = sum(length >= context for length in lengths)
    return Estimate(needed, {device: _available(device) for device in needed}, seconds, too_long)


def weights_bytes(model: Model, dtype: str) -> int:
    """Of a whole model; a rounded copy has its bits a weight, and a scale for every few dozen of them."""
    size = getattr(torch, dtype).itemsize if model.checkpoint.bits is None else model.checkpoint.bits / 8 + 0.1
    return int(_elements(model) * size)


def cache_bytes(model: Model, dtype: str, tokens: int) -> int:
    """Keys and values of so many tokens, in every layer."""
    text = model.config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * width * tokens * int(getattr(torch, dtype).itemsize)


def _elements(model: Model) -> int:
    if model.checkpoint.base is not None:  # a distilled draft is no class of transformers
        return sum(_stored(file) for file in Path(model.checkpoint.path).glob("*.safetensors"))
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(model.config, trust_remote_code=model.trust_remote_code)
    return sum(each.numel() for each in whole.parameters())


def _stored(file: Path) -> int:
    with safe_open(file, "pt") as weights:
        shapes: Sequence[Sequence[int]] = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118
    return sum(int(torch.Size(shape).numel()) for shape in shapes)


def _available(device: str) -> int:
    return int(psutil.virtual_memory().available) if device == "cpu" else int(torch.cuda.mem_get_info(device)[0])


@cache
def _bandwidth(device: str) -> float:
    """Bytes a second that a copy reads."""
    source = torch.ones(2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        target.copy_(source)
        if device != "cpu":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begun)
    return source.numel() / best


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
