"""Attention of a pass over its cache: the usual kernel, or in a form whose results do not depend on the pass's width.

A token verified in a block must get the logits that it gets alone, to the last bit, or greedy outputs part where
two logits lie close. Products of bfloat16 matrices keep to that on a processor with instructions for them; the fused
attention kernel does not: it takes other paths for few rows, and adds in another order over another number of slots.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SLOTS = 64  # a row looks at a multiple of so many slots, those beyond its own masked
ROWS = 4  # from so many rows on the kernel takes one path; and it splits rows into blocks of a multiple of these


@dataclass(frozen=True)
class Block:
    """Rows [first, last) of a pass, which look at the first `slots` of the cache under `mask`, added to the scores."""

    first: int
    last: int
    slots: int
    mask: Tensor  # [(last - first) * queries a key head, rounded up to ROWS; slots]


def blocks(held: int, new: int, group: int) -> list[Block]:
    """For `new` tokens behind `held` ones, each looking at all up to itself; `group` queries share a key head.

    Rows of a block look at equally many slots, and at as many as each would alone.
    """
    found, first = [], 0
    while first < new:
        slots = _up(held + first + 1, SLOTS)
        last = min(new, slots - held)
        rows = _up((last - first) * group, ROWS)
        own = torch.arange(rows).div(group, rounding_mode="floor").clamp(max=last - first - 1) + held + first
        mask = torch.zeros(rows, slots).masked_fill_(torch.arange(slots) > own[:, None], -torch.inf)
        found.append(Block(first, last, slots, mask))
        first = last
    return found


def whole(seen: Tensor, group: int, dtype: torch.dtype) -> Block:
    """A pass as one block: seen [tokens, slots] is True where a token looks."""
    tokens, slots = seen.shape
    own = torch.arange(_up(tokens * group, ROWS), device=seen.device).div(group, rounding_mode="floor")
    seen = seen[own.clamp(max=tokens - 1)]
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
    return Block(0, tokens, slots, mask)


def attend(q: Tensor, keys: Tensor, values: Tensor, found: list[Block]) -> Tensor:
    """q [tokens, heads, head_dim], keys and values [kv_heads, capacity, head_dim] -> [tokens, heads, head_dim]

    The buffers hold finite numbers up to their capacity, which reaches to the last block's slots.
    """
    if len(found) == 1:
        return _attend(q, keys, values, found[0])
    return torch.cat([_attend(q[block.first : block.last], keys, values, block) for block in found])


def _attend(q: Tensor, keys: Tensor, values: Tensor, block: Block) -> Tensor:
    tokens, heads, head_dim = q.shape
    kv_heads = len(keys)
    rows = q.view(tokens, kv_heads, -1, head_dim).transpose(0, 1).reshape(kv_heads, -1, head_dim)
    rows = F.pad(rows, (0, 0, 0, len(block.mask) - rows.shape[1]))
    seen = slice(block.slots)
    y = F.scaled_dot_product_attention(rows[None], keys[None, :, seen], values[None, :, seen], attn_mask=block.mask)[0]
    y = y[:, : tokens * heads // kv_heads].reshape(kv_heads, tokens, -1, head_dim)
    return y.transpose(0, 1).reshape(tokens, heads, head_dim)


def _up(count: int, step: int) -> int:
    return -(-count // step) * step
