"""A student that is a model of its own: one that exists, or any config, from nothing."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from duoexp.config import InputError
from duoexp.distill import files
from duoexp.lm import sources
from duoexp.lm.distilled import CARD


class Whole(nn.Module):
    """A transformers model as the trainer sees a student. It copies nothing: it is to load without this package."""

    ids: Tensor

    def __init__(self, model: PreTrainedModel, vocabulary: int) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("ids", torch.arange(vocabulary), persistent=False)

    @property
    def rows(self) -> Tensor:
        """[vocabulary, hidden]: of the head, trained like the rest."""
        head: Any = self.model.get_output_embeddings()
        return head.weight[: len(self.ids)]

    def forward(self, tokens: Tensor) -> Tensor:
        """[texts, tokens] -> [texts, tokens, hidden]"""
        base: Any = self.model.base_model
        hidden: Tensor = base(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden

    def gated(self, hidden: Tensor, kinds: Tensor) -> Tensor:
        """[positions, sources]: no source has any weight."""
        return torch.full(kinds.shape, -torch.inf, device=hidden.device)

    def trained(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


def whole(source: str, target: PreTrainedModel, vocabulary: int, seed: int) -> Whole:
    """The student that `source` names: what `model.draft` takes, or a folder with nothing but a config.json.

    Raises InputError for a vocabulary smaller than the target's, and for a head that does more than multiply.
    """
    folder = Path(source).expanduser()
    if (folder / "config.json").is_file() and not any(folder.glob("*.safetensors")):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    else:
        place = sources.resolve(source)
        model = AutoModelForCausalLM.from_pretrained(
            place.path,
            revision=place.revision,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
        )
    if model.config.vocab_size < vocabulary:
        raise InputError(
            f"student.model={source} has {model.config.vocab_size} tokens, and the target {vocabulary}; "
            "take one with the target's tokenizer"
        )
    student = Whole(model.to(target.device), vocabulary)
    tokens = torch.arange(min(8, vocabulary), device=target.device)[None]
    with torch.no_grad():
        ours, theirs = student(tokens) @ student.rows.T, model(input_ids=tokens, use_cache=False).logits
    if not torch.allclose(ours, theirs[..., :vocabulary], rtol=1e-3, atol=1e-3):
        raise InputError(
            f"student.model={source} is a {type(model).__name__}, whose head does more than multiply its last hidden "
            "state by its rows, which cannot be trained here; take another architecture"
        )
    return student


def export(folder: Path, student: Whole, tokenizer: PreTrainedTokenizerBase, card: str) -> None:
    """Writes it as transformers does, with the target's tokenizer and a model card."""
    with files.writable(folder):
        student.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    files.write_text(folder / CARD, card)
