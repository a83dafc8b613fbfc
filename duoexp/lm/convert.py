"""A GGUF file, dequantised once into a safetensors folder that transformers loads like any other.

transformers' own `from_pretrained(gguf_file=...)` wants accelerate, and returns a model that refuses to be saved until
its quantization is dropped. So the two halves below it are called here: the config, and the tensors by name.
"""

import contextlib
import io
import logging
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.integrations.gguf import GgufHeader, convert_gguf_tokenizer, get_gguf_tokenizer, read_gguf_metadata
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from duoexp.config import InputError

log = logging.getLogger("duoexp")

# How byte-level vocabularies split text, by `tokenizer.ggml.pre`, as in llama.cpp's llama-vocab.cpp. transformers 5.24
# takes every name that it doesn't know for GPT-2's, so that "\n    1" gets ids that SmolLM2 never saw in training.
_GPT2 = frozenset({"default", "gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling"})
_DIGITS_FIRST = frozenset({"starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"})
# These begin with BOS unless the file denies it, and take a whole word from the vocabulary before they try merges.
_LLAMA3 = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"})


def convert(file: Path, folder: Path) -> None:
    """Write weights and tokenizer of the GGUF `file` into `folder`. Raises InputError when the file cannot be read."""
    start = time.perf_counter()
    log.info("converting %s to safetensors; this happens once", file.name)
    try:
        model, tokenizer = _model(file), _tokenizer(file)
    except InputError:
        raise
    except Exception as error:  # a file that is broken or of an unknown kind trips the readers up anywhere
        raise InputError(
            f"{file} cannot be converted ({type(error).__name__}: {error}); "
            "give a whole GGUF file of an architecture that transformers reads, or a safetensors checkpoint"
        ) from error
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    log.info("converted %s in %.1f s", file.name, time.perf_counter() - start)


def quiet() -> contextlib.AbstractContextManager[object]:
    """No progress bars: transformers draws some of them past its own setting, straight to stderr."""
    return contextlib.redirect_stderr(io.StringIO())


def _model(file: Path) -> PreTrainedModel:
    metadata, names = read_gguf_metadata(str(file))
    _check(file, metadata, names)
    # bfloat16 for quantised blocks: its rounding stays below that of 8 bits or fewer, it takes half the disk of
    # float32, and unlike float16 it cannot overflow. Floats keep the type that they have in the file.
    dtype = GgufHeader.from_file(str(file)).dtype or torch.bfloat16
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    with quiet():
        read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model, torch_dtype=dtype)
    model.load_state_dict(read["tensors"], strict=False, assign=True)
    model.tie_weights()
    if missing := [name for name, weight in model.named_parameters() if weight.is_meta]:
        raise InputError(f"{file} lacks {len(missing)} weights, {missing[0]} first; give a whole GGUF file")
    model.generation_config.eos_token_id = _ends(model.generation_config.eos_token_id, metadata)
    return model


def _check(file: Path, metadata: dict[str, Any], names: tuple[str, ...]) -> None:
    if (parts := metadata.get("split.count", 1)) > 1:
        raise InputError(f"{file} is one of {parts} parts; join them with llama-gguf-split --merge")
    if "rope_freqs.weight" in names or any(key.endswith(".rope.scaling.factor") for key in metadata):
        log.warning("%s scales its rotary frequencies; the conversion drops that, so its text differs", file.name)


def _ends(known: int | list[int] | None, metadata: dict[str, Any]) -> int | list[int] | None:
    """The ids that end generation. A GGUF tells those of a text, a turn and a message; transformers reads the first."""
    ids = set(known if isinstance(known, list) else [known])
    ids |= {metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eot", "eom")}
    ends = sorted(end for end in ids if end is not None)
    return ends if len(ends) > 1 else next(iter(ends), None)


def _tokenizer(file: Path) -> PreTrainedTokenizerFast:
    # not AutoTokenizer, which would also read a tokenizer_config.json that happens to lie beside the file
    architecture, fields, settings = get_gguf_tokenizer(str(file))
    backend, _ = convert_gguf_tokenizer(architecture, fields)
    if fields.get("tokenizer_type") == "gpt2":
        _split_as_llama_cpp(backend, fields.get("pre_tokenizer_type", "default"), settings)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


def _split_as_llama_cpp(backend: Tokenizer, kind: str, settings: dict[str, Any]) -> None:
    if kind in _DIGITS_FIRST:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif kind in _LLAMA3:
        backend.model.ignore_merges = True
        settings.setdefault("add_bos_token", True)
    elif kind not in _GPT2 and kind not in GGUF_PRE_TOKENIZER_SPLITS:
        log.warning("the split %r of a GGUF's vocabulary is unknown and taken for GPT-2's: ids may differ", kind)
