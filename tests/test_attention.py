"""Attention that does not depend on the width of a pass."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from duoexp.lm.attention import SLOTS, attend, blocks
from duoexp.lm.lean import LeanLM
from duoexp.machine import bf16_cpu
from duoexp.tree import Draft

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 32


def plain(q: Tensor, keys: Tensor, values: Tensor, held: int) -> Tensor:
    """The definition, a row at a time, in float64."""
    rows = []
    for row, heads in enumerate(q.double()):
        seen = slice(held + row + 1)
        grouped = heads.view(KV_HEADS, -1, HEAD_DIM)
        scores = grouped @ keys[:, seen].double().transpose(1, 2) / HEAD_DIM**0.5
        rows.append((scores.softmax(-1) @ values[:, seen].double()).view(HEADS, HEAD_DIM))
    return torch.stack(rows)


@pytest.mark.parametrize("held", [1, 5, SLOTS - 3, SLOTS, 3 * SLOTS - 1])
@pytest.mark.parametrize("new", [1, 2, 7, 25])
def test_blocks_see_what_the_definition_sees(held: int, new: int) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, KV_HEADS, 4 * SLOTS, HEAD_DIM)
    q = torch.randn(new, HEADS, HEAD_DIM)
    found = blocks(held, new, HEADS // KV_HEADS)
    torch.testing.assert_close(attend(q, keys, values, found).double(), plain(q, keys, values, held), atol=1e-5, rtol=0)


def test_a_block_looks_at_as_many_slots_as_each_of_its_rows_would_alone() -> None:
    for held in (1, 60, 63, 64, 130):
        for block in blocks(held, 25, 3):
            for row in range(block.first, block.last):
                [alone] = blocks(held + row, 1, 3)
                assert alone.slots == block.slots


@pytest.mark.skipif(not bf16_cpu(), reason="without bfloat16 instructions the products depend on the width themselves")
@pytest.mark.parametrize("groups", [1, 3])
def test_a_chain_gets_the_same_bits_in_passes_of_any_width(groups: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=6 // groups,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    lm = LeanLM.from_model(LlamaForCausalLM(config).bfloat16().eval(), 97, width_invariant=True)
    text = torch.randint(0, 97, (120,)).tolist()
    alone = []
    for end in range(41, 120):  # crosses a boundary of slots
        if end == 41:
            lm.logits(text[:40])
        alone.append(lm.logits(text[:end])[0].clone())
    for width in (1, 2, 3, 8, 24):
        lm.clear()
        lm.logits(text[:40])
        for start in range(41, 119 - width, width + 1):
            block = Draft(tuple(text[start : start + width]), tuple(range(-1, width - 1)))
            rows = lm.logits(text[:start], block)
            for row, logits in enumerate(rows):
                assert torch.equal(logits, alone[start - 41 + row]), (width, start, row)
