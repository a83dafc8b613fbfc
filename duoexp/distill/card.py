"""The model card: what a reader needs to judge a draft, and to make it again."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from duoexp.distill.data import Texts
from duoexp.distill.export import About
from duoexp.distill.settings import DistillConfig

CARD = """\
# A draft for {name}

Made by `python -m duoexp.distill` for speculative decoding: it guesses what the target says next, and is of no other
use. The target: `{target}`

It stands on that model's embedding and on {head} rows of its head, so it loads only beside it
(tokenizer SHA-256 `{hash}`).

| | |
| --- | --- |
| layers | {depth}, started from layers {layers} of the target |
| head | the {head} most frequent tokens of the data |
| weights | {bits} |
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


def card(cfg: DistillConfig, about: About, texts: Texts, curve: Sequence[dict[str, Any]], command: str) -> str:
    shown = [curve[i] for i in sorted({*range(0, len(curve), max(1, len(curve) // 12)), len(curve) - 1})]
    train = cfg.train
    goal = f"the target's {train.teacher} likeliest tokens" if train.teacher else "the text's own tokens"
    return CARD.format(
        name=cfg.model.name,
        target=cfg.model.target,
        hash=about.tokenizer,
        head=about.head,
        depth=len(about.layers),
        layers=", ".join(map(str, about.layers)),
        bits="int8, a scale a row; norms and turns bf16" if about.bits == 8 else "float32",
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


def _commit() -> str:
    """Of the checkout that this file lies in; unknown where it is installed."""
    try:
        how = {"capture_output": True, "text": True, "check": True, "cwd": Path(__file__).parent}
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], **how).stdout.strip()  # type: ignore[call-overload]
        changed = subprocess.run(["git", "status", "--porcelain"], **how).stdout.strip()  # type: ignore[call-overload]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + (" with changes" if changed else "")
