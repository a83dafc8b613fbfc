"""A key-value cache that rolls back for nothing and copies only what is new."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from duoexp.config import InputError


class BufferLayer(DynamicLayer):
    """One layer's keys and values, [1, heads, capacity, head_dim] each, in buffers that double when they are full.

    The stock layer concatenates, so each pass copies all of it; and it only crops, while a tree keeps one path.
    """

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self._buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start, self.length = self.length, self.length + key_states.shape[-2]
        if not self._buffers or self.length > self._buffers[0].shape[-2]:
            self._make_room((key_states, value_states), start)
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., start : self.length, :] = states
        keys, values = (buffer[..., : self.length, :] for buffer in self._buffers)
        return keys, values

    def keep(self, start: int, slots: list[int]) -> None:
        self.length = start + len(slots)
        if slots:
            for buffer in self._buffers:
                index = torch.tensor(slots, device=buffer.device)
                buffer[..., start : self.length, :] = buffer[..., index, :]

    def get_seq_length(self) -> int:
        return self.length

    def _make_room(self, new: tuple[Tensor, Tensor], filled: int) -> None:
        capacity = max(256, 2 * self.length)
        buffers = [states.new_empty((*states.shape[:-2], capacity, states.shape[-1])) for states in new]
        for buffer, old in zip(buffers, self._buffers, strict=False):
            buffer[..., :filled, :] = old[..., :filled, :]
        self._buffers, self.is_initialized = buffers, True


class BufferCache(Cache):
    """The cache of a model whose layers all have full attention. Raises InputError for any other, by name."""

    def __init__(self, config: PreTrainedConfig) -> None:
        for layer in DynamicCache(config=config).layers:
            if type(layer) is not DynamicLayer:
                raise InputError(
                    f"model type {config.model_type!r} keeps a {type(layer).__name__}, which cannot be rolled back "
                    "to an earlier token; choose a model whose layers all have full attention"
                )
        self.buffers = [BufferLayer() for _ in range(config.get_text_config(decoder=True).num_hidden_layers)]
        super().__init__(layers=list(self.buffers))

    def keep(self, start: int, slots: list[int]) -> None:
        """See `CachedLM.keep`."""
        for layer in self.buffers:
            layer.keep(start, slots)
