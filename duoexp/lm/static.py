"""Passes of a few fixed shapes, each of which is one graph: on a GPU, launching hundreds of kernels one by one can take
longer than they do.

Tokens are padded to the next of WIDTHS and look at the whole cache under a mask; what differs from pass to pass is in
tensors. Longer passes, as in reading a prompt, run as they are.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Self

import torch
from torch import Tensor

from duoexp.config import InputError
from duoexp.lm.attention import whole
from duoexp.lm.lean import Cache, LeanLM, Pass, Slots

WIDTHS = (1, 2, 4, 8, 16, 32)
CAPACITY = 2048  # slots at first; each doubling makes all graphs anew
GRAPHS = 256  # that torch may keep: of each width, at each capacity, for two models


class StaticLM(LeanLM):
    """A LeanLM that runs up to WIDTHS[-1] tokens in passes of fixed shapes, uncompiled unless told."""

    kernel = "lean, fixed shapes"

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        first = self._layers[0]
        self._cache = Cache(len(self._layers), first.kv_heads, first.head_dim, self._embedding, CAPACITY)
        self._graph: Callable[[Tensor, Tensor, Tensor], Tensor] = self._fixed
        self._ready: int | None = None  # the capacity that graphs were made for; None: there are to be none

    def compile(self, **how: Any) -> Self:
        """As torch.compile, by default with CUDA graphs. All widths are compiled at the first pass, in minutes."""
        for part in (self._embedding, self._rotary, self._layers, self._norm, self._head):
            for weight in _tensors(part):
                torch._dynamo.mark_static_address(weight)  # else a graph copies them before each pass
        self._graph = torch.compile(self._fixed, fullgraph=True, dynamic=False, **how or {"mode": "reduce-overhead"})
        self.kernel = "lean, fixed shapes, compiled"
        self._ready = 0
        return self

    def run(self, tokens: list[int], positions: list[int], hidden: Tensor | None, places: list[int]) -> Tensor:
        count, start = len(tokens), self._cache.length
        if count > WIDTHS[-1]:
            return super().run(tokens, positions, hidden, places)
        self._cache.extend(count)
        if self._ready not in (None, self._cache.capacity):
            self._prepare()
        width = next(width for width in WIDTHS if width >= count)
        looks = torch.ones(count, start + count, dtype=torch.bool).tril_(start) if hidden is None else ~hidden
        # copied, as a graph's next run writes its result to the same place
        return self._one(width, start, tokens, positions, looks, places)[: len(places)].clone()

    def _prepare(self) -> None:
        """The first run of a graph warms it up, the second records it."""
        torch._dynamo.mark_static_address(self._cache.buffer)
        free = self._cache.length
        with torch._dynamo.config.patch(recompile_limit=GRAPHS):
            for width in (*WIDTHS, *WIDTHS):
                try:
                    self._one(width, free, [], [], torch.ones(0, 0, dtype=torch.bool), [])
                except torch._dynamo.exc.TorchDynamoException as error:
                    reason = " ".join(str(error).split())
                    raise InputError(
                        f"model.engine=compiled: torch cannot compile the pass here ({reason}); choose static or lean"
                    ) from error
        self._ready = self._cache.capacity

    def _one(
        self, width: int, start: int, tokens: list[int], positions: list[int], looks: Tensor, places: list[int]
    ) -> Tensor:
        """Padding writes to slots that are free, and looks at slot 0 alone, so that what it writes is finite."""
        slots = list(range(start, start + width))
        padded = [each + [0] * (width - len(each)) for each in (tokens, positions, slots, places)]
        seen = torch.zeros(width, self._cache.capacity, dtype=torch.bool)
        seen[: looks.shape[0], : looks.shape[1]] = looks
        seen[looks.shape[0] :, 0] = True
        return self._graph(self._sent(torch.tensor(padded)), self._sent(seen), self._cache.buffer)

    def _fixed(self, padded: Tensor, seen: Tensor, buffer: Tensor) -> Tensor:
        """padded [4, width]: tokens, positions, slots and places; seen [width, capacity] -> [width, vocabulary]"""
        tokens, positions, slots, places = padded.unbind()
        cos, sin = self._angles(positions)
        blocks = [whole(seen, self._layers[0].group, buffer.dtype)]
        return self._through(tokens, Pass(cos, sin, Slots(buffer, slots), None, False, blocks), places)

    def _sent(self, host: Tensor) -> Tensor:
        """On the model's device, without waiting for it."""
        device = self._embedding.device
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def _tensors(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from _tensors(each)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _tensors(getattr(part, field.name))
