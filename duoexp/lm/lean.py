"""A forward pass of our own for the Llama family: no more than a draft needs, so that it costs what its weights cost.

On a processor, stock transformers spends about a millisecond a layer on everything but the matrix products.
"""

import math
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
from duoexp.lm import attention, linears
from duoexp.lm.attention import SLOTS, Block, attend
from duoexp.lm.cache import BufferCache
from duoexp.lm.causal_lm import CachedLM
from duoexp.lm.linears import Linear

FAMILY = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
MOVING = ("dynamic", "longrope")  # rotary scalings whose angles change with the length of the text


@dataclass(frozen=True)
class Norm:
    """RMSNorm (1910.07467) over the last dimension."""

    weight: Tensor
    eps: float
    scaled: Tensor  # [size], float32: weight sqrt(size)
    least: Tensor  # sqrt(size eps): so sqrt(mean of squares + eps) = hypot(norm, least) / sqrt(size)

    @classmethod
    def of(cls, weight: Tensor, eps: float) -> Self:
        root = math.sqrt(len(weight))
        return cls(weight, eps, weight.float() * root, torch.tensor(root * math.sqrt(eps)))

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # there torch makes ten calls of it, which together take longer than these four
        rows = x.float()
        norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        return (rows / norm.hypot(self.least)).mul_(self.scaled).to(x.dtype)


@dataclass(frozen=True)
class Rotary:
    """The angles of each position (RoFormer, 2104.09864), however the model scales them."""

    frequencies: Tensor  # [head_dim / 2], float32
    scaling: float

    def __call__(self, positions: Tensor, turned: int, still: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, heads, head_dim], where `turned` heads turn and `still` ones, the values, stay.

        sin is negative where `_rotated` must subtract.
        """
        # float32: in bf16 neighbouring positions would share an angle
        angles = positions.float()[:, None, None] * self.frequencies
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        cos, sin = (torch.cat(each, -1).to(dtype).expand(-1, turned, -1) for each in ([cos, cos], [-sin, sin]))
        rest = cos.new_ones(len(cos), still, cos.shape[-1])
        return torch.cat([cos, rest], 1), torch.cat([sin, torch.zeros_like(rest)], 1)


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

    def update(self, layer: int, new: Tensor) -> Tensor:
        """Writes the new ones, keys and values [2, kv_heads, tokens, head_dim], last.

        Returns all, [2, kv_heads, capacity, head_dim].
        """
        held = self.buffer[layer]
        held[:, :, self.length - new.shape[2] : self.length] = new
        return held

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

    def update(self, layer: int, new: Tensor) -> Tensor:
        """See `Cache.update`."""
        held = self.buffer[layer]
        held[:, :, self.slots] = new.to(held.dtype)
        return held


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
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
            heads = torch.cat([self.q_norm(q), self.k_norm(k), v], 1)
        heads = _rotated(heads, run.cos, run.sin)  # all at once: on a processor calls cost more than values left alone
        new = heads[:, self.heads :].view(tokens, 2, self.kv_heads, self.head_dim)
        q, (keys, values) = heads[:, : self.heads], run.cache.update(self.index, new.permute(1, 2, 0, 3))
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
        self._norm, self._head, self._dtype = norm, head, norm.weight.dtype
        self._cache = Cache(len(layers), layers[0].kv_heads, layers[0].head_dim, embedding)

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        vocabulary: int,
        bits: int | None = None,
        layers: Sequence[int] | None = None,
        width_invariant: bool = False,
        packs: bool = True,
    ) -> Self:
        """A copy of `model`, on its device. bits: None leaves the weights; 8 and 4 round them.

        layers: those of the model's to run, in this order; None: all.
        width_invariant: a chain gets the same logits in passes of any width, as far as `attention` can see to it.
        packs: see `linears.linear`.
        Raises InputError for a model of another family, and for a layer that it has not.
        """
        _check(model, layers)
        dtype = _dtype(model, bits)
        base: Any = model.model
        config = model.config
        kept: Sequence[int] = range(len(base.layers)) if layers is None else layers
        rows = model.get_output_embeddings().weight.detach()[:vocabulary]
        return cls(
            embedding=base.embed_tokens.weight.detach(),
            rotary=Rotary(base.rotary_emb.inv_freq.float(), base.rotary_emb.attention_scaling),
            layers=tuple(_layer(i, base.layers[number], config, bits, packs, dtype) for i, number in enumerate(kept)),
            norm=_norm(base.norm, dtype),
            head=linears.head(rows, bits, packs),
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
        x = F.embedding(tokens, self._embedding).to(self._dtype)
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
        return Pass(*self._angles(torch.tensor(positions)), self._cache, mask, causal, blocks)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        first = self._layers[0]
        positions = positions.to(self._embedding.device)
        return self._rotary(positions, first.heads + first.kv_heads, first.kv_heads, self._dtype)


def self_draft(model: PreTrainedModel, vocabulary: int, bits: int = 8) -> LeanLM:
    """The model's own copy with rounded weights as its draft (self-speculation; Draft & Verify, 2309.08168).

    The weights of `model` are released: it can't be run again.
    """
    draft = LeanLM.from_model(model, vocabulary, bits)
    nn.Module.to(model, torch.device("meta"))
    return draft


# Any: the parts of an nn.Module have no types.
def _layer(
    index: int, layer: Any, config: PreTrainedConfig, bits: int | None, packs: bool, dtype: torch.dtype
) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp

    def fused(*parts: nn.Linear) -> Linear:
        """One matrix for maps of the same input: fewer and larger products."""
        return linears.linear(torch.cat([part.weight.detach() for part in parts]), _biases(parts), bits, packs)

    return Layer(
        index=index,
        norm=_norm(layer.input_layernorm, dtype),
        qkv=fused(attention.q_proj, attention.k_proj, attention.v_proj),
        q_norm=_norm(attention.q_norm, dtype) if hasattr(attention, "q_norm") else None,
        k_norm=_norm(attention.k_norm, dtype) if hasattr(attention, "k_norm") else None,
        out=fused(attention.o_proj),
        mlp_norm=_norm(layer.post_attention_layernorm, dtype),
        gate_up=fused(mlp.gate_proj, mlp.up_proj),
        down=fused(mlp.down_proj),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
    )


def _norm(norm: Any, dtype: torch.dtype) -> Norm:
    return Norm.of(norm.weight.detach().to(dtype), norm.variance_epsilon)


def _biases(parts: Sequence[nn.Linear]) -> Tensor | None:
    if all(part.bias is None for part in parts):
        return None
    return torch.cat(
        [part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias.detach() for part in parts]
    )


def _dtype(model: PreTrainedModel, bits: int | None) -> torch.dtype:
    """Of what lies between the weights. Kernels of 8-bit numbers take float32, those of 4-bit weights bfloat16."""
    if bits is None:
        return model.dtype
    return torch.float32 if bits == 8 and model.device.type == "cpu" and linears.multiplies_int8() else torch.bfloat16


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
