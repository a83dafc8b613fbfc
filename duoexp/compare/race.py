"""Every prompt decoded by every entrant, one after the other; who goes first moves on from prompt to prompt."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from duoexp import machine, summary, terminal
from duoexp.compare import table
from duoexp.compare.settings import CompareConfig, entries, experiment, without_secrets
from duoexp.config import InputError
from duoexp.engine import Engine, Method
from duoexp.errors import sentence
from duoexp.hardware import Hardware, Place, placed
from duoexp.identity import Comparison, compare
from duoexp.metrics import Decoding, Pair
from duoexp.peers.base import Peer, Stock, Unavailable
from duoexp.record import Record, digest, new_folder
from duoexp.runner import Plan, RunFailed, engine_of, method_of, place_of, prepare, target_of, warm_up, worker_of
from duoexp.tasks import Prompt
from duoexp.worker import Worker

log = logging.getLogger("duoexp")

ABOUT = ("model", "target", "hardware", "notes", "prompts_hash", "template", "template_hash")  # of every plan


@dataclass(frozen=True)
class Entrant:
    """One line of the table. place: where this process is while it decodes; cores: what it may use, in words."""

    name: str
    entry: str
    plan: Plan
    place: Place
    cores: str

    @property
    def peer(self) -> Peer | None:
        return self.plan.drafter if isinstance(self.plan.drafter, Peer) else None

    def about(self) -> dict[str, Any]:
        note = self.peer.note(self.plan.target, self.plan.draft) if self.peer else None
        package = self.peer.package if self.peer else None
        return {"draft": self.entry, "peer": package, "note": note, "cores": self.cores, "threads": self.place.threads}


@dataclass
class Results:
    """laps: the answers of each entrant beside the baseline's. absent: why an entrant has none."""

    laps: dict[str, list[tuple[Pair, Comparison]]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    budgets: dict[str, Any] = field(default_factory=dict)
    failed: list[dict[str, Any]] = field(default_factory=list)
    answers: int = 0
    error: str | None = None


def run(cfg: DictConfig, profiles: Path) -> dict[str, Any]:
    """Runs the comparison and returns its summary.

    Raises InputError before any model loads, RunFailed when an answer of a method, not of a peer, was not the target's.
    """
    settings: CompareConfig = OmegaConf.to_object(cfg)  # type: ignore[assignment]
    results, status = Results(), "failed"
    entrants = _entrants(cfg, settings, profiles, results)
    first, shown = entrants[0].plan, terminal.console()
    resolved: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    resolved |= {key: [without_secrets(entry) for entry in resolved[key]] for key in ("methods", "peers")}
    record = Record(new_folder(_folder(settings), digest(resolved)), resolved)
    about = {key: value for key, value in first.about(0).items() if key in ABOUT} | {"draft": settings.model.draft}
    try:
        record.write("machine.json", machine.describe())
        with (
            _lined_up(entrants, results) as (engine, methods),
            terminal.Progress(shown, len(first.prompts)) as progress,
        ):
            for done, prompt in enumerate(first.prompts, start=1):
                for turn, decoded in _turns(engine, entrants, methods, prompt, results):
                    _keep(record, engine, prompt, turn, decoded, results)
                progress.update(prompt.kind, [], done)
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except Exception as error:
        results.error = sentence(error)
        record.log_traceback()
        raise
    finally:
        named = {each.name: each.about() | {"budget": results.budgets.get(each.name)} for each in entrants}
        told = about | {"status": status, "error": results.error, "failed": results.failed}
        told |= table.summarize(named, results.laps, results.absent)
        record.write("summary.json", told)
        record.close()
    table.show(shown, told, str(record.folder))
    if fault := table.fault(told):
        raise RunFailed(fault)
    return told


def _folder(settings: CompareConfig) -> Path:
    return Path(settings.output_dir).expanduser() / "comparisons" / settings.name


def _entrants(cfg: DictConfig, settings: CompareConfig, profiles: Path, results: Results) -> list[Entrant]:
    """Checked, each with a plan of its own. A peer that is not to be had here is absent; all else must be right."""
    entrants = []
    for entry in entries(settings):
        try:
            plan = prepare(experiment(cfg, entry), profiles)
        except Unavailable as error:
            results.absent[without_secrets(entry)] = str(error)
            continue
        entry, place = without_secrets(entry), place_of(plan)
        alone = isinstance(plan.drafter, Peer) or entry == "none"
        entrants.append(Entrant(entry, entry, plan, place, _cores(plan.hardware, place, alone)))
        wide = _everywhere(place)
        if settings.all_cores and alone and wide != place:
            plan = replace(plan, drafter=deepcopy(plan.drafter))
            entrants.append(Entrant(f"{entry}, all cores", entry, plan, wide, _cores(plan.hardware, wide, alone)))
    return entrants


def _everywhere(place: Place) -> Place:
    """The same with all cores of this process, where cores are what it computes on."""
    if place.device != "cpu" or place.threads >= machine.cores():
        return place
    return replace(place, threads=machine.cores(), cores=machine.mask())


def _cores(hardware: Hardware, place: Place, alone: bool) -> str:
    """`0,1`: both models in turn; `0 | 1`: the target on one, the draft on the other."""
    sides = [place] if alone or hardware.worker == "inline" else [place, hardware.draft]
    return " | ".join(_one(side) for side in sides)


def _one(place: Place) -> str:
    if place.device != "cpu":
        return place.device
    cores = place.cores or machine.mask()
    return ",".join(map(str, cores)) if cores and len(cores) <= 8 else f"{place.threads} threads"


@contextmanager
def _lined_up(entrants: list[Entrant], results: Results) -> Iterator[tuple[Engine, dict[str, Method]]]:
    """The engine and every method, loaded and warm. Draft processes are born before anything is pinned."""
    first, stock, methods = entrants[0], Stock(), dict[str, Method]()
    with ExitStack() as stack:
        workers = {entrant.name: _begun(entrant, stack) for entrant in entrants}
        stack.enter_context(placed(first.place))
        engine = engine_of(first.plan, target_of(first.plan))
        for entrant in entrants:
            with placed(entrant.place), _dropping(entrant, results):
                worker = workers[entrant.name]
                worker.ready()
                held = summary.Results()
                loading = method_of(entrant.plan, engine.target, worker, entrant.place, stock, held)
                method = stack.enter_context(loading)
                results.budgets[entrant.name] = held.budget
                warm_up(engine, (method,), entrant.plan.target.source)
                methods[entrant.name] = method
        yield engine, methods


def _begun(entrant: Entrant, stack: ExitStack) -> Worker:
    worker = worker_of(entrant.plan)
    stack.callback(worker.close)
    return worker


@contextmanager
def _dropping(entrant: Entrant, results: Results) -> Iterator[None]:
    """A peer that turns out not to work here drops out of the race, which goes on."""
    try:
        yield
    except Unavailable as error:
        log.warning("%s drops out: %s", entrant.name, error)
        results.absent[entrant.name] = str(error)


def _turns(
    engine: Engine, entrants: Sequence[Entrant], methods: dict[str, Method], prompt: Prompt, results: Results
) -> Iterator[tuple[int, dict[str, Decoding]]]:
    """Each turn decoded by all, on the baseline's answers to the turns before."""
    answers: list[str] = []
    for turn in range(len(prompt.turns)):
        try:
            ids = engine.encode(prompt, answers)
        except InputError as error:
            results.failed.append({"prompt": prompt.id, "turn": turn, "reason": str(error)})
            return
        running = [entrant for entrant in entrants if entrant.name not in results.absent]
        start, decoded = results.answers % len(running), dict[str, Decoding]()
        for entrant in running[start:] + running[:start]:
            with placed(entrant.place), _dropping(entrant, results):
                decoded[entrant.name] = engine.decode(methods[entrant.name], ids)
        baseline = decoded[entrants[0].name]
        for name, ours in decoded.items():
            compared = compare(engine.target, engine.sampler, ids, baseline.ids, ours.ids)
            results.laps.setdefault(name, []).append((Pair(prompt.id, prompt.kind, baseline, ours), compared))
        results.answers += 1
        answers.append(engine.text(baseline.ids))
        yield turn, decoded


def _keep(
    record: Record, engine: Engine, prompt: Prompt, turn: int, decoded: dict[str, Decoding], results: Results
) -> None:
    """A line of answers.jsonl for each entrant."""
    for name, one in decoded.items():
        facts = {"prompt": prompt.id, "turn": turn, "kind": prompt.kind, "entrant": name, "tokens": len(one.ids)}
        facts |= {"duration_s": one.duration_s, "ttft_s": one.ttft_s, "passes": len(one.rounds), "reason": one.reason}
        facts |= {"comparison": asdict(results.laps[name][-1][1]), "ids": list(one.ids), "text": engine.text(one.ids)}
        record.append("answers.jsonl", facts)
    record.flush()
