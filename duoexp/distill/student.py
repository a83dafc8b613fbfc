"""The student: a few layers of the target between its own embedding and a trimmed head, each turned by a square matrix.

The turns let frozen rows fit so few layers. They cost nothing to run: at load they are multiplied into the rows. What
ships is then a matrix of hidden x hidden instead of one of vocabulary x hidden.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from duoexp.config import InputError
from duoexp.lm.distilled import empty
from duoexp.lm.lean import FAMILY

RIDGE = 1e-3  # of the mean square of an input


class Gates(nn.Module):
    """A weight for each kind of copied token, the same in any state until it is trained."""

    def __init__(self, size: int, kinds: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(kinds, size)), nn.Parameter(torch.zeros(kinds))

    def forward(self, hidden: Tensor) -> Tensor:
        """[positions, hidden] -> [positions, kinds]: log of the weight over that of the layers."""
        return F.linear(hidden, self.weight, self.bias)


class Student(nn.Module):
    """`ids`: the tokens that its layers can say, by their id in the vocabulary, ascending.

    `kinds`: how many kinds of copied tokens there are, see `lm/copying.py`.
    """

    embedding: Tensor
    rows: Tensor
    ids: Tensor

    def __init__(self, body: nn.Module, embedding: Tensor, rows: Tensor, ids: Tensor, kinds: int) -> None:
        super().__init__()
        self.body = body
        self.into = nn.Parameter(torch.eye(embedding.shape[1]))
        self.out = nn.Parameter(torch.eye(embedding.shape[1]))
        self.gates = Gates(embedding.shape[1], kinds)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("ids", ids)

    def forward(self, tokens: Tensor) -> Tensor:
        """[texts, tokens] -> [texts, tokens, hidden]: what the head's rows are multiplied with."""
        x = F.linear(F.embedding(tokens, self.embedding), self.into.to(self.embedding.dtype))
        return F.linear(self.body(inputs_embeds=x, use_cache=False).last_hidden_state, self.out)

    def gated(self, hidden: Tensor, kinds: Tensor) -> Tensor:
        """[positions, sources]: the gates of copied tokens of these kinds; -inf for a kind of -1."""
        if not len(self.gates.bias):
            return torch.full(kinds.shape, -torch.inf, dtype=torch.float32, device=hidden.device)
        gates = self.gates(hidden).float().gather(1, kinds.long().clamp(min=0))
        return gates.masked_fill(kinds < 0, -torch.inf)

    def trained(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


def grow(target: PreTrainedModel, layers: Sequence[int], ids: Tensor, kinds: int) -> Student:
    """A student that starts from these layers and copies tokens of so many kinds.

    Raises InputError where the target has no such layers.
    """
    config = target.config
    if type(target) not in FAMILY:
        known = ", ".join(kind.__name__ for kind in FAMILY)
        raise InputError(
            f"the target is a {type(target).__name__}, which can be neither cut nor quantised here; take one of {known}"
        )
    if not all(0 <= layer < config.num_hidden_layers for layer in layers):
        raise InputError(
            f"student.layers={list(layers)} are not among the {config.num_hidden_layers} layers of the target; "
            f"give some of 0 to {config.num_hidden_layers - 1}"
        )
    body = empty(config, len(layers)).model
    for layer, number in zip(body.layers, layers, strict=True):
        layer.load_state_dict(target.model.layers[number].state_dict())
    body.norm.load_state_dict(target.model.norm.state_dict())
    body.embed_tokens = nn.Identity()  # the student brings its own
    embedding, rows = target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach()
    return Student(body, embedding, rows[ids].clone(), ids, kinds)


def head(counts: Tensor, size: int) -> Tensor:
    """The `size` most frequent ids, ascending; of equally frequent ones the lower."""
    if size > len(counts):
        raise InputError(f"student.head={size} is beyond the target's vocabulary of {len(counts)} tokens; give fewer")
    return counts.argsort(descending=True, stable=True)[:size].sort().values


@torch.no_grad()
def fit(student: Student, target: PreTrainedModel, texts: Sequence[Tensor], skip: int) -> None:
    """Sets `out` so that the untrained student's last hidden states come closest to the target's (ridge regression).

    It is worth a good part of the training: the first three of SmolLM2's 30 layers, fitted so on 21,000 tokens, name
    0.23 of its next tokens, and at most 0.01 without.
    """
    size = student.out.shape[0]
    gram, cross = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, size, dtype=torch.float64)
    for tokens in texts:
        x = student(tokens[None])[0, skip - 1 :].double()
        y = target.model(input_ids=tokens[None].to(target.device), use_cache=False).last_hidden_state[0, skip - 1 :]
        gram += x.T @ x
        cross += x.T @ y.double().to(x.device)
    ridge = RIDGE * gram.diagonal().mean() * torch.eye(size, dtype=torch.float64)
    student.out.copy_(torch.linalg.solve(gram + ridge, cross).T @ student.out.double())
