"""A model of this project in the clothes of a transformers model, for transformers to draft with."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from duoexp.lm.causal_lm import CausalLM


class Assistant(PreTrainedModel, GenerationMixin):
    """`lm` as an assistant model: same weights, same kernels, same cache; only the loop around it is transformers'.

    transformers thinks that its own cache is empty, so it hands over the whole text each time, and rolls nothing back:
    `lm` finds by itself what it has read of it.
    """

    _supports_sdpa = True

    def __init__(self, config: PreTrainedConfig, lm: CausalLM, device: str) -> None:
        super().__init__(config)
        self.lm = lm
        self.where = nn.Parameter(torch.empty(0, device=device), requires_grad=False)  # tells transformers the device

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}

    def forward(  # named as transformers looks them up
        self, input_ids: Tensor, attention_mask: Tensor | None = None, cache: Cache | None = None, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        """[1, tokens] -> logits [1, 1, rows of the target's vocabulary]; padding is impossible."""
        logits = self.lm.logits(input_ids[0].tolist(), rows=(0,))
        rows = self.config.get_text_config(decoder=True).vocab_size
        padded = logits.new_full((1, 1, rows), -torch.inf)
        padded[0, 0, : logits.shape[1]] = logits[0]
        return CausalLMOutputWithPast(logits=padded, cache=cache)
