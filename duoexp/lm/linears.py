"""Linear maps of a draft: as they are, or with their weights rounded to 8 or 4 bits and activations left in bf16."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from duoexp.config import InputError

GROUP = 32  # inputs that share a scale in 4 bits
BLOCK = 16  # torch packs 4-bit rows by so many
MANY = 12  # rows for which a dense product, unpacking included, is as quick as the packed kernels, which spare memory


class Linear(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """[rows, inputs] -> [rows, outputs]"""
        ...


@dataclass(frozen=True)
class Dense:
    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) == 1 and x.device.type == "cpu" and x.dtype == torch.bfloat16:
            # A single row adds up in another order than it does among others, which would make its logits its own.
            return F.linear(x.expand(2, -1), self.weight, self.bias)[:1]
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class Int8:
    """Symmetric 8 bits with a scale a row (LLM.int8(), 2208.07339, section 2, of weights alone)."""

    weight: Tensor  # [outputs, inputs], int8
    scale: Tensor  # [outputs], bf16
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> "Int8":
        rows = weight.float()
        # rounded first, so that the whole numbers make up for it; a row of zeros needs any scale but 0
        scale = (rows.abs().amax(1) / 127).clamp(min=1e-30).bfloat16()
        whole = (rows / scale[:, None]).round_().clamp_(-127, 127)
        return cls(whole.to(torch.int8), scale, None if bias is None else bias.bfloat16())

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and len(x) < MANY:
            y = torch.ops.aten._weight_int8pack_mm(x, self.weight, self.scale)
        else:
            y = F.linear(x, self.weight.to(x.dtype)) * self.scale
        return y if self.bias is None else y + self.bias

    def dense(self) -> Tensor:
        """The weights that it stands for, [outputs, inputs] in float32."""
        return self.weight * self.scale.float()[:, None]


@dataclass(frozen=True)
class Int4:
    """4 bits with a scale and an offset for each GROUP inputs of a row; on a processor only.

    Many rows take the 8 bits: its kernel needs twice the time of a dense product for them, as in reading a prompt.
    """

    weight: Tensor  # in torch's packing, which depends on the processor
    scales: Tensor  # [inputs / GROUP, outputs, 2], bf16: scale, offset
    many: Int8

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> "Int4":
        groups, scale, offset = _groups(weight)
        whole = ((groups - offset) / scale).add_(8).round_().clamp_(0, 15)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(whole.flatten(1).to(torch.int32), 1)
        scales = torch.cat([scale, offset], -1).transpose(0, 1).bfloat16().contiguous()
        return cls(packed, scales, Int8.of(weight, bias))

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) >= MANY:
            return self.many(x)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.weight, GROUP, self.scales)
        return y if self.many.bias is None else y + self.many.bias


def linear(weight: Tensor, bias: Tensor | None, bits: int | None) -> Linear:
    """None: dense. 8: at most the error of 8 bits, in 4 where they cost no more. 4: 4 bits where the shape allows it.

    Raises InputError for other bits, and for 4 away from a processor.
    """
    if bits is None:
        return Dense(weight, bias)
    if bits not in (4, 8):
        raise InputError(f"weights of {bits} bits have no kernel; choose 8 or 4")
    on_processor = weight.device.type == "cpu"
    if bits == 4 and not on_processor:
        raise InputError(f"weights of 4 bits need a processor, and these lie on {weight.device}; choose 8")
    fits = weight.shape[0] % BLOCK == 0 and weight.shape[1] % GROUP == 0
    if on_processor and fits and (bits == 4 or on_four_bits(weight)):
        return Int4.of(weight, bias)
    return Int8.of(weight, bias)


def on_four_bits(weight: Tensor) -> bool:
    """4 bits lose no more than 8 do: so where the weights were in 4 bits before, as in many a GGUF file."""
    some = weight[:64]  # tells already, at a small part of the time
    groups, scale, offset = _groups(some)
    rounded = ((groups - offset) / scale).round().clamp(-8, 7) * scale + offset
    return bool((rounded.flatten(1) - some).norm() <= (Int8.of(some, None).dense() - some).norm())


def _groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights in groups [outputs, inputs / GROUP, GROUP], and for each the scale and the offset of 4 bits, rounded."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=2, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-30).bfloat16().float()
    return groups, scale, (low + 8 * scale).bfloat16().float()
