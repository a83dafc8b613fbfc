"""Linear maps, in the form that the machine at hand runs fastest: as they are, or with rounded weights for a draft."""

import warnings
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from duoexp.config import InputError

GROUP = 32  # inputs that share a scale in 4 bits
BLOCK = 16  # torch packs 4-bit rows by so many
MANY = 12  # rows for which a dense product, unpacking included, is as quick as the packed kernels, which spare memory
BEST = 4  # outputs of a head to compute again
LEAST = 1e-30  # what a scale is at least: a row of zeros needs any but 0


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
class Packed:
    """bfloat16 weights laid out once as the processor's instructions take them, which `F.linear` does at every call.

    The results are the same to the last bit, and those of a row do not depend on the rows beside it.
    """

    weight: Tensor  # in oneDNN's layout, which depends on the processor
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> "Packed":
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), BLOCK), bias)

    def __call__(self, x: Tensor) -> Tensor:
        few = x.expand(4, -1) if len(x) == 1 else torch.cat([x, x]) if len(x) == 2 else x  # four rows are the quickest
        return _packed_linear(few, self.weight, self.bias)[: len(x)]


@dataclass(frozen=True)
class Int8:
    """Symmetric 8 bits with a scale a row (LLM.int8(), 2208.07339, section 2, of weights alone)."""

    weight: Tensor  # [outputs, inputs], int8
    scale: Tensor  # [outputs], bf16
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> "Int8":
        rows = weight.float()
        scale = (rows.abs().amax(1) / 127).clamp(min=LEAST).bfloat16()  # rounded first: the rest makes up for it
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
class Dynamic8:
    """`Int8` with the activations in 8 bits too, rounded as they come; on a processor only.

    Products of whole numbers have instructions of their own there, which take half the time. Many rows keep their
    activations, as in reading a prompt: what a draft remembers of it is worth more than the time.
    """

    weight: Any  # in torch's packing, which depends on the processor
    many: Int8

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> "Dynamic8":
        eight = Int8.of(weight, bias)
        zeros = torch.zeros(len(weight), dtype=torch.long)
        with warnings.catch_warnings():  # torch means to drop these kernels one day: see `multiplies_int8`
            warnings.filterwarnings("ignore", message="torch.quantize_per_tensor", category=UserWarning)
            rows = torch._make_per_channel_quantized_tensor(eight.weight, eight.scale.double(), zeros, 0)
        return cls(torch.ops.quantized.linear_prepack(rows, None if bias is None else bias.float()), eight)

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) >= MANY:
            return self.many(x.bfloat16()).to(x.dtype)
        return torch.ops.quantized.linear_dynamic(x.float(), self.weight, _narrow()).to(x.dtype)


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
            return self.many(x.bfloat16()).to(x.dtype)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), self.weight, GROUP, self.scales).to(x.dtype)
        return y if self.many.bias is None else y + self.many.bias


@dataclass(frozen=True)
class Shortlisted:
    """A head whose best outputs, by 8 bits, are computed again from the weights as they are.

    Which of them is the best is what a draft is asked for, and what 8 bits get wrong where two lie close together.
    """

    eight: Dynamic8
    weight: Tensor  # [outputs, inputs]

    def __call__(self, x: Tensor) -> Tensor:
        y = self.eight(x)
        best = y.topk(min(BEST, y.shape[1])).indices
        rows = self.weight[best].to(x.dtype)  # [rows, BEST, inputs]
        return y.scatter_(1, best, (rows @ x[:, :, None])[..., 0])


def head(weight: Tensor, bits: int | None, packs: bool = True) -> Linear:
    """As `linear`, in 8 bits at least: in 4, the head alone cost 7 of 100 tokens of SmolLM2-135M."""
    rounded = linear(weight, None, bits and 8, packs)
    return Shortlisted(rounded, weight) if isinstance(rounded, Dynamic8) else rounded


def linear(weight: Tensor, bias: Tensor | None, bits: int | None, packs: bool = True) -> Linear:
    """None: the weights as they are, packed where that serves, unless packs=False.

    8: at most the error of 8 bits, in 4 where the weights were in 4 before. 4: in 4 bits where the shape allows it.

    Raises InputError for other bits, and for 4 away from a processor.
    """
    on_processor = weight.device.type == "cpu"
    if bits is None:
        fits = packs and on_processor and weight.dtype == torch.bfloat16 and packs_bf16()
        return Packed.of(weight, bias) if fits else Dense(weight, bias)
    if bits not in (4, 8):
        raise InputError(f"weights of {bits} bits have no kernel; choose 8 or 4")
    if bits == 4 and not on_processor:
        raise InputError(f"weights of 4 bits need a processor, and these lie on {weight.device}; choose 8")
    fits = weight.shape[0] % BLOCK == 0 and weight.shape[1] % GROUP == 0
    if on_processor and fits and (bits == 4 or on_four_bits(weight)):
        return Int4.of(weight, bias)
    return (Dynamic8 if on_processor and multiplies_int8() else Int8).of(weight, bias)


def on_four_bits(weight: Tensor) -> bool:
    """4 bits lose no more than 8 do: so where the weights were in 4 bits before, as in many a GGUF file."""
    some = weight[:64]  # tells already, at a small part of the time
    groups, scale, offset = _groups(some)
    rounded = ((groups - offset) / scale).round().clamp(-8, 7) * scale + offset
    return bool((rounded.flatten(1) - some).norm() <= (Int8.of(some, None).dense() - some).norm())


def packs_bf16() -> bool:
    """Whether torch can lay out bfloat16 weights for this processor."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def multiplies_int8() -> bool:
    """Whether torch has a kernel for products of 8-bit numbers on this processor."""
    has_kernel = hasattr(torch, "_make_per_channel_quantized_tensor") and hasattr(torch.ops.quantized, "linear_dynamic")
    return has_kernel and torch.backends.quantized.engine in ("x86", "fbgemm")


def _narrow() -> bool:
    """Whether activations must spare a bit: without VNNI, sums of two products overflow 16 bits."""
    return not torch.cpu._is_vnni_supported()


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def _groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights in groups [outputs, inputs / GROUP, GROUP], and for each the scale and the offset of 4 bits, rounded."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=2, keepdim=True)
    scale = ((high - low) / 15).clamp(min=LEAST).bfloat16().float()
    return groups, scale, (low + 8 * scale).bfloat16().float()
