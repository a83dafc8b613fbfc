"""From a checkpoint to a tokenizer and to a model on its device. Every call into the hub is made here."""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from duoexp.config import InputError
from duoexp.lm.causal_lm import CausalLM
from duoexp.lm.distilled import draft_config, is_draft, load_draft, packaged
from duoexp.lm.lean import FAMILY, LeanLM, self_draft
from duoexp.lm.sources import PACKAGED, Checkpoint
from duoexp.lm.static import StaticLM
from duoexp.lm.transformers_lm import TransformersLM

T = TypeVar("T")


@dataclass(frozen=True)
class Model:
    """All that is known of a model before its weights are read."""

    source: str
    checkpoint: Checkpoint
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    trust_remote_code: bool

    @property
    def rows(self) -> int:
        """Of the embedding and the head: tokens, then padding."""
        return self.config.get_text_config(decoder=True).vocab_size

    @property
    def context(self) -> int:
        """Tokens that it can look at."""
        return self.config.get_text_config(decoder=True).max_position_embeddings

    @property
    def tokens(self) -> int:
        return min(self.rows, len(self.tokenizer))


def describe(
    source: str, checkpoint: Checkpoint, trust_remote_code: bool = False, target: Model | None = None
) -> Model:
    """Reads config and tokenizer. Raises InputError when the model can't be reached.

    target: that of a draft. A distilled draft has its tokenizer, embedding and head from there.
    """
    if target is not None and checkpoint.path == str(PACKAGED):
        folder = packaged(PACKAGED, target.source, target.tokenizer, target.config.hidden_size)
        checkpoint = replace(checkpoint, path=str(folder))
    if target is not None and is_draft(Path(checkpoint.path)):
        config = draft_config(Path(checkpoint.path), target.tokenizer)
        return replace(target, source=source, checkpoint=replace(checkpoint, base=target.checkpoint), config=config)
    path, revision, trusted = checkpoint.path, checkpoint.revision, trust_remote_code
    config = _reached(source, lambda: AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trusted))
    if "/" in str(config._attn_implementation) and not trusted:
        config._attn_implementation = None  # a hub's kernel, which is code
    tokenizer = _reached(
        source, lambda: AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trusted)
    )
    if checkpoint.layers is not None:
        text = config.get_text_config(decoder=True)
        text.num_hidden_layers = checkpoint.layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[: checkpoint.layers]
    return Model(source, checkpoint, config, tokenizer, trust_remote_code)


def load(model: Model, engine: str, device: str, dtype: str, vocabulary: int) -> CausalLM:
    """The model with its weights, which are safetensors or nothing; ids from `vocabulary` on are masked as padding.

    engine: `transformers`, or `lean` for our own pass, which a rounded model takes in any case; `auto` takes it on a
    processor where the model is of its family. `static`: the same in fixed shapes; `compiled`: and as CUDA graphs.
    """
    if model.checkpoint.base is not None:
        folder, base = Path(model.checkpoint.path), model.checkpoint.base
        kind = getattr(torch, dtype)
        return load_draft(folder, base.path, vocabulary, kind, model.tokenizer, device, base.revision)
    weights = stock(model, device, dtype)
    if model.checkpoint.bits is not None:
        return self_draft(weights, vocabulary, model.checkpoint.bits)
    fits = device == "cpu" and isinstance(weights, FAMILY)
    if engine == "compiled":
        return StaticLM.from_model(weights, vocabulary, packs=False).compile()
    if engine == "static":
        return StaticLM.from_model(weights, vocabulary)
    if engine == "lean" or (engine == "auto" and fits):
        return LeanLM.from_model(weights, vocabulary, width_invariant=device == "cpu")
    return TransformersLM(weights, vocabulary)


def for_draft(engine: str, device: str) -> str:
    """What runs the draft where `engine` runs the target: fixed shapes save a processor nothing."""
    return "auto" if device == "cpu" and engine in ("static", "compiled") else engine


def stock(model: Model, device: str, dtype: str) -> PreTrainedModel:
    """transformers' own model, whole and on its device. Raises InputError when it can't be reached or is not whole."""
    transformers_logging.set_verbosity_error()  # it reports the layers left out of a stand-in as unexpected weights
    transformers_logging.disable_progress_bar()
    loaded: Any = _reached(
        model.source,
        lambda: AutoModelForCausalLM.from_pretrained(
            model.checkpoint.path,
            revision=model.checkpoint.revision,
            config=model.config,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            trust_remote_code=model.trust_remote_code,
            ignore_mismatched_sizes=True,  # reported instead, and refused below
            output_loading_info=True,
        ),
    )
    weights, report = loaded
    _check_whole(model.source, report)
    whole: PreTrainedModel = weights.to(device)
    return whole


def _check_whole(source: str, report: dict[str, Any]) -> None:
    """What a checkpoint lacks would be drawn by chance, anew in each process."""
    if lacking := sorted(report["missing_keys"]):
        raise InputError(f"model {source!r} lacks {len(lacking)} of its weights, {lacking[0]} first; give a whole one")
    if wrong := sorted(report["mismatched_keys"]):
        name, found, wanted = wrong[0]
        raise InputError(
            f"model {source!r} holds {name} of shape {tuple(found)} where its config says {tuple(wanted)}; "
            "give config and weights that belong together"
        )


def eos_ids(model: Model) -> frozenset[int]:
    """Every id at which the model ends an answer: of its generation config, its config and its tokenizer."""
    path, revision = model.checkpoint.path, model.checkpoint.revision or "main"
    try:
        generation = GenerationConfig.from_pretrained(path, revision=revision)
    except OSError:
        generation = GenerationConfig()  # a checkpoint need not have one
    text = model.config.get_text_config(decoder=True)
    found = [generation.eos_token_id, text.eos_token_id, model.tokenizer.eos_token_id]
    lists = [ids if isinstance(ids, list) else [ids] for ids in found if ids is not None]
    return frozenset(eos for ids in lists for eos in ids)


def check_vocabulary(target: Model, draft: Model, warn: Callable[[str], None] | None = None) -> None:
    """Raises InputError where the two vocabularies differ, or tells `warn` when there is one.

    Rows that pad a model beyond its tokenizer do not count.
    """
    difference = _difference(target, draft)
    if difference and warn is None:
        raise InputError(
            f"model.draft={draft.source!r} and model.target={target.source!r} differ in vocabulary: {difference}; "
            "choose a draft of the same family, or set model.vocabulary=warn to draft with it all the same"
        )
    if difference and warn is not None:
        warn(f"the two vocabularies differ: {difference}")


def _difference(target: Model, draft: Model) -> str | None:
    texts = [model.tokenizer.convert_ids_to_tokens(list(range(model.tokens))) for model in (target, draft)]
    for token, (left, right) in enumerate(zip(*texts, strict=False)):
        if left != right:
            return f"id {token} is {left!r} in the target and {right!r} in the draft"
    if target.tokens != draft.tokens:
        return f"the target has {target.tokens} ids and the draft {draft.tokens}"
    return None


def _reached(source: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # the latter two: weights that don't fit
        reason = textwrap.shorten(str(error), 600)  # some list every architecture there is
        raise InputError(
            f"model {source!r} cannot be loaded ({reason}); check its name and revision, that you may read it "
            "(`hf auth login` for a gated one), and the network, or give a local folder"
        ) from error
