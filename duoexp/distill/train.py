"""Training: batches by length, AdamW, a running mean of the weights, checkpoints that a stopped run goes on from."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from duoexp.config import InputError
from duoexp.distill import divergence, files
from duoexp.distill.data import Texts
from duoexp.distill.divergence import Candidates, Copies, Goal
from duoexp.distill.hints import Hints
from duoexp.distill.settings import TrainConfig
from duoexp.distill.student import Student
from duoexp.distill.teacher import Teacher, judge
from duoexp.distill.whole import Whole
from duoexp.lm.copying import Copier

FREQUENT = 1024  # places of the head that always stand for themselves
WINDOW = 512  # texts that a batch is sorted out of


@dataclass
class Point:
    """What `acceptance` measured after so many steps."""

    step: int
    loss: float
    acceptance: float


@dataclass
class Curve:
    points: list[Point] = field(default_factory=list)


@dataclass(frozen=True)
class Batch:
    """tokens [texts, longest], padded; `flat`: the positions that have a goal, in the flattened tokens; their hints."""

    tokens: Tensor
    flat: Tensor
    hints: Hints
    texts: tuple[int, ...]


class Trainer:
    """`teacher` is None where the text itself is the goal; `judged` holds the target's word on the held-out texts.

    hints: of all texts; copier: to find those of a text that the student writes.
    """

    def __init__(
        self, student: Student | Whole, texts: Texts, numbers: Sequence[int], judged: Teacher, teacher: Teacher | None,
        hints: dict[int, Hints], copier: Copier, settings: TrainConfig, dtype: torch.dtype, skip: int,
        frequent: Tensor, target: Callable[[], PreTrainedModel],
    ) -> None:  # fmt: skip
        self.student, self.texts, self.numbers, self.judged, self.teacher = (
            student,
            texts,
            tuple(numbers),
            judged,
            teacher,
        )
        self.settings, self.dtype, self.skip, self.target = settings, dtype, skip, target
        self.hints, self.copier, self._frequent = hints, copier, frequent
        weights = student.trained()
        self.average = {name: weight.detach().clone() for name, weight in weights.items()}
        matrices, vectors = ([w for w in weights.values() if (w.dim() > 1) == many] for many in (True, False))
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True)
        self._forward: Callable[[Tensor], Tensor] = (
            torch.compile(student, dynamic=True) if settings.compile else student
        )
        places = torch.full((int(student.ids.max()) + 1,), -1, dtype=torch.long)
        places[student.ids] = torch.arange(len(student.ids))
        self._places = places
        self.step, self.curve = 0, Curve()

    def run(self, checkpoint: Path, log: Callable[[dict[str, float], int], None]) -> Iterator[int]:
        """The number of each step done, from the checkpoint on. What interrupts it is left as a checkpoint, too."""
        if checkpoint.exists():
            self._restore(checkpoint)
        losses, hits, seen = 0.0, 0, 0
        try:
            for batch in self._batches(self.step):
                loss, right = self._learn(batch)
                losses, hits, seen = losses + loss * len(batch.flat), hits + right, seen + len(batch.flat)
                self.step += 1
                if self.step % self.settings.measure_every == 0 or self.step == self.settings.steps:
                    point = Point(self.step, losses / seen, self.acceptance())
                    self.curve.points.append(point)
                    log(
                        {"loss": point.loss, "agreement": hits / seen, "held_out_acceptance": point.acceptance},
                        self.step,
                    )
                    losses, hits, seen = 0.0, 0, 0
                if self.step % self.settings.save_every == 0 or self.step == self.settings.steps:
                    self._save(checkpoint)
                yield self.step
        except KeyboardInterrupt:
            self._save(checkpoint)
            raise

    @torch.no_grad()
    def acceptance(self) -> float:
        """Share of the held-out answers' tokens at which the averaged student's best token is the target's."""
        own = {name: weight.detach().clone() for name, weight in self.student.trained().items()}
        self._load(self.average)
        right = seen = 0
        for number in self.judged.numbers:
            start = max(self.skip, int(self.texts.starts[number])) - 1
            with self._cast():
                hidden = self.student(torch.from_numpy(self.texts[number]).long()[None])[0, start:-1]
                said = self._said(hidden, self.hints[number][start:-1]).argmax(-1)
            right += int((said == self.judged[number].places[start:-1, 0]).sum())
            seen += len(said)
        self._load(own)
        return right / max(1, seen)

    def use_average(self) -> None:
        self._load(self.average)

    def _learn(self, batch: Batch) -> tuple[float, int]:
        settings = self.settings
        generator = torch.Generator().manual_seed(hash((settings.seed, self.step)) % 2**31)
        if self.step >= settings.steps * (1 - settings.on_policy):
            batch, goal = self._own_words(batch, generator)
        else:
            goal = self._goal(batch)
        rows, drawn, places = self.student.rows, None, self._place(batch.hints.tokens)
        if settings.negatives is not None:
            size = len(rows)
            chosen = Candidates.drawn(self._frequent[:FREQUENT], goal, places, size, settings.negatives, generator)
            rows, drawn, places = rows[chosen.places], chosen.log_weights, chosen.among(places, size)
            goal = Goal(chosen.among(goal.places, size), goal.probs)
        with self._cast():
            hidden = self._forward(batch.tokens).flatten(0, 1)[batch.flat]
            copies = Copies(places, self.student.gated(hidden, batch.hints.kinds))
        loss, right = divergence.step(
            hidden, rows.to(hidden.dtype), drawn, goal, copies, divergence.NAMED[settings.divergence]
        )
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), settings.clip)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.lr * self._pace()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            decay = min(settings.average, (self.step + 1) / (self.step + 10))  # the start is soon forgotten
            weights = [weight.detach() for weight in self.student.trained().values()]
            torch._foreach_lerp_(list(self.average.values()), weights, 1 - decay)
        return loss, right

    def _pace(self) -> float:
        """Linear warm-up, then a cosine to zero."""
        warmup, steps = min(self.settings.warmup, self.settings.steps - 1), self.settings.steps
        if self.step < warmup:
            return (self.step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (self.step - warmup) / (steps - warmup)))

    def _goal(self, batch: Batch) -> Goal:
        if self.teacher is not None:
            wise = [self.teacher[text] for text in batch.texts]
            places = torch.cat([each.places[self.skip - 1 : -1] for each in wise])
            return Goal(places, torch.cat([each.logs[self.skip - 1 : -1] for each in wise]).exp())
        said = torch.cat([torch.from_numpy(self.texts[text][self.skip :]).long() for text in batch.texts])
        places = self._place(said)
        return Goal(places.clamp(min=0)[:, None], (places >= 0).float()[:, None])  # nothing to learn from the unsayable

    @torch.no_grad()
    def _own_words(self, batch: Batch, generator: torch.Generator) -> tuple[Batch, Goal]:
        """The student goes on from somewhere in each answer, and the target corrects it (GKD, 2306.13649)."""
        length, rows, hints, goals = self.settings.on_policy_tokens, [], [], []
        for text in batch.texts:
            row = torch.from_numpy(self.texts[text]).long()
            first = max(self.skip, int(self.texts.starts[text]))
            row = row[: first + int(torch.randint(max(1, len(row) - first), (1,), generator=generator))]
            for _ in range(length):
                with self._cast():
                    hidden = self.student(row[None])[0, -1:]
                    log_probs = self._said(hidden, Hints.of(self.copier.along(row.tolist()))[-1:])
                drawn = torch.multinomial(log_probs[0].exp(), 1, generator=generator)
                row = torch.cat([row, self.student.ids[drawn]])
            wise = judge(self.target(), row, self.student.ids, max(1, self.settings.teacher))
            rows.append(row)
            hints.append(Hints.of(self.copier.along(row.tolist()))[-length - 1 : -1])
            goals.append((wise.places[-length - 1 : -1], wise.logs[-length - 1 : -1].exp()))
        tokens = torch.zeros(len(rows), max(len(row) for row in rows), dtype=torch.long)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
        flat = torch.cat(
            [i * tokens.shape[1] + torch.arange(len(row) - length - 1, len(row) - 1) for i, row in enumerate(rows)]
        )
        return Batch(tokens, flat, Hints.joined(hints), batch.texts), Goal(
            *(torch.cat(parts) for parts in zip(*goals, strict=True))
        )

    def _batches(self, done: int) -> Iterator[Batch]:
        """From the step `done` to the last; an epoch's order depends on the seed and on its number alone."""
        epoch = count = 0
        while True:
            order = _order(self.texts.lengths, self.numbers, self.settings.tokens, [self.settings.seed, epoch])
            for texts in order:
                if count >= self.settings.steps:
                    return
                if count >= done:
                    yield self._padded(texts)
                count += 1
            epoch += 1

    def _padded(self, numbers: Sequence[int]) -> Batch:
        rows = [torch.from_numpy(self.texts[n]).long() for n in numbers]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # padding comes after all that could see it
        width = tokens.shape[1]
        flat = torch.cat([i * width + torch.arange(self.skip - 1, len(row) - 1) for i, row in enumerate(rows)])
        hints = Hints.joined([self.hints[n][self.skip - 1 : -1] for n in numbers])
        return Batch(tokens, flat, hints, tuple(numbers))

    def _place(self, tokens: Tensor) -> Tensor:
        """In the head; -1 outside of it."""
        held = self._places[tokens.long().clamp(min=0, max=len(self._places) - 1)]
        return torch.where((tokens >= 0) & (tokens < len(self._places)), held, -1)

    def _said(self, hidden: Tensor, hints: Hints) -> Tensor:
        """[positions, head]: log-probabilities."""
        logits = torch.nn.functional.linear(hidden, self.student.rows.to(hidden.dtype)).float()
        copies = Copies(self._place(hints.tokens), self.student.gated(hidden, hints.kinds))
        return copies.log_probs(logits)

    def _cast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.student.rows.device.type, self.dtype, enabled=self.dtype != torch.float32)

    @torch.no_grad()
    def _load(self, weights: dict[str, Tensor]) -> None:
        for name, weight in self.student.trained().items():
            weight.copy_(weights[name])

    def _save(self, path: Path) -> None:
        state = {
            "step": self.step,
            "weights": {name: weight.detach() for name, weight in self.student.trained().items()},
            "average": self.average,
            "optimizer": self._optimizer.state_dict(),
            "curve": [vars(point) for point in self.curve.points],
        }
        files.write(path, lambda temporary: torch.save(state, temporary))

    def _restore(self, path: Path) -> None:
        try:
            state = torch.load(path, weights_only=True)
            self._load(state["weights"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.average, self.step = state["average"], state["step"]
            self.curve.points = [Point(**point) for point in state["curve"]]
        except (RuntimeError, KeyError, ValueError, EOFError, UnpicklingError) as error:
            raise InputError(f"{path} is no checkpoint of this run ({error}); remove it to begin anew") from error


def _order(lengths: Any, numbers: Sequence[int], tokens: int, seed: list[int]) -> list[list[int]]:
    """Batches of texts of like length, of at most so many tokens with padding, or of one text."""
    random = np.random.default_rng(seed)
    mixed = random.permutation(np.asarray(numbers))
    batches: list[list[int]] = []
    for first in range(0, len(mixed), WINDOW):
        batch: list[int] = []
        for text in sorted(mixed[first : first + WINDOW].tolist(), key=lambda text: int(lengths[text])):
            if batch and (len(batch) + 1) * int(lengths[text]) > tokens:
                batches.append(batch)
                batch = []
            batch.append(text)
        batches.append(batch)
    return [batches[i] for i in random.permutation(len(batches))]
