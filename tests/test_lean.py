"""The lean pass says what the model says that it was built from, whatever order the cache is used in."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from duoexp.config import InputError
from duoexp.lm import linears
from duoexp.lm.causal_lm import CachedLM
from duoexp.lm.lean import LeanLM, self_draft
from duoexp.lm.linears import Dense, Dynamic8, Int4, Int8, Packed
from duoexp.lm.transformers_lm import TransformersLM
from duoexp.tree import Draft

VOCABULARY = 96
SIZES = {
    "vocab_size": 100,  # four rows of padding
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama, biases": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "llama, llama3 rope": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3)),
    "llama, yarn rope": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=YARN)),
    "llama, no groups": lambda: LlamaForCausalLM(LlamaConfig(**SIZES | {"num_key_value_heads": 4})),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=24, tie_word_embeddings=True)),
}
# Root mean square of a rounded copy's error in logits, over the standard deviation of the original's. Random weights of
# other seeds gave 0.012 to 0.041 and 0.16 to 0.30; a checkpoint's are wider, so this bounds the code, not a draft.
BOUND = {8: 0.06, 4: 0.35}


@torch.no_grad()
def drawn(name: str, seed: int = 0) -> PreTrainedModel:
    """The model with weights that leave no part of it without effect: norms and biases, too, differ from 1 and 0."""
    torch.manual_seed(seed)
    model = MODELS[name]().eval()
    for key, weight in model.named_parameters():
        scale = 1.0 if "embed" in key else 1 / math.sqrt(weight.shape[-1])
        weight.copy_(torch.randn_like(weight) * (0.2 if weight.dim() == 1 else scale))
        if "norm" in key:
            weight += 1
    return model


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def spoken(lm: CachedLM) -> Iterator[Tensor]:
    """One text after another: prompt, token, chain, trees that grow and are followed, rollback, a long prompt."""
    text = ids(300)
    chain = Draft((5, 6, 7), (-1, 0, 1))
    tree = Draft((5, 9, 6, 8, 3), (-1, -1, 0, 0, 1))
    grown = tree.grow(3, [11, 12]).grow(4, [13])
    yield lm.logits(text[:10])
    yield lm.logits(text[:11])
    yield lm.logits(text[:11], chain)
    yield lm.logits([*text[:11], 5, 6], Draft())
    yield lm.logits(text[:11], tree)
    yield lm.logits(text[:11], grown, rows=[6, 7, 8])
    yield lm.logits([*text[:11], 5, 8, 12], tree)  # slots of a branch that lie apart move together
    yield lm.logits([*text[:11], 5, 8, 12, 9, 3, 7], chain)
    yield lm.logits(text[:4], tree, rows=[0, 5])
    yield lm.logits(text[:290], tree)  # beyond the buffer's first size
    lm.clear()
    yield lm.logits(text[:20], tree)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_the_stock_model(name: str) -> None:
    model = drawn(name)
    stock, lean = TransformersLM(model, VOCABULARY), LeanLM.from_model(model, VOCABULARY)
    for expected, found in zip(spoken(stock), spoken(lean), strict=True):
        assert found.shape == expected.shape and found.dtype == expected.dtype
        assert relative(found, expected) < 1e-4


def test_a_bf16_model_stays_within_its_rounding() -> None:
    model = drawn("llama").bfloat16()
    stock, lean = TransformersLM(model, VOCABULARY), LeanLM.from_model(model, VOCABULARY)
    for expected, found in zip(spoken(stock), spoken(lean), strict=True):
        assert found.dtype == torch.bfloat16
        assert relative(found.float(), expected.float()) < 0.05


@pytest.mark.parametrize("bits", BOUND)
@pytest.mark.parametrize("name", ["llama", "llama, biases", "qwen3"])
def test_rounded_weights_keep_the_logits_within_a_bound(name: str, bits: int) -> None:
    model = drawn(name)
    stock, lean = TransformersLM(model, VOCABULARY), LeanLM.from_model(model, VOCABULARY, bits)
    for expected, found in zip(spoken(stock), spoken(lean), strict=True):
        error = (found.float() - expected).square().mean().sqrt() / expected.std()
        assert error < BOUND[bits]


def test_layers_run_are_the_layers_named() -> None:
    model = drawn("llama")
    lean = LeanLM.from_model(model, VOCABULARY, layers=[0, 2])
    del model.model.layers[1]
    model.model.layers[1].self_attn.layer_idx = 1
    model.config.num_hidden_layers = 2
    stock = TransformersLM(model, VOCABULARY)
    for expected, found in zip(spoken(stock), spoken(lean), strict=True):
        assert relative(found, expected) < 1e-4


def test_a_self_draft_releases_the_model_and_still_runs() -> None:
    model = drawn("llama, tied")
    draft = self_draft(model, VOCABULARY)
    assert all(weight.is_meta for weight in model.parameters())
    assert draft.logits(ids(5)).isfinite().all()


whole_numbers = pytest.mark.skipif(not linears.multiplies_int8(), reason="no kernel for 8-bit products here")


@pytest.mark.skipif(not linears.packs_bf16(), reason="no instructions for bfloat16 here")
@pytest.mark.parametrize("biased", [False, True])
def test_packed_weights_say_what_plain_ones_do_whatever_rows_lie_beside(biased: bool) -> None:
    weight, x = torch.randn(96, 64).bfloat16(), torch.randn(40, 64).bfloat16()
    bias = torch.randn(96).bfloat16() if biased else None
    packed, whole = linears.linear(weight, bias, None), Dense(weight, bias)(x)
    assert isinstance(packed, Packed)
    for rows in (1, 2, 3, 5, 17, 40):
        assert torch.equal(packed(x[-rows:]), whole[-rows:])
    assert isinstance(linears.linear(weight, bias, None, packs=False), Dense)


@whole_numbers
def test_a_head_computes_its_best_outputs_from_the_weights_as_they_are() -> None:
    weight, x = torch.randn(500, 64), torch.randn(3, 64)
    found, exact = linears.head(weight, 8)(x), x @ weight.T
    best = exact.argmax(1)
    assert torch.equal(found.argmax(1), best)
    rows = torch.arange(3)
    torch.testing.assert_close(found[rows, best], exact[rows, best])
    assert not torch.allclose(found, exact, rtol=1e-4)  # the others are rounded


@pytest.mark.parametrize("kind", [Int8, Int4, pytest.param(Dynamic8, marks=whole_numbers)])
def test_few_rows_and_many_say_the_same(kind: type[Int8] | type[Int4] | type[Dynamic8]) -> None:
    weight, bias, x = torch.randn(48, 64), torch.randn(48), torch.randn(linears.MANY, 64).bfloat16()
    if kind is Int4:
        weight = on_grid(weight)
    layer = kind.of(weight, bias)
    few = torch.cat([layer(x[:1]), layer(x[1:])])
    assert relative(few.float(), layer(x).float()) < 0.02


def on_grid(weight: Tensor) -> Tensor:
    """Rounded to 16 values in each group of a row, as a 4-bit checkpoint holds them."""
    groups = weight.unflatten(1, (-1, linears.GROUP))
    low, high = groups.aminmax(dim=2, keepdim=True)
    return (((groups - low) / (high - low) * 15).round() / 15 * (high - low) + low).flatten(1)


def test_eight_bits_take_four_where_four_lose_nothing() -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    eight = Dynamic8 if linears.multiplies_int8() else Int8
    assert isinstance(linears.linear(weight, None, 8), eight)
    assert isinstance(linears.linear(on_grid(weight), None, 8), Int4)
    assert isinstance(linears.linear(weight, None, 4), Int4)
    assert isinstance(linears.linear(weight[:50], None, 4), eight)  # 50 rows can't be packed


def test_a_row_of_zeros_has_a_scale_and_stays_zero() -> None:
    weight, x = torch.zeros(16, 32), torch.randn(2, 32).bfloat16()
    eight, four = Int8.of(weight, None), Int4.of(weight, None)
    assert (eight.scale > 0).all() and (four.scales[..., 0] > 0).all()  # what 0 / 0 rounds to depends on the processor
    assert (eight(x) == 0).all() and (four(x) == 0).all()


def test_what_it_cannot_run_is_named() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=100))
    with pytest.raises(InputError, match="GPT2LMHeadModel has no lean pass"):
        LeanLM.from_model(gpt2, VOCABULARY)
    with pytest.raises(InputError, match="rolled back"):
        LeanLM.from_model(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)), VOCABULARY)
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(InputError, match="rope_type='dynamic'"):
        LeanLM.from_model(LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=dynamic)), VOCABULARY)
    adapted = drawn("llama")
    adapted.model.layers[1].mlp.up_proj = torch.nn.Sequential(adapted.model.layers[1].mlp.up_proj)
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.up_proj of LlamaForCausalLM is a Sequential"):
        LeanLM.from_model(adapted, VOCABULARY)


def test_settings_that_no_model_has_are_refused() -> None:
    model = drawn("llama")
    for layers in ([], [0, 3], [-1]):
        with pytest.raises(InputError, match="3 layers"):
            LeanLM.from_model(model, VOCABULARY, layers=layers)
    with pytest.raises(InputError, match="weights of 3 bits"):
        LeanLM.from_model(model, VOCABULARY, bits=3)


@pytest.mark.parametrize("bits", [None, *BOUND])
def test_a_processor_without_these_instructions_says_the_same(
    bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = drawn("llama, biases").bfloat16()
    expected = list(spoken(LeanLM.from_model(model, VOCABULARY, bits)))
    monkeypatch.setattr(linears, "multiplies_int8", lambda: False)
    monkeypatch.setattr(linears, "packs_bf16", lambda: False)
    for found, known in zip(spoken(LeanLM.from_model(model, VOCABULARY, bits)), expected, strict=True):
        error = (found.float() - known.float()).square().mean().sqrt() / known.float().std()
        assert error < BOUND.get(bits or 0, 0.02)
