"""Tiny Llamas of random weights over bytes: for tests and for a first run, with nothing to download.

`random:noise=0.08` is a draft for `random:`: it guesses about 70 % of the greedy tokens, at other sizes and seeds too.
"""

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from duoexp.config import InputError
from duoexp.lm.convert import quiet

SPECIAL = ("<s>", "</s>", "<pad>")
VOCABULARY = 256 + len(SPECIAL)  # token i below 256 is byte i


@dataclass(frozen=True)
class RandomModel:
    """The settings in `random:KEY=VALUE,...`. Extra rows, like noise, leave the other weights as they are."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    seed: int = 0
    noise: float = 0.0  # standard deviation of what is added to a weight, in standard deviations of the weight
    context: int = 512  # positions
    extra_rows: int = 0  # of embedding and head, beyond the tokenizer's vocabulary

    def __str__(self) -> str:
        return "random:" + ",".join(f"{key}={value}" for key, value in asdict(self).items())


def parse(text: str) -> RandomModel:
    """The settings in "KEY=VALUE,...". Raises InputError on an unknown or repeated key and on an impossible value."""
    kinds = {field.name: field.type for field in fields(RandomModel)}
    values: dict[str, float] = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in kinds or key in values:
            raise InputError(f"random:{text} has the key {key!r}, where each of {', '.join(kinds)} may stand once")
        try:
            values[key] = float(value) if kinds[key] is float else int(value)
        except ValueError:
            raise InputError(f"random:{text} has {value!r} for {key}; give a number, as in {key}=1") from None
    model = RandomModel(**values)  # type: ignore[arg-type]  # each has its field's kind
    _check(model)
    return model


def _check(model: RandomModel) -> None:
    for key, value in asdict(model).items():
        least = 0 if key in ("seed", "noise", "extra_rows") else 1
        if not least <= value < 2**31:  # false for nan, too
            raise InputError(f"{model} has {key} out of range; give at least {least} and less than 2**31")
    # rotary embeddings turn the dimensions of a head in pairs
    if model.hidden % (2 * model.heads) or model.heads % model.kv_heads:
        raise InputError(
            f"{model} cannot be built: hidden must be a multiple of twice heads, and heads one of kv_heads; "
            "try hidden=64,heads=4,kv_heads=2"
        )


def write(model: RandomModel, folder: Path) -> None:
    """Save weights (float32) and tokenizer of `model` into `folder`; the same settings give the same weights."""
    with quiet():
        _llama(model).save_pretrained(folder)
        _tokenizer().save_pretrained(folder)


def _llama(model: RandomModel) -> LlamaForCausalLM:
    bos, eos, pad = range(256, VOCABULARY)
    config = LlamaConfig(
        vocab_size=VOCABULARY + model.extra_rows,
        hidden_size=model.hidden,
        intermediate_size=2 * model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        max_position_embeddings=model.context,
        tie_word_embeddings=False,  # tied, a random model repeats the token that it has just read
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    llama = LlamaForCausalLM(config)
    _draw(llama, model)
    return llama


@torch.no_grad()
def _draw(llama: LlamaForCausalLM, model: RandomModel) -> None:
    draws, noises, extras = (torch.Generator().manual_seed(model.seed + offset) for offset in range(3))
    for name, weight in llama.named_parameters():
        if weight.dim() == 1:
            continue  # a norm stays one
        kept = min(len(weight), VOCABULARY) if _has_vocabulary(name) else len(weight)
        drawn = _normal(kept, weight, draws)
        drawn += model.noise * drawn.std() * _normal(kept, weight, noises)
        weight.copy_(_scale(name, weight) * torch.cat([drawn, _normal(len(weight) - kept, weight, extras)]))


def _has_vocabulary(name: str) -> bool:
    return "embed_tokens" in name or "lm_head" in name


def _normal(rows: int, like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, like.shape[1], generator=generator)


def _scale(name: str, weight: Tensor) -> float:
    # Each layer keeps the size of what it reads; logits of standard deviation 4 make the likeliest of the tokens
    # about as likely as all others together, and greedy text wanders without falling into a loop.
    gain = 4.0 if "lm_head" in name else 1.0
    return 1.0 if "embed_tokens" in name else gain / math.sqrt(weight.shape[1])


def _tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(vocab={char: byte for byte, char in bytes_to_unicode().items()}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    bos, eos, pad = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=pad, add_bos_token=True
    )
