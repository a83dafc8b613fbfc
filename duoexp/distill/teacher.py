"""What the target holds likely behind each token of the texts: kept, for its pass costs more than training."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from duoexp.distill import files
from duoexp.distill.data import Texts

SHARD = 64  # texts a file
ROWS = 512  # of the head at a time


@dataclass(frozen=True)
class Wisdom:
    """[positions, top]: places in the head and their log-probabilities there, the likeliest first."""

    places: Tensor
    logs: Tensor


@torch.inference_mode()
def judge(model: PreTrainedModel, tokens: Tensor, ids: Tensor, top: int) -> Wisdom:
    """The target's `top` tokens among `ids` behind every token of one text."""
    hidden = model.model(input_ids=tokens[None].to(model.device), use_cache=False).last_hidden_state[0]
    rows = model.lm_head.weight[ids.to(model.device)]
    parts = [(part @ rows.T).float().log_softmax(-1).topk(min(top, len(ids))) for part in hidden.split(ROWS)]
    return Wisdom(torch.cat([part.indices for part in parts]).cpu(), torch.cat([part.values for part in parts]).cpu())


class Teacher:
    """The wisdom on some texts, made once, a shard a file."""

    def __init__(self, folder: Path, texts: Texts, numbers: Sequence[int]) -> None:
        self._folder, self._texts, self.numbers = folder, texts, tuple(numbers)
        self._held: dict[int, Wisdom] = {}

    def make(
        self, model: Callable[[], PreTrainedModel], ids: Tensor, top: int,
        progress: Callable[[Iterable[int]], Iterator[int]],
    ) -> None:  # fmt: skip
        for first in progress(range(0, len(self.numbers), SHARD)):
            numbers, path = self.numbers[first : first + SHARD], self._folder / f"{first:06d}.npz"
            if not path.exists():
                said = [judge(model(), torch.from_numpy(self._texts[n]).long(), ids, top) for n in numbers]
                places = torch.cat([each.places for each in said]).numpy().astype(np.int32)
                logs = torch.cat([each.logs for each in said]).numpy().astype(np.float16)
                files.write_arrays(path, {"places": places, "logs": logs})
            arrays = files.read_arrays(path)
            ends = np.cumsum([self._texts.lengths[n] for n in numbers])[:-1]
            pairs = zip(np.split(arrays["places"], ends), np.split(arrays["logs"], ends), strict=True)
            self._held |= {
                n: Wisdom(torch.from_numpy(places), torch.from_numpy(logs))
                for n, (places, logs) in zip(numbers, pairs, strict=True)
            }

    def __getitem__(self, text: int) -> Wisdom:
        held = self._held[text]
        return Wisdom(held.places.long(), held.logs.float())
