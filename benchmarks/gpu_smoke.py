"""On one GPU, offline, in minutes: identity, the times of each pass, and a timeline. `python benchmarks/gpu_smoke.py`

Random weights of Llama-2-7b's shape on the GPU, and of vicuna-68m's on the processor. The target's embedding and head
hold the draft's, and its layers add little to them, so that the two agree often enough for a test. `--tiny` tries the
script itself on a processor. `--engine compiled` takes minutes more, for its graphs.
"""

import argparse
import gc
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from overhead import split
from transformers import LlamaConfig, LlamaForCausalLM

from duoexp import terminal
from duoexp.budget import Fixed
from duoexp.config import CONF, HardwareConfig, SamplingConfig, SideConfig
from duoexp.drafters import Drafter, ModelDrafter
from duoexp.engine import Engine, Method
from duoexp.hardware import decide, placed
from duoexp.identity import compare
from duoexp.lm.causal_lm import CausalLM
from duoexp.lm.lean import LeanLM
from duoexp.lm.static import StaticLM
from duoexp.lm.transformers_lm import TransformersLM
from duoexp.policy import Chain, FixedK, Policy
from duoexp.profile import Profile, Want, measure
from duoexp.profile.show import table
from duoexp.sampling import Sampler
from duoexp.schedule import SCHEDULES
from duoexp.verify import match
from duoexp.worker import Inline, Process

VOCABULARY, CONTEXT = 32000, 4096
TARGET = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
DRAFT = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 2, "num_attention_heads": 12}
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
SHARE = 0.05  # of what the layers would add at full strength
TOKENS = 96
ENGINES: dict[str, Callable[[LlamaForCausalLM], CausalLM]] = {
    "transformers": lambda model: TransformersLM(model, VOCABULARY),
    "lean": lambda model: LeanLM.from_model(model, VOCABULARY, width_invariant=model.device.type == "cpu"),
    "static": lambda model: StaticLM.from_model(model, VOCABULARY),
    "compiled": lambda model: StaticLM.from_model(model, VOCABULARY).compile(),
}
METHODS = [("serial", Chain(), 8), ("overlapped", Chain(), 16), ("overlapped", FixedK(2), 16)]


@torch.no_grad()
def llama(shape: dict[str, int], device: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """Random weights, the same for the same shape; what follows depends on the last token above all."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, tie_word_embeddings=False, **shape)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype).eval()
    model.get_input_embeddings().weight.div_(config.initializer_range)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(SHARE)
        layer.mlp.down_proj.weight.mul_(SHARE)
    return model


@torch.no_grad()
def target_of(shape: dict[str, int], draft: dict[str, int], device: str, dtype: torch.dtype) -> LlamaForCausalLM:
    model, small = llama(shape, device, dtype), llama(draft, "cpu", dtype)
    width = draft["hidden_size"]
    for ours, theirs in (
        (model.get_input_embeddings().weight, small.get_input_embeddings().weight),
        (model.get_output_embeddings().weight, small.get_output_embeddings().weight),
    ):
        ours.zero_()
        ours[:, :width] = theirs.to(device)
    return model


def drafter_of(shape: dict[str, int], policy: Policy) -> Drafter:
    """In the draft's process."""
    drafter = ModelDrafter(policy)
    drafter.start(lambda: LeanLM.from_model(llama(shape, "cpu", torch.bfloat16), VOCABULARY), Sampler(), False)
    return drafter


def smoke(name: str, target: CausalLM, worker: Process, shown: Any) -> None:
    """Everything for one engine of the target."""
    engine = Engine(target, None, "plain", SamplingConfig(), Sampler(), frozenset())  # type: ignore[arg-type]
    prompt = [random.Random(0).randrange(VOCABULARY) for _ in range(64)]
    alone = Method(SCHEDULES["serial"], Inline(Drafter(), VOCABULARY), match, Fixed(0))
    baseline = [engine.decode(alone, prompt, TOKENS) for _ in range(2)][-1]
    shown.print(f"{name}: autoregressive {TOKENS / baseline.duration_s:.1f} tokens/s", markup=False)
    for schedule, policy, budget in METHODS:
        method = Method(SCHEDULES[schedule], Shaped(worker, policy), match, Fixed(budget))
        found = [engine.decode(method, prompt, TOKENS) for _ in range(2)][-1]
        kind = compare(target, Sampler(), prompt, baseline.ids, found.ids)
        rate, taken = TOKENS / found.duration_s, len(found.ids) / len(found.rounds)
        what = f"{schedule} {policy} budget {budget}: {rate:.1f} tokens/s, tau {taken:.2f}, {kind.kind}"
        shown.print(
            what + (f" (gap {kind.gap}, rounding {kind.tolerance})" if kind.gap is not None else ""), markup=False
        )
        assert kind.kind != "different", f"{name}, {what}: not the target's own tokens"
    profile = Profile({})
    for beside in (False, True):
        want = Want(beside, [64, 2000], [1, 2, 4, 8, 16, 24, 32], [1, 2, 4, 8], prefill=True)
        measure(target, worker, VOCABULARY, 5, want, profile)
    shown.print(table(profile))
    parts, drawn = split(engine, Method(SCHEDULES["overlapped"], worker, match, Fixed(16)), prompt)
    shown.print("\n".join(f"{part}: {value}" for part, value in parts.items()), drawn, sep="\n", markup=False)


class Shaped:
    """A worker that is asked for a policy's number of sequences."""

    def __init__(self, worker: Process, policy: Policy) -> None:
        self._worker, self._sequences = worker, getattr(policy, "k", 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def ask(self, context: Any, pending: Any, budget: int, depth: int | None = None, *_: Any) -> None:
        self._worker.ask(context, pending, budget, depth, self._sequences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small shapes on the processor, to try the script")
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=["transformers", "lean"], help="of the target")
    given = parser.parse_args()
    tiny = given.tiny
    begun, shown = time.perf_counter(), terminal.console()
    device = "cpu" if tiny else "cuda"
    sides = SideConfig(device=device, dtype="bfloat16"), SideConfig(device="cpu", dtype="bfloat16")
    hardware = decide(HardwareConfig("smoke", *sides, worker="process"), CONF / "hardware")
    shape, draft = (SMALL, SMALL | {"hidden_size": 128, "num_hidden_layers": 1}) if tiny else (TARGET, DRAFT)
    worker = Process(partial(drafter_of, draft, Chain()), partial(placed, hardware.draft), VOCABULARY)
    try:
        with placed(hardware.target):
            worker.ready()
            for name in given.engine:  # weights anew for each, as a GPU may hold them but once
                target = ENGINES[name](target_of(shape, draft, hardware.target.device, torch.bfloat16))
                smoke(name, target, worker, shown)
                del target
                gc.collect()
    finally:
        worker.close()
    shown.print(f"{time.perf_counter() - begun:.0f} s in all", markup=False)


if __name__ == "__main__":
    main()
