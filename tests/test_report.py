"""Reports: which runs count, which of them are one method, what stands out, and that a page needs nothing beside it."""

import csv
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from duoexp.config import InputError
from duoexp.report import figures, methods, page, runs, tables, texts, timeline
from duoexp.report.__main__ import main
from duoexp.report.compare import speedups

WORDS = ("The", " sky", " is", " <b>blue", " & wide", ".")


def made(folder: Path, draft: str = "vanilla", faster: float = 2.0, prompts: int = 6, **changes: Any) -> Path:
    """The folder of a run whose every answer has six tokens in three passes, `faster` times as fast as its baseline.

    changes: of its config, by dotted keys with __ for dots, or of its summary, with a leading `summary__`.
    """
    folder.mkdir(parents=True)
    config = OmegaConf.create({"name": "study", "output_dir": "o", "model": {"name": "tiny"}, "task": {"name": "mini"}})
    config.draft = {"name": draft, "budget": 2, "policy": None, "drafter": {"_target_": "duoexp.drafters.ModelDrafter"}}
    config.sampling = {"temperature": 0.0, "seed": 0}
    config.hardware, config.tracker = {"name": "auto"}, {"name": "none"}
    summary: dict[str, Any] = {"status": "finished", "identical": True, "ties": 0, "answers": prompts, "failed": []}
    summary |= {"hardware": {"name": "cpu", "notes": ["a note"]}, "notes": ["a note"], "error": None}
    summary |= {"target_idle": 0.25, "draft_idle": 0.5, "method": draft}
    machine = {"cpu": {"model": "A processor", "cores": [0, 1]}, "gpus": [], "git": {"commit": "c"}}
    for key, value in changes.items():
        if key.startswith("summary__"):
            summary[key.removeprefix("summary__")] = value
        elif key.startswith("machine__"):
            machine["cpu"]["model"] = value  # type: ignore[index]
        else:
            OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(config))
    (folder / "machine.json").write_text(json.dumps(machine))
    (folder / "summary.json").write_text(json.dumps(summary))
    answers, rounds = [], []
    for number in range(prompts):
        kind, seconds = ("qa", "rag")[number % 2], 0.6 * (1 + number / 100)
        row = {"prompt": f"{kind}-{number}", "turn": 0}
        side = {"ids": [1, 2, 3, 4, 5, 6], "text": "".join(WORDS), "reason": "eos", "ttft_s": seconds / 10}
        ours = side | {"duration_s": seconds / faster, "pieces": list(WORDS), "draft_tokens": 5}
        baseline = side | {"duration_s": seconds}
        answers.append(row | {"kind": kind, "prompt_tokens": 30 * (number + 1), "baseline": baseline, "method": ours})
        third = seconds / faster / 3
        for place, (tokens, accepted) in enumerate((([1], 0), ([2, 3, 4], 2), ([5, 6], 1))):
            drafting = draft != "none" and place > 0
            each = {"round": place, "tokens": tokens, "accepted": accepted if drafting else 0, "head": None}
            each |= {"rejected": drafting and accepted < 2, "verified": 2, "drafted": 2 * drafting, "sequences": 1}
            each |= {"start_s": place * third, "verify_s": 0.7 * third, "wait_s": 0.3 * third, "message_s": 0.0}
            steps = [[(place - 0.3) * third, (place - 0.1) * third]]
            rounds.append(row | each | {"spans": steps if drafting else []})
    for name, rows in (("prompts", answers), ("rounds", rounds)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def found(*folders: Path) -> list[methods.Method]:
    return methods.methods(runs.collect(folders)[0])


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes a second."""
    monkeypatch.setattr(figures, "pictures", lambda named: [])


class Page(HTMLParser):
    """What a page says, and what it asks for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.said, self.sources, self.classes = [], [], []
        self.feed(text)

    said: list[str]
    sources: list[str]
    classes: list[str]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [str(value) for name, value in attrs if name in ("src", "href")]
        self.classes += [str(value) for name, value in attrs if name == "class"]

    def handle_data(self, data: str) -> None:
        self.said.append(data)


def test_a_page_needs_nothing_beside_it_and_every_table_and_picture_is_a_file(tmp_path: Path) -> None:
    for draft, faster in (("none", 1.0), ("vanilla", 1.5), ("dynamic", 2.0)):
        made(tmp_path / "in" / draft, draft, faster)
    for budget in (1, 4):
        made(tmp_path / "in" / f"dynamic-{budget}", "dynamic", 1.5, draft__budget=budget)
    made(tmp_path / "in" / "measured", "dynamic", 2.5, draft__budget={"kind": "measured", "tokens": 5})
    out = tmp_path / "out"
    written = page.write([tmp_path / "in"], out)
    shown = Page(written.read_text())
    assert shown.sources and all(source.startswith("data:image/svg+xml;base64,") for source in shown.sources)
    for name in ("overview", "speedup", "throughput", "acceptance", "ttft", "budget"):
        header, *lines = csv.reader((out / f"{name}.csv").open())
        assert lines and all(len(line) == len(header) for line in lines)
        assert (out / f"{name}.md").read_text().count("\n|") > len(found(tmp_path / "in")) / 2
        tex = (out / f"{name}.tex").read_text()
        assert tex.count(r"\\") == tex.count("\n", tex.index(r"\toprule"), tex.index(r"\bottomrule")) - 2
    for name in ("speedups", "efficiency", "acceptance", "budget", "ttft", "timeline"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        ElementTree.parse(out / f"{name}.svg")
    assert "".join(WORDS) in re.sub(r"\n", "", "".join(shown.said)), "the text is shown as it is, its < and & too"
    assert {"drafted", "own"} <= set(shown.classes)


def test_the_same_runs_make_the_same_pictures(tmp_path: Path) -> None:
    made(tmp_path / "in" / "a")
    for out in ("one", "two"):
        page.write([tmp_path / "in"], tmp_path / out)
    for file in (tmp_path / "one").glob("*.svg"):
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


def test_who_wrote_each_token(tmp_path: Path) -> None:
    [run], _ = runs.collect([made(tmp_path / "a")])
    pieces = texts.Text("", run.answers[0]).pieces
    assert pieces == [("The", False), (" sky is", True), (" <b>blue", False), (" & wide", True), (".", False)]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"summary__status": "interrupted"}, "interrupted after 6 answers"),
        ({"summary__status": "failed", "summary__error": "no memory"}, "failed: no memory"),
        ({"summary__identical": False}, "not the target's own"),
        ({"prompts": 0}, "none of its prompts could be run"),
    ],
)
@pytest.mark.usefixtures("no_pictures")
# E12
# E12
def test_a_run_that_does_not_stand_is_left_out_and_told(tmp_path: Path, fault: dict[str, Any], reason: str) -> None:
    made(tmp_path / "good")
    made(tmp_path / "bad", **fault)
    text = page.write([tmp_path], tmp_path / "out").read_text()
    assert reason in "".join(Page(text).said).replace("&#39;", "'") and "1 runs are left out" in text


def test_a_run_that_was_killed_is_left_out_and_told(tmp_path: Path) -> None:
    (made(tmp_path / "killed") / "summary.json").unlink()
    (made(tmp_path / "torn") / "prompts.jsonl").write_text('{"prompt": "a", "tu')
    (made(tmp_path / "old") / "summary.json").write_text('{"status": "finished"}')
    _, left_out = runs.collect([tmp_path])
    said = {each.folder.name: each.reason for each in left_out}
    assert "did not come to its end; 6 answers" in said["killed"]
    assert "line 1 of prompts.jsonl is no JSON" in said["torn"] and "its summary has no identical" in said["old"]
    with pytest.raises(InputError, match=r"no run can be reported: .*killed: did not come to its end"):
        page.write([tmp_path / "killed"], tmp_path / "out")


def test_a_trackers_copy_of_a_run_is_no_run(tmp_path: Path) -> None:
    made(made(tmp_path / "a") / "wandb" / "copy")
    assert len(runs.collect([tmp_path, tmp_path / "a"])[0]) == 1


@pytest.mark.parametrize(("name", "cause"), [("missing", "is not a folder"), ("empty", "holds no run")])
def test_a_folder_without_runs_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, cause: str
) -> None:
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert cause in error and name in error and error.count("\n") == 1


@pytest.mark.usefixtures("no_pictures")
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "a")
    assert main([str(tmp_path), "--out", "/dev/null/report"]) == 2
    assert "cannot be written to /dev/null/report" in capsys.readouterr().err


@pytest.mark.usefixtures("no_pictures")
def test_the_report_of_a_folder_lies_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "a")
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report" / "report.html")
    assert main([str(tmp_path)]) == 0, "a report is no run of the next"


# Which runs are one method


def test_tasks_seeds_and_trackers_make_no_method_and_labels_say_no_more_than_tells_apart(tmp_path: Path) -> None:
    made(tmp_path / "1", "vanilla")
    made(tmp_path / "2", "vanilla", task__name="other", sampling__seed=1, tracker__name="offline", output_dir="p")
    made(tmp_path / "3", "dynamic", draft__budget=2)
    made(tmp_path / "4", "dynamic", draft__budget=4)
    made(tmp_path / "5", "none")
    assert [(method.label, len(method.runs)) for method in found(tmp_path)] == [
        ("none", 1),
        ("vanilla", 2),
        ("dynamic, budget=2", 1),
        ("dynamic, budget=4", 1),
    ]


def test_another_machine_is_another_method_and_a_warning(tmp_path: Path) -> None:  # A9, E6
    made(tmp_path / "1")
    made(tmp_path / "2", machine__cpu="Another")
    assert [method.label for method in found(tmp_path)] == [
        "vanilla, A processor, 2 cores",
        "vanilla, Another, 2 cores",
    ]
    assert "different machines" in " ".join(page.warnings(found(tmp_path)))


def test_other_prompts_and_failed_ones_are_warned_of(tmp_path: Path) -> None:  # E12
    made(tmp_path / "1", "vanilla")
    failed = [{"prompt": "x", "turn": 0, "reason": "long"}]
    made(tmp_path / "2", "dynamic", prompts=4, summary__failed=failed, summary__disturbed=["other programs took 9%"])
    said = " ".join(page.warnings(found(tmp_path)))
    assert "2, dynamic: other programs took 9%" in said
    assert "did not run the same prompts (4 are common" in said and "1 prompts failed" in said
    assert tables.overview(found(tmp_path)).rows[1][1].detail == "1 failed"


# What stands out


def cells(table: tables.Table, column: str) -> list[tables.Cell]:
    return [row[table.columns.index(column)] for row in table.rows]


def test_the_best_and_what_cannot_be_told_from_it_are_bold(tmp_path: Path) -> None:
    folders = [
        made(tmp_path / "a", "vanilla", 2.0),
        made(tmp_path / "b", "pearl", 2.0),
        made(tmp_path / "c", "slow", 1.5),
    ]
    rows = folders[1] / "prompts.jsonl"
    changed = [json.loads(line) for line in rows.read_text().splitlines()]
    for number, row in enumerate(changed):  # faster here, slower there: no difference
        row["method"]["duration_s"] *= 1.1 if number % 2 else 0.9
    rows.write_text("".join(json.dumps(row) + "\n" for row in changed))
    assert [cell.bold for cell in cells(tables.speedup(found(tmp_path)), "all")] == [True, True, False]


def test_few_prompts_have_no_interval_and_no_ties(tmp_path: Path) -> None:
    made(tmp_path / "a", "vanilla", 2.0)
    made(tmp_path / "b", "pearl", 1.99)
    shown = cells(tables.speedup(found(tmp_path)), "qa")  # three prompts
    assert [(cell.text, cell.detail, cell.bold) for cell in shown] == [("2.00", "", True), ("1.99", "", False)]


def test_an_interval_that_holds_1_says_that_there_is_no_difference(tmp_path: Path) -> None:  # E5
    made(tmp_path / "a", "none", 1.0)
    [cell] = cells(tables.speedup(found(tmp_path)), "all")
    assert cell.detail == "1.00 to 1.00, no difference"


@pytest.mark.usefixtures("no_pictures")
def test_before_and_after(tmp_path: Path) -> None:
    for when, faster in (("before", 1.5), ("after", 3.0)):
        made(tmp_path / when / "a", "vanilla", faster)
        made(tmp_path / when / "b", "none", 1.0)
    page.write([tmp_path / "after"], tmp_path / "out", [tmp_path / "before"])
    rows = list(csv.DictReader((tmp_path / "out" / "comparison.csv").open()))
    assert [(row["method"], row["task"], float(row["speedup_ratio"])) for row in rows if row["task"] == "all"] == [
        ("none", "all", pytest.approx(1)),
        ("vanilla", "all", pytest.approx(2)),
    ]
    before, after = found(tmp_path / "before"), found(tmp_path / "after")
    shown = cells(tables.comparison(before, after), "speedup, after / before")
    assert shown[2].detail.endswith("no difference") and not shown[2].bold and shown[5].bold
    assert shown[0].detail == "too few prompts"


def test_a_ratio_takes_the_prompts_of_both_sides_alone(tmp_path: Path) -> None:
    [one], [two] = found(made(tmp_path / "a", prompts=6)), found(made(tmp_path / "b", prompts=5, faster=1.0))
    ratio = speedups(one.pairs(), two.pairs())
    assert ratio is not None and ratio.prompts == 5 and ratio.value == pytest.approx(2)
    assert speedups(one.pairs("qa"), two.pairs("rag")) is None


def test_acceptance_by_position_counts_what_was_verified(tmp_path: Path) -> None:  # E3
    table = tables.acceptance(found(made(tmp_path / "a")))
    assert table is not None
    assert [dict(fact) for fact in table.facts] == [
        {"method": "vanilla", "position": 1, "accepted": 12, "tested": 12},
        {"method": "vanilla", "position": 2, "accepted": 6, "tested": 12},
    ]
    assert tables.acceptance(found(made(tmp_path / "b", "none"))) is None


def test_budgets_are_a_curve_and_the_chosen_one_is_on_it(tmp_path: Path) -> None:
    for budget in (1, 2):
        made(tmp_path / str(budget), "dynamic", 1 + budget / 10, draft__budget=budget)
    made(tmp_path / "m", "dynamic", 1.3, draft__budget={"kind": "measured", "tokens": 9})
    [(label, group)] = methods.by_budget(found(tmp_path)).items()
    assert label == "dynamic" and [method.budget for method in group.fixed] == ["1", "2"]
    assert [method.budget for method in group.chosen] == ["measured"]
    picture = figures.budgets(found(tmp_path))
    assert picture is not None and [text.get_text() for text in picture.figure.axes[0].texts] == ["measured"]


def test_a_timeline_shows_both_sides_within_its_window(tmp_path: Path) -> None:
    [method] = found(made(tmp_path / "a"))
    decoding = method.pairs()[0].method
    window = timeline.lanes(decoding, 0.15)
    for bars in (window.verify, window.wait, window.draft):
        assert bars and all(start >= 0 and length > 0 and start + length <= 0.15 + 1e-9 for start, length in bars)
    assert window.tokens == (3, 2) and len(window.verify) == 2


def test_wilson_stays_within_0_and_1() -> None:
    for kept, of in ((0, 3), (3, 3), (5, 10)):
        low, high = figures.wilson(kept, of)
        assert 0 <= low <= kept / of <= high <= 1


def test_text_is_escaped_in_every_form() -> None:
    cell = tables.Cell("a_b & 50% | <i>", bold=True)
    table = tables.Table("t", "A title_1", ("method", "tok/s"), ((cell, tables.Cell("1")),), ({"a": 1},), ("note",))
    assert r"\textbf{a\_b \& 50\% | <i>}" in table.render("table.tex")
    assert r"**a_b & 50% \| \<i>**" in table.render("table.md")
