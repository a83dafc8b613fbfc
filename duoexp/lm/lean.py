"""A forward pass of our own for the Llama family: no more than a draft needs, so that it costs what its weights cost.

On a processor, stock transformers spends about a millisecond a layer on everything but the matrix products.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from duoexp.config import InputError
from duoexp.lm import attention
from duoexp.lm.attention import SLOTS, Block, attend
from duoexp.lm.cache import BufferCache
from duoexp.lm.causal_lm import CachedLM
from duoexp.lm.linears import Linear, linear

FAMILY = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
MOVING = ("dynamic", "longrope")  # rotary scalings whose angles change with the length of the text


@dataclass(frozen=True)
class Norm:
    """RMSNorm (1910.07467) over the last dimension."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True)
class Rotary:
    """The angles of each position (RoFormer, 2104.09864), however the model scales them."""

    frequencies: Tensor  # [head_dim / 2], float32
    scaling: float

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, 1, head_dim], for all heads; sin is negative where `_rotated` must subtract."""
        # float32: in bf16 neighbouring positions would share an angle
        angles = positions.float()[:, None, None] * self.frequencies
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[tokens, heads, head_dim]: dimension i turns with i + head_dim / 2."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Cache:
    """Keys and values of all layers in one buffer, of `first` slots or as many doublings of it as are needed."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, like: Tensor, first: int = 256) -> None:
        self.length, self._first = 0, first
        # float32 on a processor: its attention kernel takes 7 times as long in bf16, for one token and 512 slots
        dtype = torch.float32 if like.device.type == "cpu" else like.dtype
        self.buffer = like.new_zeros(layers, 2, kv_heads, 0, head_dim, dtype=dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self.buffer.dtype

    @property
    def capacity(self) -> int:
        return self.buffer.shape[3]

    def extend(self, tokens: int) -> None:
        """Makes room for the next `tokens`, and SLOTS behind them."""
        filled, self.length = self.length, self.length + tokens
        if self.length + SLOTS > self.capacity:
            old, capacity = self.buffer, self._first
            while capacity < self.length + SLOTS:
                capacity *= 2
            self.buffer = old.new_zeros(*old.shape[:3], capacity, old.shape[4])  # finite where masks hide it
            self.buffer[..., :filled, :] = old[..., :filled, :]

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the new ones, [tokens, kv_heads, head_dim], last; returns all [kv_heads, capacity, head_dim]."""
        held, start = self.buffer[layer], self.length - len(keys)
        held[0, :, start : self.length], held[1, :, start : self.length] = keys.transpose(0, 1), values.transpose(0, 1)
        return held[0], held[1]

    def keep(self, start: int, slots: list[int]) -> None:
        """See `CachedLM.keep`."""
        self.length = start + len(slots)
        if slots:
            index = torch.tensor(slots, device=self.buffer.device)
            self.buffer[..., start : self.length, :] = self.buffer[..., index, :]


@dataclass(frozen=True)
class Slots:
    """The cache as a pass of fixed shape has it: written where a tensor says, and seen whole."""

    buffer: Tensor
    slots: Tensor  # [tokens]

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Cache.update`."""
        held = self.buffer[layer]
        held[0][:, self.slots] = keys.transpose(0, 1).to(held.dtype)
        held[1][:, self.slots] = values.transpose(0, 1).to(held.dtype)
        return held[0], held[1]


@dataclass(frozen=True)
class Pass:
    """What all layers of one pass share."""

    cos: Tensor
    sin: Tensor
    cache: Cache | Slots
    mask: Tensor | None  # [tokens, slots], added to the scores
    causal: bool  # each token sees those before it and no cache lies before them: no mask is needed
    blocks: list[Block] | None  # of attention that does not depend on the width of the pass


@dataclass(frozen=True)
class Layer:
    index: int  # in the cache
    norm: Norm
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    out: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    def __call__(self, x: Tensor, run: Pass) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        x = x + self.out(self._attention(self.qkv(self.norm(x)), run))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def _attention(self, qkv: Tensor, run: Pass) -> Tensor:
        """[tokens, (heads + 2 kv_heads) head_dim] -> [tokens, heads head_dim]"""
        tokens, dtype = len(qkv), qkv.dtype
        heads = qkv.view(tokens, -1, self.head_dim)
        q, k, v = heads.split([heads.shape[1] - 2 * self.kv_heads, self.kv_heads, self.kv_heads], 1)
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        q, k = _rotated(q, run.cos, run.sin), _rotated(k, run.cos, run.sin)
        keys, values = run.cache.update(self.index, k, v)
        if run.blocks is not None:
            return attend(q.to(keys.dtype), keys, values, run.blocks).reshape(tokens, -1).to(dtype)
        assert isinstance(run.cache, Cache), "a pass of fixed shape looks in blocks"
        keys, values = keys[:, : run.cache.length], values[:, : run.cache.length]
        y = F.scaled_dot_product_attention(
            q.to(keys.dtype).transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=run.mask,
            is_causal=run.causal,
            enable_gqa=True,
        )
        return y[0].transpose(0, 1).reshape(tokens, -1).to(dtype)


class LeanLM(CachedLM):
    """A Llama, Mistral, Qwen2 or Qwen3 model, batch 1, with its weights as they are or rounded."""

    kernel = "lean"

    def __init__(
        self,
        embedding: Tensor,
        rotary: Rotary,
        layers: tuple[Layer, ...],
        norm: Norm,
        head: Linear,
        vocabulary: int,
        context_size: int,
        width_invariant: bool = False,
    ) -> None:
        super().__init__(vocabulary, context_size)
        self._width_invariant = width_invariant
        self._embedding, self._rotary, self._layers = embedding, rotary, layers
        self._norm, self._head = norm, head
        self._cache = Cache(len(layers), layers[0].kv_heads, layers[0].head_dim, embedding)

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        vocabulary: int,
        bits: int | None = None,
        layers: Sequence[int] | None = None,
        width_invariant: bool = False,
    ) -> Self:
        """A copy of `model`, on its device. bits: None leaves the weights; 8 and 4 round them, and compute in bf16.

        layers: those of the model's to run, in this order; None: all.
        width_invariant: a chain gets the same logits in passes of any width, as far as `attention` can see to it.
        Raises InputError for a model of another family, and for a layer that it has not.
        """
        _check(model, layers)
        dtype = model.dtype if bits is None else torch.bfloat16
        base: Any = model.model
        config = model.config
        kept: Sequence[int] = range(len(base.layers)) if layers is None else layers
        rows = model.get_output_embeddings().weight.detach()[:vocabulary]
        return cls(
            embedding=base.embed_tokens.weight.detach().to(dtype),
            rotary=Rotary(base.rotary_emb.inv_freq.float(), base.rotary_emb.attention_scaling),
            layers=tuple(_layer(i, base.layers[number], config, bits, dtype) for i, number in enumerate(kept)),
            norm=_norm(base.norm, dtype),
            # 8 bits at least: in 4, the head alone cost 7 of 100 tokens of SmolLM2-135M
            head=linear(rows, None, bits and 8),
            vocabulary=vocabulary,
            context_size=config.max_position_embeddings,
            width_invariant=width_invariant,
        )

    def run(self, tokens: list[int], positions: list[int], hidden: Tensor | None, places: list[int]) -> Tensor:
        shared = self._pass(positions, hidden)
        told, rows = (torch.tensor(each, device=self._embedding.device) for each in (tokens, places))
        return self._through(told, shared, rows)

    def keep(self, start: int, slots: list[int]) -> None:
        self._cache.keep(start, slots)

    def _through(self, tokens: Tensor, shared: Pass, places: Tensor) -> Tensor:
        x = F.embedding(tokens, self._embedding)
        for layer in self._layers:
            x = layer(x, shared)
        return self._head(self._norm(x[places]))

    def _pass(self, positions: list[int], hidden: Tensor | None) -> Pass:
        held, new = self._cache.length, len(positions)
        self._cache.extend(new)
        causal, blocks = hidden is None and held == 0, None
        if self._width_invariant and hidden is None and held:
            blocks = attention.blocks(held, new, self._layers[0].group)
        elif hidden is None and held and new > 1:
            hidden = torch.ones(new, held + new, dtype=torch.bool).triu_(held + 1)
        mask = None
        if hidden is not None:
            mask = torch.zeros(hidden.shape, dtype=self._cache.dtype).masked_fill_(hidden, -torch.inf)
            mask = mask.to(self._embedding.device)
        cos, sin = self._rotary(torch.tensor(positions, device=self._embedding.device), self._embedding.dtype)
        return Pass(cos, sin, self._cache, mask, causal, blocks)


def self_draft(model: PreTrainedModel, vocabulary: int, bits: int = 8) -> LeanLM:
    """The model's own copy with rounded weights as its draft (self-speculation; Draft & Verify, 2309.08168).

    The weights of `model` are released: it can't be run again.
    """
    draft = LeanLM.from_model(model, vocabulary, bits)
    nn.Module.to(model, torch.device("meta"))
    return draft


# Any: the parts of an nn.Module have no types.
def _layer(index: int, layer: Any, config: PreTrainedConfig, bits: int | None, dtype: torch.dtype) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        index=index,
        norm=_norm(layer.input_layernorm, dtype),
        qkv=_fused(bits, attention.q_proj, attention.k_proj, attention.v_proj),
        q_norm=_norm(attention.q_norm, dtype) if hasattr(attention, "q_norm") else None,
        k_norm=_norm(attention.k_norm, dtype) if hasattr(attention, "k_norm") else None,
        out=_fused(bits, attention.o_proj),
        mlp_norm=_norm(layer.post_attention_layernorm, dtype),
        gate_up=_fused(bits, mlp.gate_proj, mlp.up_proj),
        down=_fused(bits, mlp.down_proj),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
    )


def _norm(norm: Any, dtype: torch.dtype) -> Norm:
    return Norm(norm.weight.detach().to(dtype), norm.variance_epsilon)


def _fused(bits: int | None, *parts: nn.Linear) -> Linear:
    """One matrix for maps of the same input: fewer and larger products."""
    weight = torch.cat([part.weight.detach() for part in parts])
    if all(part.bias is None for part in parts):
        return linear(weight, None, bits)
    biases = [weight.new_zeros(len(part.weight)) if part.bias is None else part.bias.detach() for part in parts]
    return linear(weight, torch.cat(biases), bits)


def _check(model: Any, layers: Sequence[int] | None) -> None:
    _check_kind(model)
    depth = model.config.num_hidden_layers
    if layers is not None and not (layers and all(0 <= layer < depth for layer in layers)):
        raise InputError(
            f"layers {list(layers)} are not among the model's {depth} layers; give some of 0 to {depth - 1}"
        )


def _check_kind(model: Any) -> None:
    name, config = type(model).__name__, model.config
    if type(model) not in FAMILY:
        known = ", ".join(kind.__name__ for kind in FAMILY)
        raise InputError(
            f"{name} has no lean pass, which knows {known}; choose model.engine=transformers, or "
            "instead of its own copy name another draft"
        )
    BufferCache(config)  # refuses sliding windows
    rope = model.model.rotary_emb.rope_type
    if rope in MOVING or config.hidden_act != "silu":
        raise InputError(
            f"{name} with rope_type={rope!r} and hidden_act={config.hidden_act!r} has no lean pass, which needs angles "
            "that do not change with the length, and silu; choose model.engine=transformers, or instead of "
            "its own copy name another draft"
        )
    for part, module in model.named_modules():
        if part.endswith(("_proj", "lm_head")) and type(module) is not nn.Linear:
            raise InputError(
                f"{part} of {name} is a {type(module).__name__}, which has no plain weights to round; "
                "load the model without quantisation or adapters"
            )
