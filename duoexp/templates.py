"""Templates: a prompt and the answers so far -> the text, and the ids, that the target is given."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from duoexp.config import TEMPLATES, InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag", "humaneval", "prompt")

# Vicuna v1.1: system sentence, then "USER: ... ASSISTANT:", an answer closed by the end-of-sequence token.
VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
# A bare function makes no request; only where nobody is asked (plain) does it stand alone.
HUMANEVAL_REQUEST = "Complete the following Python function, and answer with the whole function:\n\n"

# How a base model is made to answer, as in DuoDecoding's scripts but without their space behind the last colon: as a
# token of its own it keeps the model from beginning a word as it learnt to. Other kinds are continued as they are.
PLAIN: dict[str, Callable[[str], str]] = {
    "summarization": lambda text: text.removeprefix("Summarize: ") + "\nTL;DR:",
    "translation": lambda text: (
        f"Translate German to English. German: {text.removeprefix('Translate German to English: ')} English:"
    ),
    "math_reasoning": lambda text: text + " Let's think step by step.",
}
PLAIN_AS_VICUNA = ("qa", "mt_bench")

# Some chat templates print today's date. The same run tomorrow must see the same prompt, so their clock is stopped, at
# the date that Llama 3 falls back to. It is a macro, since transformers lets no function of ours into a template.
STOPPED_CLOCK = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}"


@dataclass(frozen=True)
class Prompt:
    """What is asked, before any template. `turns` after the first need the answers to those before."""

    id: str
    kind: str
    turns: tuple[str, ...]
    reference: str | None


def encode(
    tokenizer: "PreTrainedTokenizerBase", template: str, prompt: Prompt, answers: Sequence[str] = ()
) -> list[int]:
    """Ids of the turn number len(answers), counted from 0, given the answers to the turns before it.

    One BOS, whether the text brings it or not; none where the tokenizer itself would add none. What the tokenizer would
    add at the end is left out: a prompt that ends in EOS is over. Raises InputError for a prompt of no token.
    """
    text = render(tokenizer, template, prompt, answers)
    ids: list[int] = list(tokenizer.encode(text, add_special_tokens=False))
    bos = own_bos(tokenizer)
    if bos is not None and ids[:1] != [bos]:
        ids = [bos, *ids]
    if not ids:
        raise InputError(f"prompt {prompt.id} becomes no token at all; give a text that the tokenizer can spell")
    return ids


def resolve(tokenizer: "PreTrainedTokenizerBase", template: str) -> str:
    """`chat`, `plain` or `vicuna`. Raises InputError for an unknown name, or for chat where the tokenizer has none."""
    if template not in TEMPLATES:
        raise InputError(f"model.template={template} is none of {', '.join(TEMPLATES)}")
    if template == "auto":
        return "chat" if tokenizer.chat_template else "plain"
    if template == "chat" and not tokenizer.chat_template:
        raise InputError("model.template=chat, but the target's tokenizer has no chat template; take plain or vicuna")
    return template


def render(tokenizer: "PreTrainedTokenizerBase", template: str, prompt: Prompt, answers: Sequence[str]) -> str:
    """The text that `encode` turns into ids. Raises IndexError when every turn has its answer."""
    asked = [*prompt.turns[: len(answers)], prompt.turns[len(answers)]]
    form = resolve(tokenizer, template)
    if form == "plain" and prompt.kind not in PLAIN_AS_VICUNA:
        said = [part for pair in zip(asked, answers, strict=False) for part in pair]
        return "\n\n".join([*said, PLAIN.get(prompt.kind, str)(asked[-1])])
    if prompt.kind == "humaneval":
        asked[0] = HUMANEVAL_REQUEST + asked[0]
    return _chat(tokenizer, asked, answers) if form == "chat" else _vicuna(tokenizer, asked, answers)


def _chat(tokenizer: "PreTrainedTokenizerBase", asked: Sequence[str], answers: Sequence[str]) -> str:
    messages = [{"role": "user", "content": asked[0]}]
    for answer, question in zip(answers, asked[1:], strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    form = tokenizer.get_chat_template()
    form = STOPPED_CLOCK + form if "strftime_now" in form else form
    return str(tokenizer.apply_chat_template(messages, chat_template=form, tokenize=False, add_generation_prompt=True))


def _vicuna(tokenizer: "PreTrainedTokenizerBase", asked: Sequence[str], answers: Sequence[str]) -> str:
    end = tokenizer.eos_token or "</s>"
    said = "".join(f"USER: {text} ASSISTANT: {answer}{end}" for text, answer in zip(asked, answers, strict=False))
    return f"{VICUNA_SYSTEM} {said}USER: {asked[-1]} ASSISTANT:"


def own_bos(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """The BOS that the tokenizer puts before a text; some name a BOS and never do."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None and list(tokenizer.encode(""))[:1] == [bos] else None


def template_hash(tokenizer: "PreTrainedTokenizerBase", template: str) -> str:
    """16 hex digits of what the template makes of each kind, first turn and second, and of whether a BOS is added.

    Two templates that ask alike have one hash, whatever they are called.
    """
    probes = [Prompt("", kind, ("a", "b"), None) for kind in KINDS]
    texts = [render(tokenizer, template, probe, answers) for probe in probes for answers in ((), ("c",))]
    record = json.dumps([own_bos(tokenizer) is not None, texts])
    return hashlib.sha256(record.encode()).hexdigest()[:16]
