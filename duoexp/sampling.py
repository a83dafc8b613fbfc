"""From logits to the token at a position: the same token for whoever asks, at any temperature."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Streams of noise. The target's is shared with a draft under the rule `match`, which couples the two.
TARGET, DRAFT, ACCEPT = 0, 1, 2


@dataclass(frozen=True)
class Sampler:
    """Temperature, then top-k, then top-p; and noise that depends on nothing but seed, stream, position and token.

    At temperature 0 the token is the argmax. Above, it is argmax(log p + g) with Gumbel noise g: an exact sample of p,
    so two models that hold the same noise agree far more often than independent samples would ("coupling without
    communication", arXiv 2408.07978).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stream: int = TARGET

    def on(self, stream: int) -> "Sampler":
        return replace(self, stream=stream)

    def scores(self, logits: Tensor, position: int) -> Tensor:
        """[vocabulary] -> [vocabulary]. The best is the token; in their order, tokens are drawn without replacement."""
        scaled = self._filtered(logits)
        if self.temperature == 0:
            return scaled
        noise = gumbel(scaled.shape[-1], self.seed, self.stream, position, scaled.device)
        return scaled + noise

    def token(self, logits: Tensor, position: int) -> int:
        """The token at `position`; of equal scores, the one with the smallest id."""
        return argmax(self.scores(logits, position)[None])[0]

    def tokens(self, logits: Tensor, positions: Sequence[int]) -> list[int]:
        """`token` of each row of [rows, vocabulary] at its position, with one copy to the host."""
        scores = self._filtered(logits)
        if self.temperature:
            size, device = scores.shape[-1], scores.device
            noise = {place: gumbel(size, self.seed, self.stream, place, device) for place in set(positions)}
            scores = scores + torch.stack([noise[place] for place in positions])
        return argmax(scores)

    def probs(self, logits: Tensor) -> Tensor:
        """[vocabulary] -> the distribution that `token` draws from; a point mass at temperature 0."""
        scaled = self._filtered(logits)
        if self.temperature == 0:
            return torch.nn.functional.one_hot(scaled.argmax(-1), scaled.shape[-1]).float()
        return scaled.softmax(-1)

    def draw(self, probs: Tensor, position: int) -> int:
        """A sample of `probs` [vocabulary] with the noise of `position`."""
        noise = gumbel(len(probs), self.seed, self.stream, position, probs.device)
        return argmax((probs.log() + noise)[None])[0]

    def uniform(self, position: int, trial: int) -> float:
        """A number in (0, 1) for the trial-th acceptance test at `position`."""
        return float(uniform(torch.tensor([trial]), self.seed, ACCEPT, position))

    def _filtered(self, logits: Tensor) -> Tensor:
        """Logits over temperature in float32, -inf where top-k or top-p leaves a token out."""
        logits = logits.float()
        if self.temperature == 0:
            return logits
        scaled = logits / self.temperature
        if 0 < self.top_k < scaled.shape[-1]:
            scaled = scaled.masked_fill(scaled < scaled.topk(self.top_k).values[..., -1:], -torch.inf)
        if self.top_p < 1:
            ordered, tokens = scaled.sort(descending=True)
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            # A token stays while the mass of the likelier ones is below top_p, so the likeliest always stays.
            scaled = scaled.masked_fill(
                torch.zeros_like(scaled, dtype=torch.bool).scatter(-1, tokens, before >= self.top_p), -torch.inf
            )
        return scaled


def argmax(scores: Tensor) -> list[int]:
    """[rows, vocabulary] -> the best of each row; of equal scores, the one with the smallest id."""
    if scores.device.type != "cpu":
        return scores.argmax(-1).tolist()
    # numpy's takes an eighth of the time of torch's, and a tenth of it where that reads bfloat16
    wide = scores if scores.dtype == torch.float64 else scores.float()
    found: list[int] = wide.detach().numpy().argmax(-1).tolist()
    return found


def gumbel(size: int, seed: int, stream: int, position: int, device: torch.device) -> Tensor:
    """[size] standard Gumbel noise, one for each token."""
    return -(-uniform(torch.arange(size, device=device), seed, stream, position).log()).log()


def uniform(tokens: Tensor, seed: int, stream: int, position: int) -> Tensor:
    """Numbers in (0, 1), float64, from the counter (seed, stream, position, token).

    A counter and a mixing function rather than a generator with a state: any device and any process computes the same
    numbers for a position without a message. The mixer is the finaliser of SplitMix64 (Steele, Lea & Flood, 2014).
    """
    key = 0
    for part in (seed, stream, position):
        key = _mix_int(key + part * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15)
    bits = tokens * _signed(0x9E3779B97F4A7C15) + _signed(key)
    bits = (bits ^ _shift(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift(bits, 27)) * _signed(0x94D049BB133111EB)
    bits = bits ^ _shift(bits, 31)
    return (_shift(bits, 12).double() + 0.5) * 2.0**-52  # 52 bits: the half stays exact, so 0 and 1 never come out


def _shift(bits: Tensor, count: int) -> Tensor:
    """Logical shift to the right: torch's own copies the sign bit."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix_int(bits: int) -> int:
    bits &= 2**64 - 1
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return bits ^ (bits >> 31)


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits
