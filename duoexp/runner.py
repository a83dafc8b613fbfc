"""One experiment, from config to summary: every prompt decoded autoregressively and with the method, in turn."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import psutil
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from duoexp import decodings, machine, tasks, templates, terminal
from duoexp.baseline import Baseline, Cached, Paired
from duoexp.budget import Budget, Fixed
from duoexp.config import Config, DraftConfig, InputError, budget_of, check, check_keys
from duoexp.drafters import Drafter
from duoexp.engine import Engine, Method
from duoexp.errors import is_interrupt, sentence
from duoexp.fit import Setting
from duoexp.hardware import Hardware, Place, decide, placed
from duoexp.live import Watched
from duoexp.lm.causal_lm import CausalLM
from duoexp.lm.load import Model, check_vocabulary, describe, eos_ids, for_draft, load
from duoexp.lm.sources import files, resolve
from duoexp.masking import masked
from duoexp.meters import Energy, Setup, Watch
from duoexp.metrics import Pair, acceptance_rate, block_efficiency, speedup, tokens_per_s
from duoexp.peers.base import Peer, Stock, home
from duoexp.profile import Profile, key_of, measure
from duoexp.record import Record, digest, new_folder, runs, same_folder
from duoexp.resume import resumed
from duoexp.sampling import Sampler
from duoexp.schedule import SCHEDULES, Schedule, overlapped, serial
from duoexp.session import Session
from duoexp.summary import Answer, Results, summarize
from duoexp.tasks import WARMUP, Prompt
from duoexp.tracking import Tracker
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
    drafter: Drafter | Peer
    target: Model
    draft: Model | None
    tracker: Tracker
    sampler: Sampler
    setting: Setting
    notes: tuple[str, ...]

    @cached_property
    def key(self) -> str:
        """What the result depends on: the config, the code, the prompts and the models' files; not on the machine.

        Machines that share a folder share the jobs too; which of them ran a job is in its machine.json.
        """
        apart = ("output_dir", "tracker", "resume", "sweep")  # none of these changes what is measured
        models = [files(each.source, each.config) for each in (self.target, self.draft) if each is not None]
        config = {key: value for key, value in self.resolved.items() if key not in apart}
        return digest([config, machine.code(), tasks.prompts_hash(self.prompts), models])

    @property
    def folder(self) -> Path:
        """Where every process with this key goes on."""
        return runs(self.config.output_dir, self.config.name) / self.key

    @property
    def vocabulary(self) -> int:
        """Ids below it are known to both models."""
        return min(self.target.tokens, self.draft.tokens) if self.draft else self.target.tokens

    def profile(self) -> Profile:
        """What is known of the times of this set-up."""
        key = key_of(self.hardware, self.config.model.engine, self.target, self.draft)
        return Profile(key) if self.config.profile.fresh else Profile.kept(key)

    def kept_baseline(self) -> Baseline:
        """Where the autoregressive decodings of other runs are kept, if this one may use them."""
        if self.config.baseline == "paired":
            return Paired()
        depends = {
            "target": files(self.target.source, self.target.config),
            "place": asdict(self.hardware.target) | {"cores": len(self.hardware.target.cores or ())},
            "engine": self.config.model.engine,
            "template": templates.template_hash(self.target.tokenizer, self.config.model.template),
            "prompts": tasks.prompts_hash(self.prompts),
            "sampling": asdict(self.config.sampling),
            "code": machine.code(),
        }
        return Cached(Path(self.config.output_dir).expanduser() / "baselines", depends)

    def about(self, resumed: int) -> dict[str, Any]:
        """resumed: how many answers an earlier process left."""
        template, tokenizer = self.config.model.template, self.target.tokenizer
        return {
            "model": self.config.model.name,
            "target": self.target.source,
            "draft": self.draft.source if self.draft else None,
            "method": self.config.draft.name,
            "peer": self.drafter.package if isinstance(self.drafter, Peer) else None,
            "hardware": asdict(self.hardware),
            "notes": list(self.notes),
            "key": self.key,
            "repeats": self.config.repeats,
            "baseline": self.config.baseline,
            "load_at_start": list(psutil.getloadavg()),  # over 1, 5 and 15 minutes; a sweep's own jobs count too
            "resumed_answers": resumed,
            "prompts_hash": tasks.prompts_hash(self.prompts),
            "template": templates.resolve(tokenizer, template),
            "template_hash": templates.template_hash(tokenizer, template),
        }


def run(cfg: DictConfig, profiles: Path) -> dict[str, Any]:
    """Runs `cfg` and returns the summary. profiles: the folder of the `hardware=` choices.

    Raises InputError before any model loads, RunFailed when an answer was not the target's own or none came out.
    """
    plan = prepare(cfg, profiles)
    with closing(_record(plan)) as record:
        return _run(plan, record)


def _run(plan: Plan, record: Record) -> dict[str, Any]:
    results, status, description = Results(), "failed", machine.describe()
    if plan.config.resume:
        if stands(record.folder):  # by another process, which was waited for
            return summary_of(record.folder)
        results.answers += resumed(record, plan.prompts, description)
    about, shown, live = plan.about(len(results.answers)), terminal.console(), plan.config.view == "live"
    try:
        record.write("machine.json", description)
        plan.tracker.start(record.folder, plan.config.name, about["method"], plan.resolved | {"machine": description})
        for step, answer in enumerate(results.answers, start=1):  # the tracker of an earlier process ended with it
            plan.tracker.log(_figures(answer.pair), step)
        with terminal.Progress(shown, len(plan.prompts) * plan.config.repeats, bar=not live) as progress:
            for repeat in range(plan.config.repeats):
                _repeat(plan, repeat, record, results, description, progress)
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except Exception as error:
        status = "interrupted" if is_interrupt(error) else "failed"
        results.error = sentence(error)
        record.log_traceback()
        raise
    finally:
        summary = summarize(about, results, status)
        try:
            record.write("summary.json", summary)
        finally:
            plan.tracker.finish(summary, 0 if status == "finished" and not _fault(summary) else 1)
    terminal.show(shown, summary, results, str(record.folder), answers=not live)
    if fault := _fault(summary):
        raise RunFailed(fault)
    return summary


def _record(plan: Plan) -> Record:
    folder = same_folder(plan.folder) if plan.config.resume else new_folder(plan.folder.parent, plan.key)
    return Record(folder, plan.resolved, shared=plan.config.resume)


def _repeat(
    plan: Plan,
    repeat: int,
    record: Record,
    results: Results,
    description: dict[str, Any],
    progress: terminal.Progress,
) -> None:
    """Decodes every prompt that has no answer yet, with a seed and freshly loaded models of this repeat's own."""
    finished = {answer.prompt.id for answer in results.answers if answer.repeat == repeat}
    prompts = [prompt for prompt in plan.prompts if prompt.id not in finished]
    if not prompts:
        return
    plan = replace(plan, sampler=replace(plan.sampler, seed=plan.sampler.seed + repeat))
    devices = (plan.hardware.target.device, plan.hardware.draft.device)
    with ready(plan, results) as (engine, baseline, method):
        description["threads"] |= machine.describe()["threads"]  # in force from here on
        record.write("machine.json", description)
        if results.profile is not None:
            record.write("profile.json", results.profile.as_json())
        results.kernel = engine.target.kernel
        energy = Energy(devices)
        results.no_energy = energy.reasons
        session = Session(engine, baseline, method, plan.kept_baseline(), Watch(devices), energy, repeat)
        for done, prompt in enumerate(prompts, start=1 + repeat * len(plan.prompts) + len(finished)):
            for answer in session.turns(prompt, results):
                _keep(record, plan.tracker, engine, answer, len(results.answers))
                results.note_failure(answer, method.worker)
            progress.update(prompt.kind, results.pairs(), done)


def stands(folder: Path) -> bool:
    """Whether a run in this folder has come to its end, with a result that stands."""
    if not (folder / "summary.json").is_file():
        return False
    summary = summary_of(folder)
    return summary["status"] == "finished" and not _fault(summary)


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def prepare(cfg: DictConfig, profiles: Path) -> Plan:
    """Every check of the input; reads configs, tokenizers and prompts, no weights. Raises InputError."""
    resolved: dict[str, Any] = masked(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
    check_keys(resolved)
    config: Config = OmegaConf.to_object(cfg)  # type: ignore[assignment]
    check(config)
    hardware = decide(config.hardware, profiles)
    prompts = tasks.load(config.task)
    drafter = _drafter(config)
    if isinstance(drafter, Peer):
        _check_peer(config, drafter)
    target = describe(config.model.target, resolve(config.model.target), config.model.trust_remote_code)
    if (nodes := budget_of(config.draft.budget).tokens) >= target.context:
        raise InputError(f"draft.budget={nodes} has no room in the target's context of {target.context}; give less")
    if isinstance(drafter, Drafter):
        drafter.prepare(target)
    draft, notes = None, [*hardware.notes]
    if (tokens := config.task.prompt_tokens) is not None:
        encode = partial(templates.encode, target.tokenizer, config.model.template)
        prompts = tasks.of_length(prompts, tokens, lambda prompt: len(encode(prompt)))
        notes.append(f"the prompts were made {tokens} tokens long: synthetic, so acceptance means little")
    if drafter.needs_model:
        checkpoint = resolve(config.model.draft, target.checkpoint)
        draft = describe(config.model.draft, checkpoint, config.model.trust_remote_code, target)
        _check_vocabulary(config, target, draft, notes)
        if draft.context < target.context:
            notes.append(
                f"beyond {draft.context} tokens, its context, the draft is silent; the target's is {target.context}"
            )
        if checkpoint.layers is not None:
            notes.append(f"the draft is a stand-in: the first {checkpoint.layers} layers of the target, untrained")
    if isinstance(drafter, Peer):
        notes.append(drafter.note(target, draft))
    if config.view == "live":
        notes.append("view=live draws while it measures, which takes time: quote no figure of this run")
    templates.resolve(target.tokenizer, config.model.template)
    setting = _setting(config, hardware, drafter, [each for each in (target, draft) if each is not None])
    tracker, s = instantiate(config.tracker.tracker), config.sampling
    sampler = Sampler(s.temperature, s.top_k, s.top_p, s.seed)
    return Plan(config, resolved, hardware, prompts, drafter, target, draft, tracker, sampler, setting, tuple(notes))


def _setting(config: Config, hardware: Hardware, drafter: Drafter | Peer, models: Sequence[Model]) -> Setting:
    overlapped = config.draft.schedule == "overlapped"
    setting = Setting(
        config=budget_of(config.draft.budget),
        policy=getattr(drafter, "policy", None),
        overlapped=overlapped,
        beside=overlapped and hardware.worker == "process",
        context_size=min(model.context for model in models),
    )
    setting.check()
    return setting


def _drafter(config: Config) -> Drafter | Peer:
    # In two steps: Hydra would turn a policy that it is handed into a config.
    make = instantiate(config.draft.drafter, _partial_=True)
    try:
        drafter: Drafter | Peer = (
            make() if config.draft.policy is None else make(policy=instantiate(config.draft.policy))
        )
    except TypeError as error:
        raise InputError(f"draft.drafter and draft.policy do not fit: {error}; see the files in conf/draft") from error
    return drafter


def _check_peer(config: Config, peer: Peer) -> None:
    draft = config.draft
    if config.sampling.temperature > 0:
        raise InputError(
            f"sampling.temperature={config.sampling.temperature} is not for the peer draft={draft.name}, which draws "
            "with random numbers of its own, so that its answers could not be compared; set sampling.temperature=0"
        )
    if draft.schedule != "serial" or draft.policy is not None or draft.rule != "match" or draft.budget != 0:
        raise InputError(
            f"draft={draft.name} is a peer with a loop of its own, so draft.schedule={draft.schedule}, draft.rule="
            f"{draft.rule}, draft.budget={draft.budget} or a draft.policy means nothing to it; leave them as its file "
            "has them"
        )
    peer.check(config.model.target, config.sampling.stop)


def _check_vocabulary(config: Config, target: Model, draft: Model, notes: list[str]) -> None:
    if config.model.vocabulary != "off":
        check_vocabulary(target, draft, notes.append if config.model.vocabulary == "warn" else None)


@contextmanager
def loaded(plan: Plan) -> Iterator[tuple[CausalLM, Worker]]:
    """Both sides in their places. The drafter loads beside the target."""
    place = place_of(plan)
    with ExitStack() as stack:
        worker = worker_of(plan)
        stack.callback(worker.close)
        stack.enter_context(placed(place))
        target = target_of(plan)
        worker.ready()
        yield target, worker


def place_of(plan: Plan) -> Place:
    """Where this process runs."""
    return home(plan.hardware) if isinstance(plan.drafter, Peer) else plan.hardware.target


def target_of(plan: Plan) -> CausalLM:
    """Loads it."""
    place, target = plan.hardware.target, plan.target
    return load(target, plan.config.model.engine, place.device, place.dtype, target.tokens)


@contextmanager
def ready(plan: Plan, results: Results) -> Iterator[tuple[Engine, Method, Method]]:
    """The engine, warm, with the baseline and the method."""
    machine.reset_peak_memory()
    with loaded(plan) as (target, worker):
        engine = engine_of(plan, target)
        baseline = Method(serial, Inline(Drafter(), plan.target.tokens), match, Fixed(0), "autoregressive")
        with method_of(plan, target, worker, place_of(plan), Stock(), results) as method:
            warm_up(engine, (baseline, method), plan.target.source)
            if plan.config.view == "live":
                engine = Watched(**vars(engine), console=terminal.console())
            setup = Setup(worker.pid)
            yield engine, baseline, method
            results.changes += setup.changes()
        draft = None if worker.pid is None else machine.peak_memory_of(worker.pid)
        results.peak_memory = {"target": machine.peak_memory(), "draft": draft}


def engine_of(plan: Plan, target: CausalLM) -> Engine:
    config = plan.config
    eos = frozenset[int]() if config.sampling.ignore_eos else eos_ids(plan.target)
    return Engine(target, plan.target.tokenizer, config.model.template, config.sampling, plan.sampler, eos)


@contextmanager
def method_of(
    plan: Plan, target: CausalLM, worker: Worker, place: Place, stock: Stock, results: Results
) -> Iterator[Method]:
    """The method under test. A peer is loaded here, for `place`; anything else drafts in the worker."""
    draft, peer = plan.config.draft, plan.drafter
    if not isinstance(peer, Peer):
        budget = _budget(plan, target, worker, results)
        yield Method(schedule_of(draft), worker, RULES[draft.rule], budget, draft.name)
        return
    try:
        peer.start(plan.target, plan.draft, plan.hardware, place, stock)
        yield Method(peer.schedule, worker, match, Fixed(0), draft.name)
    finally:
        peer.close()


def _budget(plan: Plan, target: CausalLM, worker: Worker, results: Results) -> Budget:
    """The budget, with what has to be measured for it: looked up, or measured now and kept for other runs."""
    setting, want = plan.setting, plan.setting.want()
    profile = Profile({})
    if want is not None:
        profile = results.profile = results.profile or plan.profile()  # one for all repeats
        if measure(target, worker, plan.vocabulary, plan.config.profile.repeats, want, profile):
            profile.save()
    budget = setting.budget(profile)
    results.budget = setting.about(budget)
    return budget


def schedule_of(draft: DraftConfig) -> Schedule:
    if draft.pre_verify and draft.post_verify:
        return SCHEDULES[draft.schedule]
    return partial(overlapped, pre_verify=draft.pre_verify, post_verify=draft.post_verify)


def warm_up(engine: Engine, methods: Sequence[Method], source: str) -> None:
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


def worker_of(plan: Plan) -> Worker:
    """The drafter where the hardware profile wants it; a process begins to load at once. A peer has none."""
    if isinstance(plan.drafter, Peer):
        return Inline(Drafter(), plan.target.tokens)
    draft, place = plan.draft, plan.hardware.draft
    sampled = plan.config.draft.rule == "rejection" and plan.sampler.temperature > 0
    engine = for_draft(plan.config.model.engine, place.device)
    weights = partial(load, draft, engine, place.device, place.dtype, plan.vocabulary) if draft else None
    build = partial(_started, deepcopy(plan.drafter), weights, plan.sampler, sampled)  # the next repeat's is as new
    if plan.hardware.worker == "inline":
        worker: Worker = Inline(build(), plan.target.tokens)
    else:
        worker = Process(build, partial(placed, place), plan.target.tokens, plan.drafter.observes)
    return Continuing(worker) if plan.hardware.on_draft_failure == "continue" else worker


def _started(drafter: Drafter, weights: Callable[[], CausalLM] | None, sampler: Sampler, sampled: bool) -> Drafter:
    drafter.start(weights, sampler, sampled)
    return drafter


def _keep(record: Record, tracker: Tracker, engine: Engine, answer: Answer, step: int) -> None:
    """Writes an answer: to disk first, then to the tracker."""
    prompt, pair = answer.prompt, answer.pair
    key = {"prompt": prompt.id, "turn": answer.turn, "repeat": answer.repeat}
    sides = {
        name: decodings.side(each, engine.text(each.ids))
        for name, each in (("baseline", pair.baseline), ("method", pair.method))
    }
    sides["method"]["pieces"] = engine.pieces(pair.method.ids)
    compared = asdict(answer.comparison) if answer.comparison else None
    facts = {"kind": prompt.kind, "prompt_tokens": len(answer.ids), "prompt_ids": answer.ids}
    facts |= {"reused": answer.reused, "conditions": asdict(answer.conditions)}
    for name, each in (("rounds.jsonl", pair.method), ("baseline.jsonl", pair.baseline)):
        for row in decodings.rows(each):
            record.append(name, key | row)
    record.flush()  # the answer last: one that is there is there with its rounds
    record.append("prompts.jsonl", key | facts | sides | {"comparison": compared, "speedup": speedup([pair])})
    record.flush()
    tracker.log(_figures(pair), step)


def _figures(pair: Pair) -> dict[str, float]:
    """What a tracker hears of an answer; a figure that it has not is not there."""
    found = {
        "speedup": speedup([pair]),
        "tau": block_efficiency([pair.method]),
        "alpha": acceptance_rate(pair.method.rounds),
        "ttft_s": pair.method.ttft_s,
        "tokens_per_s": tokens_per_s([pair.method]),
        "baseline_tokens_per_s": tokens_per_s([pair.baseline]),
    }
    return {name: value for name, value in found.items() if value is not None}


def _fault(summary: dict[str, Any]) -> str | None:
    """Why the result does not stand, if it does not."""
    if summary["identical"] is False and summary["peer"] is None:
        return terminal.verdict(summary)
    if not summary["answers"]:
        return f"none of the {len(summary['failed'])} prompts could be run"
    return None
