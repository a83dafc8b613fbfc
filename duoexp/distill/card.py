"""The model card: what a reader needs to judge a draft, and to make it again."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from duoexp.distill.data import Texts
from duoexp.distill.settings import DistillConfig

CARD = """\
# A draft for {name}

Made by `python -m duoexp.distill` for speculative decoding: it guesses what the target says next, and is of no other
use. The target: `{target}`

{about}

| | |
| --- | --- |
{shape}
| data | {source}: {texts} texts, {tokens} tokens |
| objective | {objective} |
| training | {steps} steps of at most {step_tokens} tokens, AdamW, learning rate {lr}, seed {seed} |
| commit | {commit} |
| licence | that of the target |

Made with

    {command}

Greedy acceptance (share of next tokens at which its best is the target's) on held-out text of the same kind,
while it learnt:

| step | loss | acceptance |
| --- | --- | --- |
{curve}
"""


WHOLE = "It is a model of its own, with that model's tokenizer, and transformers loads it."
STANDS = """\
It stands on that model's embedding and on {head} rows of its head, so it loads only beside it
(tokenizer SHA-256 `{hash}`).
Beside what its layers say it copies: what stood behind the same words before in the context, and the commonest ends of
phrases of the data, each with a weight that its last hidden state gives."""


def card(cfg: DistillConfig, tokenizer: str, texts: Texts, curve: Sequence[dict[str, Any]], command: str) -> str:
    shown = [curve[i] for i in sorted({*range(0, len(curve), max(1, len(curve) // 12)), len(curve) - 1})]
    train = cfg.train
    goal = f"the target's {train.teacher} likeliest tokens" if train.teacher else "the text's own tokens"
    return CARD.format(
        name=cfg.model.name,
        target=cfg.model.target,
        about=WHOLE if cfg.student.model else STANDS.format(head=cfg.student.head, hash=tokenizer),
        shape="\n".join(f"| {name} | {value} |" for name, value in _shape(cfg).items()),
        source=Path(cfg.data.path).name if cfg.data.path else "chats that the target wrote and answered itself",
        texts=len(texts),
        tokens=int(texts.lengths.sum()),
        objective=f"{train.divergence} from {goal}",
        steps=train.steps,
        step_tokens=train.tokens,
        lr=train.lr,
        seed=train.seed,
        commit=_commit(),
        command=command,
        curve="\n".join(f"| {point['step']} | {point['loss']:.3f} | {point['acceptance']:.3f} |" for point in shown),
    )


def _shape(cfg: DistillConfig) -> dict[str, str]:
    student = cfg.student
    if student.model:
        return {"started from": f"`{student.model}`", "weights": "float32"}
    return {
        "layers": f"{len(student.layers)}, started from layers {', '.join(map(str, student.layers))} of the target",
        "head": f"the {student.head} most frequent tokens of the data",
        "copies": f"behind matches of up to {student.match} tokens; {student.phrases} phrases of the data at most",
        "weights": "int8, a scale a row; norms, turns and gates bf16" if student.bits == 8 else "float32",
    }


def _commit() -> str:
    """Of the checkout that this file lies in; unknown where it is installed."""
    try:
        how = {"capture_output": True, "text": True, "check": True, "cwd": Path(__file__).parent}
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], **how).stdout.strip()  # type: ignore[call-overload]
        changed = subprocess.run(["git", "status", "--porcelain"], **how).stdout.strip()  # type: ignore[call-overload]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + (" with changes" if changed else "")
