"""A distilled draft: the folder that it ships in -> a model, with the embedding and the head's rows of its target."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from duoexp.config import InputError
from duoexp.lm.copying import Copier, CopyingLM, Phrases
from duoexp.lm.lean import LeanLM
from duoexp.lm.tokenizer import tokenizer_hash

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
SCALE = ".scale"  # beside an int8 matrix
PHRASES = "phrases."  # before the names of `Phrases`


@dataclass(frozen=True)
class About:
    """What the `duoexp` section of the config tells, beside the shape."""

    tokenizer: str  # `tokenizer_hash` of the target's
    layers: tuple[int, ...]  # of the target, that the student's started from
    head: int
    bits: int | None
    match: int  # tokens of the longest match in the context that it copies behind; 0: none
    phrases: int  # how many it holds


def is_draft(folder: Path) -> bool:
    """Whether the folder is one that `load_draft` reads, and not a model that stands by itself."""
    try:
        return "duoexp" in json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError):
        return False


def load_draft(
    folder: Path,
    target: PreTrainedModel | str,
    vocabulary: int,
    dtype: torch.dtype = torch.bfloat16,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str = "cpu",
    revision: str | None = None,
) -> CopyingLM:
    """The draft, with the embedding and the head's rows of its target: a model, or the place of its checkpoint.

    tokenizer: the target's, where it is at hand. revision: of a target that a hub has. Raises InputError for a folder
    that holds no draft, and for a target that it was not made for.
    """
    place = target if isinstance(target, str) else target.name_or_path
    config = draft_config(
        folder, tokenizer or AutoTokenizer.from_pretrained(place, revision=revision, trust_remote_code=False)
    )
    about = About(**config.duoexp)
    tensors = _dequantised(folder, dtype)
    copier = make_copier(about, tensors)
    embedding, rows = _rows(target, revision)
    if embedding.shape[1] != config.hidden_size:
        raise InputError(
            f"the draft in {folder} reads an embedding of size {config.hidden_size}, and {place} has one of size "
            f"{embedding.shape[1]}; make a draft for it with `python -m duoexp.distill`"
        )
    ids = tensors.pop("head_ids").long()
    into, out = tensors.pop("into"), tensors.pop("out")
    gates, bias = tensors.pop("gates.weight"), tensors.pop("gates.bias")
    model: Any = empty(config, config.num_hidden_layers)
    model.to(dtype)
    model.model.load_state_dict(
        {name.removeprefix("body."): tensor for name, tensor in tensors.items()}
        | {"embed_tokens.weight": model.model.embed_tokens.weight}
    )
    model.model.embed_tokens.weight = _turned(embedding, into.T, dtype)
    ids = ids[ids < vocabulary]
    # (x out^T) rows^T = x (rows out)^T
    model.lm_head.weight = _turned(torch.cat([rows[ids].to(dtype), gates]), out, dtype)
    lm = LeanLM.from_model(model.to(device), len(ids) + copier.kinds, bits=about.bits)
    return CopyingLM(lm, copier, vocabulary, ids.to(device), bias.to(device))


def make_copier(about: About, tensors: dict[str, Tensor]) -> Copier:
    """Takes the phrases out of the tensors."""
    names = (f"{PHRASES}keys", f"{PHRASES}tokens", f"{PHRASES}kinds")
    return Copier(about.match, Phrases(*(tensors.pop(name) for name in names)) if about.phrases else None)


def draft_config(folder: Path, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The draft's shape, with what it says of itself in `duoexp`.

    Raises InputError for a folder that holds no draft, and for the tokenizer of a target that it was not made for.
    """
    if not is_draft(folder):
        raise InputError(f"{folder} holds no draft that `python -m duoexp.distill` wrote; check its path")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except ValueError as error:  # of an unknown architecture, or one that brings code
        raise InputError(
            f"{folder / CONFIG} names no model ({' '.join(str(error).split())}); make the draft anew"
        ) from error
    try:
        about = About(**config.duoexp)
    except TypeError as error:
        raise InputError(f"{folder / CONFIG} is of another version ({error}); make the draft anew") from error
    if tokenizer_hash(tokenizer) != about.tokenizer:
        raise InputError(
            f"the draft in {folder} was made for a target with another tokenizer than {tokenizer.name_or_path}; "
            "make one for it with `python -m duoexp.distill`, or name another model.draft"
        )
    return config


def packaged(folder: Path, target: str, tokenizer: PreTrainedTokenizerBase, hidden_size: int) -> Path:
    """The draft in `folder` that fits the target. Raises InputError where none does."""
    known = sorted(place for place in folder.glob("*") if is_draft(place))
    of_target = tokenizer_hash(tokenizer)
    for place in known:
        config = json.loads((place / CONFIG).read_text())
        if config["duoexp"].get("tokenizer") == of_target and config["hidden_size"] == hidden_size:
            return place
    raise InputError(
        f"model.draft=distilled: none of the drafts that ship ({', '.join(place.name for place in known) or 'none'}) "
        f"fits {target}; make one with `python -m duoexp.distill`, or name another model.draft"
    )


def _dequantised(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    try:
        held = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder / WEIGHTS} cannot be read ({error}); export the draft again") from error
    tensors = {}
    for name, tensor in held.items():
        if name.endswith(SCALE):
            continue
        scale = held.get(name + SCALE)
        tensor = tensor if scale is None else tensor.float() * scale.float()[:, None]
        tensors[name] = tensor.to(dtype) if tensor.is_floating_point() or scale is not None else tensor
    return tensors


def _turned(rows: Tensor, turn: Tensor, dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter((rows.to(dtype) @ turn.to(dtype)).contiguous(), requires_grad=False)


def _rows(target: PreTrainedModel | str, revision: str | None) -> tuple[Tensor, Tensor]:
    """Embedding and head of the target, without the rest of it where a single local file holds them."""
    if isinstance(target, str) and (file := Path(target) / WEIGHTS).is_file():
        with safe_open(file, "pt") as weights:
            names = set(weights.keys())
            if "model.embed_tokens.weight" in names:
                embedding = weights.get_tensor("model.embed_tokens.weight")
                return embedding, weights.get_tensor("lm_head.weight") if "lm_head.weight" in names else embedding
    model: Any = target
    if isinstance(target, str):
        model = AutoModelForCausalLM.from_pretrained(
            target, revision=revision, use_safetensors=True, trust_remote_code=False
        )
    return model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()


def empty(config: PreTrainedConfig, layers: int) -> PreTrainedModel:
    """A float32 model like the target with so many layers, and without an embedding until it is given one."""
    config = copy.deepcopy(config)
    config.num_hidden_layers, config.tie_word_embeddings = layers, False
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    vocabulary, config.vocab_size, config.pad_token_id = config.vocab_size, 1, None  # the real one would cost seconds
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    model.config.vocab_size = vocabulary
    return model
