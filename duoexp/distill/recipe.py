"""The four steps, each of which finds what an earlier run finished: text, student, training, export."""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel

from duoexp.config import DTYPES, InputError
from duoexp.distill import data, export, files, hints, settings, student, whole
from duoexp.distill.card import card
from duoexp.distill.settings import DistillConfig
from duoexp.distill.student import Student
from duoexp.distill.teacher import Teacher
from duoexp.distill.train import Trainer
from duoexp.distill.whole import Whole
from duoexp.lm import load, sources
from duoexp.lm.copying import Copier
from duoexp.lm.distilled import About
from duoexp.lm.tokenizer import tokenizer_hash
from duoexp.masking import masked
from duoexp.tracking import Tracker

FIT_TOKENS = 24_000  # of text, that the untrained student is fitted on
FREE = ("tracker", "device", "train.threads", "train.compile", "train.save_every")  # may change when a run goes on
DRAFT = "draft"  # the folder, in that of the run, that is exported


def run(cfg: DistillConfig, command: str) -> Path:
    """Distils a draft; returns its folder. Raises InputError for what cannot be distilled."""
    settings.check(cfg.data, cfg.student, cfg.train)
    if cfg.dtype not in DTYPES:
        raise InputError(f"dtype={cfg.dtype} is unknown; choose {', '.join(DTYPES)}")
    if cfg.train.threads:
        torch.set_num_threads(cfg.train.threads)
    target = load.describe(cfg.model.target, sources.resolve(cfg.model.target), cfg.model.trust_remote_code)
    if cfg.student.head > target.tokens:
        raise InputError(
            f"student.head={cfg.student.head} is beyond the target's vocabulary of {target.tokens} tokens; give fewer"
        )
    folder = Path(cfg.folder).expanduser()
    _same(folder / "settings.json", cfg)
    tracker: Tracker = instantiate(cfg.tracker.tracker)
    tracker.start(folder, "distill", "distill", OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
    with ExitStack() as closing:
        closing.callback(tracker.finish, {}, 1)  # nothing after the call below
        bars = closing.enter_context(_bars())
        result = _steps(cfg, target, folder, tracker, bars, command)
        tracker.finish(result, 0)
    return folder / DRAFT


def _steps(
    cfg: DistillConfig, target: load.Model, folder: Path, tracker: Tracker, bars: Progress, command: str
) -> dict[str, Any]:
    @cache
    def model() -> PreTrainedModel:
        held: Any = load.load(target, "transformers", cfg.device, cfg.dtype, target.tokens)
        return held.model.requires_grad_(False)

    def progress(label: str, items: Iterable[int]) -> Iterator[int]:
        items = list(items)
        yield from bars.track(items, description=label, total=len(items))

    frame = data.Frame.of(target.tokenizer, cfg.model.template)
    writer = data.Writer(model(), target.tokenizer, frame, load.eos_ids(target), cfg.data, cfg.train.seed)
    texts = data.make(folder, cfg.data, writer, target.config.max_position_embeddings, progress)
    held_out, kept = _split(len(texts), cfg.data.held_out)
    skip = max(1, len(frame.header))

    counts = torch.from_numpy(np.bincount(texts.tokens, minlength=target.tokens)[: target.tokens])
    pupil: Student | Whole
    if cfg.student.model:
        pupil, copier, phrases = (
            whole.whole(cfg.student.model, model(), target.tokens, cfg.train.seed),
            Copier(0, None),
            0,
        )
    else:
        phrases = cfg.student.phrases
        copier = Copier(cfg.student.match, hints.phrases(texts, kept, phrases) if phrases else None)
        pupil = student.grow(model(), cfg.student.layers, student.head(counts, cfg.student.head), copier.kinds)
    ids, longest = pupil.ids, copier.seen.longest
    found = hints.make(folder / "hints.npz", texts, kept, longest, phrases, lambda items: progress("hints", items))
    frequent = counts[ids].argsort(descending=True, stable=True)
    judged = Teacher(folder / "held_out", texts, held_out)
    judged.make(model, ids, 1, lambda items: progress("held-out", items))
    teacher = None
    if cfg.train.teacher:
        teacher = Teacher(folder / "teacher", texts, kept)
        teacher.make(model, ids, cfg.train.teacher, lambda items: progress("teacher", items))

    checkpoint = folder / "checkpoint.pt"
    if isinstance(pupil, Student) and not checkpoint.exists():
        rows = (torch.from_numpy(texts[number]).long() for number in kept)
        with torch.autocast(cfg.device.partition(":")[0], getattr(torch, cfg.dtype), enabled=cfg.dtype != "float32"):
            student.fit(pupil, model(), list(_until(rows, FIT_TOKENS)), skip)
        with torch.no_grad():
            pupil.gates.bias.copy_(hints.odds(texts, kept, found, copier.kinds, skip))
    trainer = Trainer(
        pupil, texts, kept, judged, teacher, found, copier, cfg.train, getattr(torch, cfg.dtype), skip, frequent, model
    )
    before = trainer.acceptance() if not checkpoint.exists() else None
    bar = bars.add_task("train", total=cfg.train.steps)
    for step in trainer.run(checkpoint, tracker.log):
        points = trainer.curve.points
        note = f"train, held-out acceptance {points[-1].acceptance:.3f}" if points else "train"
        bars.update(bar, completed=step, description=note)

    trainer.use_average()
    curve = [vars(point) for point in trainer.curve.points]
    result = {"held_out_acceptance": curve[-1]["acceptance"], "texts": len(texts), "tokens": int(texts.lengths.sum())}
    if before is not None:
        result["held_out_acceptance_before"] = before
    files.write_text(folder / "result.json", json.dumps(result | {"curve": curve}, indent=2) + "\n")
    tokens = tokenizer_hash(target.tokenizer)
    text = card(cfg, tokens, texts, curve, command)
    if isinstance(pupil, Whole):
        whole.export(folder / DRAFT, pupil, target.tokenizer, text)
    else:
        count = len(copier.phrases.keys) if copier.phrases else 0
        about = About(tokens, tuple(cfg.student.layers), cfg.student.head, cfg.student.bits, longest, count)
        export.export(folder / DRAFT, pupil, copier.phrases, model().config.to_dict(), about, text)
    return result


def _split(count: int, share: float) -> tuple[list[int], list[int]]:
    """Held out and kept: evenly spread, at least one of each."""
    held = max(1, round(count * share))
    out = {i * count // held for i in range(held)}
    return sorted(out), [i for i in range(count) if i not in out]


def _until(rows: Iterable[torch.Tensor], tokens: int) -> Iterator[torch.Tensor]:
    seen = 0
    for row in rows:
        if seen >= tokens:
            return
        seen += len(row)
        yield row


def _same(path: Path, cfg: DistillConfig) -> None:
    """Notes the settings of a new run; one that goes on must have the same."""
    now = masked(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
    flat = {
        key: value for key, value in _flat(now) if not any(key == free or key.startswith(f"{free}.") for free in FREE)
    }
    flat.pop("folder")
    if not path.exists():
        files.write_text(path, json.dumps(flat, indent=2) + "\n")
        return
    then = json.loads(path.read_text())
    for key in sorted(then.keys() | flat.keys()):
        if then.get(key) != flat.get(key):
            raise InputError(
                f"{path.parent} holds a run with {key}={then.get(key)}, not {flat.get(key)}; "
                "give that to go on with it, or another folder=..."
            )


def _flat(nested: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in nested.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _bars() -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
