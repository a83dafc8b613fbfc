"""Where the time of a round goes, behind a short and a long context: `python benchmarks/overhead.py draft=single`.

Overhead is what is neither a pass of the target nor a wait for the draft model. The bar for it is 2% of a target pass
or 0.5 ms a round, whichever is larger, at every context length.
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from statistics import median
from typing import Any

import hydra
import psutil
from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from duoexp import terminal
from duoexp.config import CONF, register
from duoexp.distill.__main__ import end, told
from duoexp.rounds import Round

CONTEXTS, TOKENS = (64, 2000), 96
SHARE, LEAST_S = 0.02, 0.0005  # of the bar
DRAWN, COLUMNS = 5, 100  # rounds of a timeline, and its width

register()


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def launch(cfg: DictConfig) -> None:
    told(lambda: benchmark(cfg))


def benchmark(cfg: DictConfig) -> None:
    from duoexp import runner
    from duoexp.summary import Results

    OmegaConf.update(cfg, "sampling.ignore_eos", True)
    plan, shown, texts = runner.prepare(cfg, CONF / "hardware"), terminal.console(), random.Random(0)
    contexts = [each for each in CONTEXTS if each + 2 * TOKENS <= plan.setting.context_size]
    prompts = [[texts.randrange(plan.vocabulary) for _ in range(context)] for context in contexts]
    with runner.ready(plan, Results()) as (engine, _, method):
        found = [split(engine, method, prompt) for prompt in prompts]
    steps = [draft_step(plan, prompt) for prompt in prompts] if plan.draft else []
    table = Table(title=f"draft={plan.config.draft.name}: medians, in ms unless it says %", title_justify="left")
    for name in ("", *(f"behind {context} tokens" for context in contexts)):
        table.add_column(name, justify="right" if name else "left")
    for name in found[0][0]:
        table.add_row(name, *(parts[name] for parts, _ in found))
    for name in steps[0] if steps else ():
        table.add_row(name, *(parts[name] for parts in steps))
    shown.print(table)
    for context, (_, drawn) in zip(contexts, found, strict=True):
        shown.print(f"behind {context} tokens; T: the target's pass, D: a draft step", drawn, sep="\n", markup=False)


def split(engine: Any, method: Any, prompt: list[int]) -> tuple[dict[str, str], str]:
    """The parts of a round, and the first rounds as a timeline."""
    engine.decode(method, prompt, TOKENS)  # the buffers for so long a text are there now
    spent: dict[str, float] = defaultdict(float)
    held, process = psutil.Process().memory_info().rss, psutil.Process()
    rounds, parts = [], []
    watched = replace(
        method, rule=timed(method.rule, "verify", spent), schedule=noting(method.schedule, rounds, parts, spent)
    )
    target = engine.target
    target.run, target.logits = timed(target.run, "run", spent), timed(target.logits, "logits", spent)
    try:
        engine.decode(watched, prompt, TOKENS)
    finally:
        del target.run, target.logits
    grown = process.memory_info().rss - held
    return _table(rounds, parts, grown), _timeline(rounds[2 : 2 + DRAWN + 1])


def timed(call: Callable[..., Any], name: str, spent: dict[str, float]) -> Callable[..., Any]:
    """The same call, which adds its seconds to `spent`."""

    def watched(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        result = call(*args, **kwargs)
        spent[name] += time.perf_counter() - begun
        return result

    return watched


def noting(
    schedule: Callable[..., Any], rounds: list[Round], parts: list[dict[str, float]], spent: dict[str, float]
) -> Callable[..., Any]:
    """The same schedule; each round is kept, with what was spent in its pass."""

    def watched(*args: Any) -> Any:
        for each in schedule(*args):
            rounds.append(each)
            parts.append(dict(spent))
            spent.clear()
            yield each

    return watched


def _table(rounds: Sequence[Round], parts: Sequence[dict[str, float]], grown: int) -> dict[str, str]:
    """All rounds but the first, which reads the prompt, and the last, after which nothing is asked."""
    rows, periods, overheads = [], [], []
    for each, after, spent in list(zip(rounds, rounds[1:], parts, strict=False))[1:]:
        whole = after.start_s - each.start_s
        waited = after.wait_s - after.message_s
        row = {
            "target pass": spent["run"],
            "wait for the draft": waited,
            "message": after.message_s,
            "cache": spent["logits"] - spent["run"],
            "verify": spent["verify"],
        }
        row["bookkeeping"] = whole - sum(row.values())
        rows.append(row)
        periods.append(whole)
        overheads.append(whole - row["target pass"] - waited)
    spans = [end - start for each in rounds for start, end in each.spans]
    found = {name: _ms([row[name] for row in rows]) for name in rows[0]}
    passes = median(row["target pass"] for row in rows)
    busy = sum(min(end, rounds[-1].start_s) - start for each in rounds[1:] for start, end in each.spans)
    return found | {
        "round": _ms(periods),
        "draft step": _ms(spans) if spans else "-",
        "overhead": _ms(overheads),
        "bar for it": _ms([max(SHARE * passes, LEAST_S)]),
        "target idle, %": f"{100 * sum(row['wait for the draft'] for row in rows) / sum(periods):.0f}",
        "draft idle, %": f"{100 * max(0.0, 1 - busy / sum(periods)):.0f}",
        "memory grown, KiB a token": f"{grown / 1024 / TOKENS:.1f}",
    }


def draft_step(plan: Any, prompt: list[int]) -> dict[str, str]:
    """A step of the drafter in this process: the model's pass, and all else."""
    from duoexp.hardware import placed
    from duoexp.lm.load import for_draft, load
    from duoexp.tree import Draft
    from duoexp.worker import Inline

    place, spent, drafter = plan.hardware.draft, defaultdict[str, float](float), deepcopy(plan.drafter)
    with placed(place):
        engine = for_draft(plan.config.model.engine, place.device)
        lm = load(plan.draft, engine, place.device, place.dtype, plan.vocabulary)
        passes: list[float] = []
        run = lm.run

        def watched(*args: Any, **kwargs: Any) -> Any:
            spent.clear()
            result = timed(run, "run", spent)(*args, **kwargs)
            passes.append(spent["run"])
            return result

        lm.run = watched  # type: ignore[method-assign]
        drafter.start(lambda: lm, plan.sampler, False)
        worker = Inline(drafter, plan.target.tokens)
        for _ in range(TOKENS // 8):
            worker.ask(prompt, Draft(), 8)
            worker.answer()
        spans = [end - start for start, end in worker.work().spans]
        rest = [span - inside for span, inside in zip(spans, passes, strict=False)][8:]
    return {"draft step in this process": _ms(spans[8:]), "of it outside the pass": _ms(rest)}


def _timeline(rounds: Sequence[Round]) -> str:
    """Two lines: when the target was in a pass, and when the drafter was in a step."""
    if len(rounds) < 2:
        return "(too few rounds)"
    begun, ended = rounds[0].start_s, rounds[-1].start_s
    passes = [(each.start_s, each.start_s + each.verify_s) for each in rounds[:-1]]
    lanes = (("T", passes), ("D", [span for each in rounds for span in each.spans]))
    lines = []
    for mark, spans in lanes:
        cells = [" "] * COLUMNS
        for number, span in enumerate(spans):
            first, last = (int(COLUMNS * (at - begun) / (ended - begun)) for at in span)
            for cell in range(max(0, first), min(COLUMNS, max(last, first + 1))):
                cells[cell] = mark if number % 2 else mark.lower()
        lines.append("".join(cells))
    return "\n".join(f"|{line}|" for line in lines) + f"  {1000 * (ended - begun):.1f} ms"


def _ms(seconds: Sequence[float]) -> str:
    return f"{1000 * median(seconds):.2f}"


if __name__ == "__main__":
    end(launch)
