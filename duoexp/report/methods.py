"""Which runs are one line of a table: those of one setting, whatever their task, seed and tracker."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from duoexp.metrics import Pair
from duoexp.report.runs import Answer, Run

NAMES = ("model.name", "hardware.name", "machine")
# What makes no other method of a run, or is told in one word.
APART = ("name", "output_dir", "task", "tracker", "view", "sweep", "resume", "repeats", "sampling.seed", "draft.budget")


@dataclass(frozen=True)
class Method:
    """The runs of one setting, and the name that tells it from the others of a report."""

    label: str
    runs: tuple[Run, ...]
    setting: Mapping[str, str]  # by the dotted keys of the config

    @property
    def budget(self) -> str:
        """Draft tokens a round, or the way in which they are chosen."""
        return self.setting["draft.budget"]

    @property
    def answers(self) -> list[Answer]:
        return [answer for run in self.runs for answer in run.answers]

    def pairs(self, kind: str | None = None) -> list[Pair]:
        """All answers, or those to prompts of a kind."""
        return [answer.pair for answer in self.answers if kind in (None, answer.pair.kind)]

    @property
    def peer(self) -> str | None:
        """The library whose loop it is, where it is not this project's."""
        library: str | None = self.runs[0].summary.get("peer")
        return library

    @property
    def alone(self) -> bool:
        """Whether nothing is drafted: the target by itself."""
        return all(run.config["draft"]["name"] == "none" for run in self.runs)


def methods(runs: Sequence[Run]) -> list[Method]:
    """One a setting: the target by itself first, then in the order of their first runs."""
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(sorted(_setting(run).items())), []).append(run)
    settings = [dict(setting) for setting in groups]
    found = [
        Method(label, tuple(group), setting)
        for label, setting, group in zip(_labels(settings), settings, groups.values(), strict=True)
    ]
    return sorted(found, key=lambda method: not method.alone)


@dataclass(frozen=True)
class Budgets:
    """Methods that differ in their budget alone."""

    fixed: list[Method]
    chosen: list[Method]


def by_budget(found: Sequence[Method]) -> dict[str, Budgets]:
    """Such groups, by what their members' labels share."""
    groups: dict[tuple[tuple[str, str], ...], list[Method]] = defaultdict(list)
    for method in found:
        if not method.alone:
            rest = {key: value for key, value in method.setting.items() if key != "draft.budget"}
            groups[tuple(sorted(rest.items()))].append(method)
    return {
        _shared(group): Budgets(
            [method for method in group if method.budget.isdigit()],
            [method for method in group if not method.budget.isdigit()],
        )
        for group in groups.values()
    }


def budget_of_rounds(method: Method) -> float:
    """The median budget of its rounds; that of what was drafted where the rounds do not say."""
    rounds = [each for pair in method.pairs() for each in pair.method.rounds if each.drafted]
    given = [getattr(each, "budget", None) for each in rounds]
    return float(
        np.median([each.drafted if budget is None else budget for each, budget in zip(rounds, given, strict=True)])
    )


def kinds(found: Sequence[Method]) -> list[str]:
    return list(dict.fromkeys(pair.kind for method in found for pair in method.pairs()))


def machine(run: Run) -> str:
    """What figures of time depend on."""
    cpu, gpus = run.machine.get("cpu", {}), run.machine.get("gpus", [])
    cores = cpu.get("cores") or range(cpu.get("logical_cores") or 0)
    return " + ".join(
        [f"{cpu.get('model') or 'unknown processor'}, {len(cores)} cores", *(gpu["name"] for gpu in gpus)]
    )


def _setting(run: Run) -> dict[str, str]:
    config = {**run.config, "hardware": _decided(run)}
    flat = {key: _shown(value) for key, value in _flat(config)}
    kept = {key: value for key, value in flat.items() if not any(key == no or key.startswith(f"{no}.") for no in APART)}
    return kept | {"draft.budget": _budget(run.config), "machine": machine(run)}


def _decided(run: Run) -> dict[str, Any]:
    """The hardware as the run had it: on another machine `auto` is something else."""
    return {key: value for key, value in run.summary["hardware"].items() if key != "notes"}


def _budget(config: Mapping[str, Any]) -> str:
    budget = config["draft"]["budget"]
    if not isinstance(budget, Mapping):
        return str(budget)
    return str(budget["tokens"] if budget["kind"] == "fixed" else budget["kind"])


def _labels(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """The name of the draft, what of the pair and the place is not common to all, and no more keys than tell apart."""
    common = [key for key in NAMES if len({setting.get(key) for setting in settings}) > 1]
    words = [[setting["draft.name"], *(setting[key] for key in common)] for setting in settings]
    keys = sorted({key for setting in settings for key in setting} - {*NAMES, "draft.name"})
    for key in keys:
        alike: dict[tuple[str, ...], set[str | None]] = defaultdict(set)
        for said, setting in zip(words, settings, strict=True):
            alike[tuple(said)].add(setting.get(key))
        for said, setting in zip(words, settings, strict=True):
            if len(alike[tuple(said)]) > 1:
                said.append(f"{_short(key)}={setting.get(key, 'null')}")
    return [", ".join(said) for said in words]


def _short(key: str) -> str:
    return key.removeprefix("draft.").removeprefix("sampling.")


def _shown(value: Any) -> str:
    if isinstance(value, str) and value.startswith("duoexp."):
        return value.rpartition(".")[2]
    return "null" if value is None else str(value)


def _flat(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(config, Mapping):
        yield path, config
        return
    for key, value in config.items():
        yield from _flat(value, f"{path}.{key}" if path else str(key))


def _shared(group: Sequence[Method]) -> str:
    words = [method.label.split(", ") for method in group]
    return ", ".join(word for word in words[0] if all(word in others for others in words))
