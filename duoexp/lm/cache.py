"""A key-value cache that rolls back for nothing and copies only what is new."""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from duoexp.config import InputError


class BufferLayer(DynamicLayer):
    """One layer's keys and values in a buffer that doubles when it is full.

    The stock layer concatenates, so each pass copies the whole cache; and it can only crop, while a tree keeps one path.
    """

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        start, self.length = self.length, self.length + key_states.shape[-2]
        if not self.is_initialized or self.length > self.keys.shape[-2]:
            self._make_room(key_states, value_states, start)
        self.keys[..., start : self.length, :] = key_states
        self.values[..., start : self.length, :] = value_states
        return self.keys[..., : self.length, :], self.values[..., : self.length, :]

    def keep(self, start: int, slots: Tensor | None, length: int) -> None:
        """Keeps the first `start` slots, then `slots` in that order (None: as they lie), `length` in all."""
        self.length = length
        if slots is not None:
            for buffer in (self.keys, self.values):
                buffer[..., start:length, :] = buffer[..., slots, :]

    def get_seq_length(self) -> int:
        return self.length

    def _make_room(self, key_states: Tensor, value_states: Tensor, filled: int) -> None:
        old = (self.keys, self.values)
        capacity = max(256, 2 * self.length)
        self.keys, self.values = (
            states.new_empty((*states.shape[:-2], capacity, states.shape[-1])) for states in (key_states, value_states)
        )
        if filled:
            self.keys[..., :filled, :], self.values[..., :filled, :] = (buffer[..., :filled, :] for buffer in old)
        self.is_initialized, self.device = True, key_states.device


def buffer_cache(config: PreTrainedConfig) -> Cache:
    """A cache for a model of this kind; raises InputError where a layer remembers in a way that can't be rolled back."""
    for layer in DynamicCache(config=config).layers:
        if type(layer) is not DynamicLayer:
            raise InputError(
                f"model type {config.model_type!r} keeps a {type(layer).__name__}, which cannot be rolled back "
                "to an earlier token; choose a model whose layers all have full attention"
            )
    layers = [BufferLayer() for _ in range(config.get_text_config(decoder=True).num_hidden_layers)]
    return Cache(layers=layers)


def keep(cache: Cache, slots: list[int]) -> None:
    """Keeps these slots, in this order, as the cache's first ones."""
    start = next((i for i, slot in enumerate(slots) if slot != i), len(slots))
    moved = slots[start:]
    for layer in cache.layers:
        index = torch.tensor(moved, device=layer.device) if moved else None
        layer.keep(start, index, len(slots))
