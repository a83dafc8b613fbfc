"""The folder that a draft ships in; `lm/distilled.py` is the way back."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from duoexp.distill import files
from duoexp.distill.student import Student
from duoexp.lm.copying import Phrases
from duoexp.lm.distilled import CARD, CONFIG, PHRASES, SCALE, WEIGHTS, About
from duoexp.lm.linears import Int8


def export(
    folder: Path, student: Student, phrases: Phrases | None, config: dict[str, Any], about: About, card: str
) -> None:
    """Writes weights, config and model card. The embedding and the head's rows stay with the target."""
    tensors: dict[str, Tensor] = {"head_ids": student.ids.to(torch.int32)}
    for name, weight in student.trained().items():
        weight = weight.detach().float().contiguous()
        if about.bits == 8 and weight.dim() == 2 and name.startswith("body."):
            # A scale that bf16 holds: then weights that were rounded once are rounded to the same when they are loaded.
            rounded = Int8.of(weight.bfloat16(), None)
            tensors[name], tensors[name + SCALE] = rounded.weight, rounded.scale
        else:
            tensors[name] = weight if about.bits is None else weight.bfloat16()
    if phrases is not None:
        tensors |= {PHRASES + name: getattr(phrases, name) for name in ("keys", "tokens", "kinds")}
    shape = {key: value for key, value in config.items() if not key.startswith("_")}  # no path of this machine
    shape |= {"num_hidden_layers": len(about.layers), "tie_word_embeddings": False, "duoexp": asdict(about)}
    if shape.get("layer_types"):
        shape["layer_types"] = shape["layer_types"][: len(about.layers)]
    files.write(folder / WEIGHTS, lambda path: save_file(tensors, path))
    files.write_text(folder / CONFIG, json.dumps(shape, indent=2) + "\n")
    files.write_text(folder / CARD, card)
