"""How often a draft's best next token is the target's: `python -m duoexp.distill.measure folder=FOLDER task=NAME`."""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import hydra
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig

from duoexp.__main__ import CONF
from duoexp.config import ModelConfig, TaskConfig
from duoexp.distill.__main__ import end, told
from duoexp.lm.causal_lm import CausalLM

POSITIONS = 8  # of a draft


@dataclass
class MeasureConfig:
    folder: str = MISSING  # the draft
    tokens: int = 64  # of an answer
    answers: str = "outputs/distill/answers.json"  # of the target, kept
    dtype: str = "bfloat16"
    threads: int = 1
    model: ModelConfig = MISSING
    task: TaskConfig = MISSING


ConfigStore.instance().store(name="measure_schema", node=MeasureConfig)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="distill_measure")
def launch(cfg: DictConfig) -> None:
    def run() -> None:
        for line in measure(cfg):  # type: ignore[arg-type]
            print(line, flush=True)

    told(run)


def measure(cfg: MeasureConfig) -> Iterator[str]:
    """A line a kind of prompt, then their mean, the chance of a run of 1 to 8 tokens, and what a step costs beside the
    target's own, as transformers runs it."""
    from duoexp import tasks
    from duoexp.lm import load, sources
    from duoexp.lm.distilled import load_draft

    torch.set_num_threads(cfg.threads)
    place = load.describe(cfg.model.target, sources.resolve(cfg.model.target), cfg.model.trust_remote_code)
    folder, base, dtype = Path(cfg.folder).expanduser(), place.checkpoint, getattr(torch, cfg.dtype)
    draft = load_draft(folder, base.path, place.tokens, dtype, place.tokenizer, revision=base.revision)
    prompts = [
        (prompt.kind, tasks.encode(place.tokenizer, cfg.model.template, prompt)) for prompt in tasks.load(cfg.task)
    ]
    answers = _answers(cfg, place, [ids for _, ids in prompts])
    hits: dict[str, list[list[bool]]] = {}
    for (kind, ids), answer in zip(prompts, answers, strict=True):
        draft.clear()
        said = [int(draft.logits([*ids, *answer[:i]])[0].argmax()) for i in range(len(answer))]
        hits.setdefault(kind, []).append([ours == theirs for ours, theirs in zip(said, answer, strict=True)])
    rates = {kind: _mean([hit for row in rows for hit in row]) for kind, rows in hits.items()}
    for kind, rate in rates.items():
        yield f"{kind:16} {rate:.3f}  ({len(hits[kind])} prompts)"
    yield f"{'mean':16} {_mean(list(rates.values())):.3f}"
    rows = [row for kind in hits.values() for row in kind]
    runs = [
        _mean([all(row[i : i + n]) for row in rows for i in range(len(row) - n + 1)]) for n in range(1, POSITIONS + 1)
    ]
    yield f"accepted in a row, 1 to {POSITIONS}: " + " ".join(f"{run:.3f}" for run in runs)
    at = [after / before if before else 0.0 for before, after in zip([1.0, *runs], runs, strict=False)]
    yield "rate at a position, those before it accepted: " + " ".join(f"{rate:.3f}" for rate in at)
    stock = load.load(place, "transformers", "cpu", cfg.dtype, place.tokens)
    step_s, pass_s = _steps_s([draft, stock], (prompts[0][1] * 256)[:256])
    yield (
        f"behind 256 tokens, on {cfg.threads} threads: a draft step {step_s * 1e3:.2f} ms, a pass of the target in "
        f"transformers {pass_s * 1e3:.1f} ms, {pass_s / step_s:.1f} times as long"
    )


def _answers(cfg: MeasureConfig, place, prompts: Sequence[list[int]]) -> list[list[int]]:  # type: ignore[no-untyped-def]
    """The target's greedy answers, from the file or of its own."""
    from duoexp.distill import files
    from duoexp.lm import load

    path, eos = Path(cfg.answers).expanduser(), load.eos_ids(place)
    known: dict[str, list[int]] = json.loads(path.read_text()) if path.exists() else {}
    target = None
    for ids in prompts:
        if _key(cfg, ids) in known:
            continue
        target = target or load.load(place, "transformers", "cpu", cfg.dtype, place.tokens)
        target.clear()
        context = list(ids)
        while len(context) < len(ids) + cfg.tokens and not (len(context) > len(ids) and context[-1] in eos):
            context.append(int(target.logits(context)[0].argmax()))
        known[_key(cfg, ids)] = context[len(ids) :]
        files.write_text(path, json.dumps(known))
    return [known[_key(cfg, ids)] for ids in prompts]


def _key(cfg: MeasureConfig, ids: list[int]) -> str:
    return hashlib.sha256(json.dumps([cfg.model.target, cfg.dtype, cfg.tokens, ids]).encode()).hexdigest()


def _steps_s(models: Sequence[CausalLM], context: list[int]) -> list[float]:
    """The median of 50 passes over one token, for each model, which take turns."""
    times: list[list[float]] = [[] for _ in models]
    for token in range(60):
        for model, taken in zip(models, times, strict=True):
            model.logits(context)
            start = time.perf_counter()
            model.logits([*context, token])
            taken.append(time.perf_counter() - start)
        context = [*context, token]
    return [sorted(taken[10:])[25] for taken in times]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


if __name__ == "__main__":
    end(launch)
