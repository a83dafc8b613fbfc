"""One experiment, from config to summary: every prompt decoded autoregressively and with the method, in turn."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from duoexp import machine, tasks, templates, terminal
from duoexp.config import Config, InputError, check, check_keys
from duoexp.drafters import Drafter
from duoexp.engine import Engine, Method
from duoexp.errors import sentence
from duoexp.hardware import Hardware, decide, placed
from duoexp.identity import compare
from duoexp.lm.causal_lm import CausalLM
from duoexp.lm.load import Model, check_vocabulary, describe, eos_ids, load
from duoexp.lm.sources import resolve
from duoexp.metrics import Pair, block_efficiency, speedup, tokens_per_s
from duoexp.record import Record
from duoexp.sampling import Sampler
from duoexp.schedule import SCHEDULES, serial
from duoexp.summary import Answer, Results, summarize
from duoexp.tasks import WARMUP, Prompt
from duoexp.tracking import Tracker, masked
from duoexp.verify import RULES, match
from duoexp.worker import Continuing, Inline, Process, Worker

log = logging.getLogger("duoexp")

WARMUP_TOKENS = 16


class RunFailed(RuntimeError):
    """The run came to its end, but its result does not stand."""


@dataclass(frozen=True)
class Plan:
    """All that is known, and checked, before any weights are read."""

    config: Config
    resolved: dict[str, Any]
    hardware: Hardware
    prompts: list[Prompt]
    drafter: Drafter
    target: Model
    draft: Model | None
    tracker: Tracker
    sampler: Sampler
    notes: tuple[str, ...]

    def about(self) -> dict[str, Any]:
        template, tokenizer = self.config.model.template, self.target.tokenizer
        return {
            "model": self.config.model.name,
            "target": self.target.source,
            "draft": self.draft.source if self.draft else None,
            "method": self.config.draft.name,
            "hardware": asdict(self.hardware),
            "notes": list(self.notes),
            "prompts_hash": tasks.prompts_hash(self.prompts),
            "template": templates.resolve(tokenizer, template),
            "template_hash": templates.template_hash(tokenizer, template),
        }


def run(cfg: DictConfig, profiles: Path) -> dict[str, Any]:
    """Runs `cfg` and returns the summary. profiles: the folder of the `hardware=` choices.

    Raises InputError before any model loads, RunFailed when an answer was not the target's own or none came out.
    """
    plan = prepare(cfg, profiles)
    record, results, status = Record(plan.config.output_dir, plan.config.name, plan.resolved), Results(), "failed"
    about, shown = plan.about(), terminal.console()
    try:
        description = machine.describe()
        record.write("machine.json", description)
        plan.tracker.start(record.folder, plan.config.name, about["method"], plan.resolved | {"machine": description})
        with _loaded(plan, results) as (engine, baseline, method):
            description["threads"] |= machine.describe()["threads"]  # in force from here on
            record.write("machine.json", description)
            with terminal.Progress(shown, len(plan.prompts)) as progress:
                for done, prompt in enumerate(plan.prompts, start=1):
                    for answer in _turns(engine, baseline, method, prompt, results):
                        _keep(record, plan.tracker, engine, answer, len(results.answers))
                        results.note_failure(answer, method.worker)
                    progress.update(prompt.kind, results.pairs(), done)
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except Exception as error:
        results.error = sentence(error)
        record.log_traceback()
        raise
    finally:
        summary = summarize(about, results, status)
        record.write("summary.json", summary)
        plan.tracker.finish(summary, 0 if status == "finished" and not _fault(summary) else 1)
        record.close()
    terminal.show(shown, summary, results, str(record.folder))
    if fault := _fault(summary):
        raise RunFailed(fault)
    return summary


def prepare(cfg: DictConfig, profiles: Path) -> Plan:
    """Every check of the input; reads configs, tokenizers and prompts, no weights. Raises InputError."""
    resolved: dict[str, Any] = masked(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
    check_keys(resolved)
    config: Config = OmegaConf.to_object(cfg)  # type: ignore[assignment]
    check(config)
    hardware = decide(config.hardware, profiles)
    prompts = tasks.load(config.task)
    drafter = _drafter(config)
    target = describe(config.model.target, resolve(config.model.target), config.model.trust_remote_code)
    draft, notes = None, [*hardware.notes]
    if drafter.needs_model:
        checkpoint = resolve(config.model.draft, target.checkpoint)
        draft = describe(config.model.draft, checkpoint, config.model.trust_remote_code, target)
        _check_vocabulary(config, target, draft, notes)
        contexts = [each.config.get_text_config(decoder=True).max_position_embeddings for each in (draft, target)]
        if contexts[0] < contexts[1]:
            notes.append(
                f"beyond {contexts[0]} tokens, its context, the draft is silent; the target's is {contexts[1]}"
            )
        if checkpoint.layers is not None:
            notes.append(f"the draft is a stand-in: the first {checkpoint.layers} layers of the target, untrained")
    templates.resolve(target.tokenizer, config.model.template)
    tracker, s = instantiate(config.tracker.tracker), config.sampling
    sampler = Sampler(s.temperature, s.top_k, s.top_p, s.seed)
    return Plan(config, resolved, hardware, prompts, drafter, target, draft, tracker, sampler, tuple(notes))


def _drafter(config: Config) -> Drafter:
    # In two steps: Hydra would turn a policy that it is handed into a config.
    make = instantiate(config.draft.drafter, _partial_=True)
    try:
        drafter: Drafter = make() if config.draft.policy is None else make(policy=instantiate(config.draft.policy))
    except TypeError as error:
        raise InputError(f"draft.drafter and draft.policy do not fit: {error}; see the files in conf/draft") from error
    return drafter


def _check_vocabulary(config: Config, target: Model, draft: Model, notes: list[str]) -> None:
    if config.model.vocabulary != "off":
        check_vocabulary(target, draft, notes.append if config.model.vocabulary == "warn" else None)


@contextmanager
def _loaded(plan: Plan, results: Results) -> Iterator[tuple[Engine, Method, Method]]:
    """The engine, warm, with the baseline and the method. The drafter loads beside the target."""
    config, place = plan.config, plan.hardware.target
    machine.reset_peak_memory()
    with ExitStack() as stack:
        worker = _worker(plan)
        if config.hardware.on_draft_failure == "continue":
            worker = Continuing(worker)
        stack.callback(worker.close)
        stack.enter_context(placed(place))
        target = load(plan.target, config.model.engine, place.device, place.dtype, plan.target.tokens)
        eos = frozenset[int]() if config.sampling.ignore_eos else eos_ids(plan.target)
        engine = Engine(target, plan.target.tokenizer, config.model.template, config.sampling, plan.sampler, eos)
        worker.ready()
        method = Method(SCHEDULES[config.draft.schedule], worker, RULES[config.draft.rule], config.draft.budget)
        baseline = Method(serial, Inline(Drafter(), plan.target.tokens), match, 0)
        _warm_up(engine, (baseline, method), plan.target.source)
        yield engine, baseline, method
        draft = None if worker.pid is None else machine.peak_memory_of(worker.pid)
        results.peak_memory = {"target": machine.peak_memory(), "draft": draft}


def _warm_up(engine: Engine, methods: Sequence[Method], source: str) -> None:
    """Decodes prompts that are no test prompts. Raises InputError for a target whose logits are no numbers."""
    for prompt in WARMUP:
        ids = templates.encode(engine.tokenizer, engine.template, prompt)[: max(1, engine.target.context_size // 2)]
        for method in methods:
            engine.decode(method, ids, WARMUP_TOKENS)
    if not engine.target.logits(ids).isfinite().all():
        raise InputError(
            f"model {source!r} gives logits that are no finite numbers; check its weights, or set another "
            "hardware.target.dtype"
        )


def _worker(plan: Plan) -> Worker:
    """The drafter where the hardware profile wants it; a process begins to load at once."""
    draft, place = plan.draft, plan.hardware.draft
    sampled = plan.config.draft.rule == "rejection" and plan.sampler.temperature > 0
    engine = plan.config.model.engine
    vocabulary = min(plan.target.tokens, draft.tokens) if draft else 0
    weights = partial(load, draft, engine, place.device, place.dtype, vocabulary) if draft else None
    build = partial(_started, plan.drafter, weights, plan.sampler, sampled)
    if plan.hardware.worker == "inline":
        return Inline(build(), plan.target.tokens)
    return Process(build, partial(placed, place), plan.target.tokens, plan.drafter.observes)


def _started(drafter: Drafter, weights: Callable[[], CausalLM] | None, sampler: Sampler, sampled: bool) -> Drafter:
    drafter.start(weights, sampler, sampled)
    return drafter


def _turns(engine: Engine, baseline: Method, method: Method, prompt: Prompt, results: Results) -> Iterator[Answer]:
    """Each turn decoded both ways, on the baseline's answers to the turns before; who goes first takes turns too."""
    answers: list[str] = []
    for turn in range(len(prompt.turns)):
        try:
            ids = engine.encode(prompt, answers)
        except InputError as error:
            results.failed.append({"prompt": prompt.id, "turn": turn, "reason": str(error)})
            return
        if len(results.answers) % 2:
            ours, theirs = engine.decode(method, ids), engine.decode(baseline, ids)
        else:
            theirs, ours = engine.decode(baseline, ids), engine.decode(method, ids)
        equality = method.rule is match or engine.sampler.temperature == 0
        compared = compare(engine.target, engine.sampler, ids, theirs.ids, ours.ids) if equality else None
        answer = Answer(
            prompt, turn, ids, engine.text(theirs.ids), Pair(prompt.id, prompt.kind, theirs, ours), compared
        )
        results.answers.append(answer)
        answers.append(answer.text)
        yield answer


def _keep(record: Record, tracker: Tracker, engine: Engine, answer: Answer, step: int) -> None:
    """Writes an answer: to disk first, then to the tracker."""
    prompt, pair = answer.prompt, answer.pair
    key = {"prompt": prompt.id, "turn": answer.turn}
    sides = {
        name: {
            "tokens": len(side.ids),
            "ids": list(side.ids),
            "text": engine.text(side.ids),
            "reason": side.reason,
            "duration_s": side.duration_s,
            "ttft_s": side.ttft_s,
        }
        for name, side in (("baseline", pair.baseline), ("method", pair.method))
    }
    compared = asdict(answer.comparison) if answer.comparison else None
    facts = {"kind": prompt.kind, "prompt_tokens": len(answer.ids), "prompt_ids": answer.ids}
    for number, each in enumerate(pair.method.rounds):
        fields = asdict(each) | {"start_s": each.start_s - pair.method.start_s}
        fields["spans"] = [[start - pair.method.start_s, end - pair.method.start_s] for start, end in each.spans]
        record.append("rounds.jsonl", key | {"round": number} | fields)
    record.append("prompts.jsonl", key | facts | sides | {"comparison": compared, "speedup": speedup([pair])})
    record.flush()
    tracker.log(
        {
            "tokens_per_s": tokens_per_s([pair.method]),
            "baseline_tokens_per_s": tokens_per_s([pair.baseline]),
            "speedup": speedup([pair]),
            "ttft_s": pair.method.ttft_s,
            "tau": block_efficiency([pair.method]),
        },
        step,
    )


def _fault(summary: dict[str, Any]) -> str | None:
    """Why the result does not stand, if it does not."""
    if summary["identical"] is False:
        return terminal.verdict(summary)
    if not summary["answers"]:
        return f"none of the {len(summary['failed'])} prompts could be run"
    return None
