"""A causal model of transformers, batch 1."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from duoexp.lm.cache import BufferCache
from duoexp.lm.causal_lm import CachedLM


class TransformersLM(CachedLM):
    def __init__(self, model: PreTrainedModel, vocabulary: int) -> None:
        config = model.config.get_text_config(decoder=True)
        super().__init__(vocabulary, config.max_position_embeddings)
        self.model = model.eval()
        self.kernel = f"transformers, {config._attn_implementation} attention"
        self._cache = BufferCache(config)

    def run(self, tokens: list[int], positions: list[int], hidden: Tensor | None, places: list[int]) -> Tensor:
        device, dtype = self.model.device, self.model.dtype
        mask = None
        if hidden is not None:  # added to the scores, which eager attention takes as well as the fused one
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)[None, None]
        output = self.model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.tensor([positions], device=device),
            attention_mask=None if mask is None else mask.to(device),
            cache=self._cache,
            use_cache=True,
            logits_to_keep=torch.tensor(places, device=device),
        )
        return output.logits[0, :, : self.vocabulary]

    def keep(self, start: int, slots: list[int]) -> None:
        self._cache.keep(start, slots)
