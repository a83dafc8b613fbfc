"""The recipe that makes a draft, on a tiny target of random weights."""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import Tensor
from transformers import CohereConfig, GPTNeoXConfig

from duoexp import tasks
from duoexp.__main__ import CONF
from duoexp.config import InputError
from duoexp.distill import __main__ as entry
from duoexp.distill import data, divergence, export, files, hints, measure, recipe, settings, student
from duoexp.lm import distilled, linears, load, sources
from duoexp.lm.copying import Copier, key
from duoexp.lm.tokenizer import tokenizer_hash
from duoexp.tree import Draft

SMALL = (
    "model=tiny", "dtype=float32", "data.chats=96", "data.batch=32", "data.beginnings=['']", "data.held_out=0.1",
    "data.question_tokens=8", "data.answer_tokens=32", "student.layers=[0]", "student.head=200", "train.steps=240",
    "train.tokens=512", "train.teacher=16", "train.lr=3e-3", "train.warmup=10", "train.average=0.9",
    "train.save_every=20", "train.measure_every=80",
)  # fmt: skip


def composed(folder: Path, *overrides: str) -> Any:
    settings.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("distill", [*SMALL, f"folder={folder}", *overrides])


def distil(folder: Path, *overrides: str) -> Path:
    return recipe.run(composed(folder, *overrides), "a test")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    distil(folder)
    return folder


def target() -> load.Model:
    source = "random:context=2048"
    return load.describe(source, sources.resolve(source))


def draft_logits(folder: Path, tokens: list[int]) -> Tensor:
    place = target()
    return distilled.load_draft(folder, place.checkpoint.path, place.tokens, torch.float32).logits(tokens)[0]


def test_acceptance_rises(made: Path) -> None:
    result = json.loads((made / "result.json").read_text())
    assert result["held_out_acceptance"] > result["held_out_acceptance_before"] + 0.05


def test_the_export_says_what_the_student_says(made: Path) -> None:
    tokens = [256, *range(60, 100)]
    expected = said_in_memory(made, tokens)
    said = draft_logits(made / "draft", tokens).log_softmax(-1)
    # int8 a row: half a step of each weight, 1/254 of the row's largest, in every matrix
    assert (said.exp() - expected.exp()).abs().sum() < 0.1
    assert torch.equal(torch.isfinite(said), torch.isfinite(expected))


def test_an_unrounded_export_is_exact(made: Path, tmp_path: Path) -> None:
    place, known = target(), copier(made)
    count = len(known.phrases.keys) if known.phrases else 0
    about = distilled.About(tokenizer_hash(place.tokenizer), (0,), 200, None, known.seen.longest, count)
    export.export(tmp_path, trained(made), known.phrases, place.config.to_dict(), about, "")
    for tokens in ([256, *range(60, 100)], [256, 60, 61, 62, 63, 60, 61, 62]):
        expected = said_in_memory(made, tokens)
        torch.testing.assert_close(draft_logits(tmp_path, tokens).log_softmax(-1), expected, rtol=1e-3, atol=1e-3)


def test_a_draft_of_layers_alone_is_exported_and_loaded(tmp_path: Path) -> None:
    draft = distil(tmp_path, "student.match=0", "student.phrases=0", "train.steps=2", "data.chats=32")
    assert torch.isfinite(draft_logits(draft, [256, 60, 61])).sum() == 200


def said_in_memory(folder: Path, tokens: list[int]) -> Tensor:
    """[vocabulary]: log-probabilities of the run's student for the next token."""
    pupil, place = trained(folder), target()
    found = list(copier(folder).along(tokens))[-1]
    with torch.no_grad():
        hidden = pupil(torch.tensor([tokens]))[0, -1:]
        gates = pupil.gated(hidden, torch.tensor([[kind for _, kind in found]]))[0].exp()
        probs = torch.zeros(place.tokens)
        probs[pupil.ids] = (pupil.rows @ hidden[0]).softmax(-1)
    for (token, kind), gate in zip(found, gates, strict=True):
        if kind >= 0:
            probs[token] += gate
    return (probs / probs.sum()).log()


def texts_of(folder: Path) -> data.Texts:
    return data.Texts(**files.read_arrays(folder / "texts.npz"))


def copier(folder: Path) -> Copier:
    texts = texts_of(folder)
    return Copier(8, hints.phrases(texts, recipe._split(len(texts), 0.1)[1], 200_000))


def trained(folder: Path) -> student.Student:
    """The run's student in memory, from its checkpoint."""
    place = target()
    weights = load.load(place, "transformers", "cpu", "float32", place.tokens).model
    counts = torch.from_numpy(np.bincount(texts_of(folder).tokens, minlength=place.tokens))
    pupil = student.grow(weights, [0], student.head(counts, 200), copier(folder).kinds)
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    with torch.no_grad():
        for name, weight in pupil.trained().items():
            weight.copy_(state["average"][name])
    return pupil


def test_found_tokens_are_those_behind_the_longest_and_latest_match() -> None:
    random = np.random.default_rng(0)
    text = random.integers(0, 4, 200).tolist()
    for i, (found, _) in enumerate(Copier(5, None).along(text), start=1):
        expected = (-1, -1)
        for n in range(1, 6):
            ends = [j for j in range(n, i) if text[j - n : j] == text[i - n : i]]
            expected = (text[ends[-1]], n - 1) if ends else expected
        assert found == expected


def test_a_draft_is_read_as_the_end_of_its_context(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied behind a node is what is copied behind the same tokens as context, where no match lies in them."""
    monkeypatch.setattr(linears, "multiplies_int8", lambda: False)  # in 8 bits activations of few tokens share a scale
    place = target()
    draft = distilled.load_draft(made / "draft", place.checkpoint.path, place.tokens, torch.float32)
    context, tail = [256, *range(60, 100), 60, 61], [62, 63]
    nodes = draft.logits(context, Draft((62, 63, 70), (-1, 0, 0)))
    for row, drafted in ((0, []), (1, tail[:1]), (2, tail)):
        draft.clear()
        alone = draft.logits([*context, *drafted])[0]
        torch.testing.assert_close(nodes[row], alone, rtol=0.02, atol=0.05)


def test_phrases_are_the_commonest_ends_of_their_beginnings(made: Path) -> None:
    texts = texts_of(made)
    known = hints.phrases(texts, range(len(texts)), 10**6)
    held = dict(zip(known.keys.tolist(), zip(known.tokens.tolist(), known.kinds.tolist(), strict=True), strict=True))
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for n in range(len(texts)):
        text = texts[n].tolist()
        for size in (2, 3, 4):
            for i in range(size, len(text)):
                counts[tuple(text[i - size : i])][text[i]] += 1
    frequent = {begun: ends for begun, ends in counts.items() if max(ends.values()) > 1}
    assert len(held) == len(frequent) > 100
    for begun, ends in frequent.items():
        end, kind = held[key(begun)]
        share = ends[end] / ends.total()
        assert ends[end] == max(ends.values())
        assert kind == 3 * (4 - len(begun)) + (share >= 0.5) + (share >= 0.9)


def test_no_text_is_hinted_at_by_its_own_phrases(made: Path, tmp_path: Path) -> None:
    """Two texts that repeat themselves in words of their own: of those no phrase may be known."""
    rows = [([256, *range(start, start + 20), *range(start, start + 20)], 0) for start in (10, 40, 70, 100)]
    texts = data.Texts.of(rows)
    found = hints.make(tmp_path / "hints.npz", texts, [0, 1, 2], 0, 1000, iter)
    assert all((hint.kinds[:, 1] < 0).all() for hint in found.values())


@pytest.mark.parametrize("kind", ["teacher", "text"])
def test_resumption_equals_an_unbroken_run(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how = ["train.steps=12", "train.save_every=5", "train.measure_every=6", "data.chats=32"]
    how += ["train.teacher=0", "train.negatives=20"] if kind == "text" else ["train.on_policy=0.5", "train.teacher=8"]
    distil(tmp_path / "whole", *how)
    stop_after(monkeypatch, 7)
    with pytest.raises(KeyboardInterrupt):
        distil(tmp_path / "broken", *how)
    monkeypatch.undo()
    distil(tmp_path / "broken", *how)
    whole, broken = (torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "broken"))
    assert whole["curve"][-1]["acceptance"] == broken["curve"][-1]["acceptance"]
    for name, weight in whole["average"].items():
        torch.testing.assert_close(weight, broken["average"][name], rtol=1e-6, atol=1e-6)


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    real, left = divergence.step, iter(range(steps))

    def step(*args: Any) -> tuple[float, int]:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(divergence, "step", step)


def test_a_finished_run_does_nothing_again(made: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.rglob("*.npz")}
    distil(made)
    assert before == {path: path.stat().st_mtime_ns for path in made.rglob("*.npz")}


@pytest.mark.parametrize("name", list(divergence.NAMED))
def test_every_divergence_is_least_at_the_target(name: str) -> None:
    p = torch.tensor([[0.7, 0.2, 0.1]])
    there = divergence.NAMED[name](p, p.log())
    for q in ([0.6, 0.3, 0.1], [0.1, 0.2, 0.7], [0.3, 0.3, 0.4]):
        assert there < divergence.NAMED[name](p, torch.tensor([q]).log())


@pytest.mark.parametrize("name", ["reverse_kl", "jsd", "tvd"])
def test_every_divergence_trains(name: str, tmp_path: Path) -> None:
    distil(tmp_path, f"train.divergence={name}", "train.steps=3", "data.chats=32")


def test_drawn_candidates_give_the_whole_softmax_its_size() -> None:
    """Over many draws the estimated partition function is the true one: within 2 %, where one draw varies by 5 %."""
    generator, size = torch.Generator().manual_seed(0), 1000
    logits = torch.randn(size, generator=generator)
    goal = divergence.Goal(torch.tensor([[5]]), torch.tensor([[1.0]]))
    copied, sums = torch.tensor([[-1, 700]]), []
    for _ in range(200):
        drawn = divergence.Candidates.drawn(torch.arange(50), goal, copied, size, 200, generator)
        sums.append((logits[drawn.places] + drawn.log_weights).exp().sum())
        assert drawn.places[drawn.among(goal.places, size)] == 5
        assert drawn.among(copied, size)[0, 0] == -1 and drawn.places[drawn.among(copied, size)[0, 1]] == 700
    assert abs(torch.stack(sums).mean() / logits.exp().sum() - 1) < 0.02


def test_texts_of_the_user(tmp_path: Path) -> None:
    plain = tmp_path / "texts.txt"
    plain.write_text("\n\n".join(f"number {i} of the texts that a user has" for i in range(20)))
    how = ["train.steps=2"]
    distil(tmp_path / "txt", f"data.path={plain}", *how)
    lines = tmp_path / "lines.jsonl"
    lines.write_text("\n".join(json.dumps({key: f"{key} {i}"}) for i in range(6) for key in ("text", "prompt")))
    distil(tmp_path / "jsonl", f"data.path={lines}", *how)
    texts = files.read_arrays(tmp_path / "jsonl" / "texts.npz")
    assert len(texts["lengths"]) == 12
    np.savez(tmp_path / "arrays.npz", tokens=texts["tokens"], lengths=texts["lengths"])
    distil(tmp_path / "npz", f"data.path={tmp_path / 'arrays.npz'}", *how)


WRONG: dict[str, tuple[list[str], str]] = {
    "head": (["student.head=5000"], "student.head=5000 is beyond the target's vocabulary of 259 tokens"),
    "layer": (["student.layers=[7]"], r"student.layers=\[7\] are not among the 2 layers"),
    "no layer": (["student.layers=[]"], r"student.layers=\[\] leaves nothing"),
    "divergence": (["train.divergence=l2"], "train.divergence=l2 is unknown; choose forward_kl"),
    "no teacher": (["train.divergence=reverse_kl", "train.teacher=0"], "give train.teacher=32"),
    "negatives": (["train.divergence=tvd", "train.negatives=5"], "goes with divergence=forward_kl alone"),
    "bits": (["student.bits=3"], "student.bits=3 cannot be exported"),
    "range": (["train.steps=0"], "train.steps=0 is out of range"),
    "absent file": (["data.path=nowhere.txt"], "data.path=nowhere.txt cannot be read"),
    "dtype": (["dtype=int7"], "dtype=int7 is unknown"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_wrong_input_is_told_in_a_sentence(case: str, tmp_path: Path) -> None:
    overrides, message = WRONG[case]
    with pytest.raises(InputError, match=message):
        distil(tmp_path, *overrides)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "is empty"),
        ("a.doc", "words", "ends in neither"),
        ("a.jsonl", "{", "line 1 is not JSON"),
        ("a.jsonl", '{"turns": []}', "line 1 holds neither"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}', "no chat"),
        ("a.txt", b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_wrong_files_are_told_in_a_sentence(name: str, content: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message):
        distil(tmp_path / "run", f"data.path={path}")


def test_a_target_without_template_or_bos_needs_a_beginning() -> None:
    class Silent:
        chat_template = bos_token_id = None

        def encode(self, text: str, **_: Any) -> list[int]:
            return list(text.encode())

    frame = recipe.data.Frame.of(Silent(), "auto")  # type: ignore[arg-type]
    assert frame == recipe.data.Frame([], [])
    writer = recipe.data.Writer(None, Silent(), frame, frozenset(), composed(Path("x")).data, 0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="give some words"):
        writer.write(0)


def test_other_settings_in_the_same_folder_are_refused(made: Path) -> None:
    with pytest.raises(InputError, match=r"train.lr=0.003, not 0.5; give that to go on"):
        distil(made, "train.lr=0.5")


def test_a_draft_for_another_tokenizer_is_refused(made: Path, tmp_path: Path) -> None:
    config = json.loads((made / "draft" / "config.json").read_text())
    config["duoexp"]["tokenizer"] = "0" * 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="made for a target with another tokenizer"):
        distilled.load_draft(tmp_path, target().checkpoint.path, 259)


def test_a_draft_for_another_size_is_refused(made: Path) -> None:
    other = sources.resolve("random:hidden=32").path
    with pytest.raises(InputError, match="an embedding of size 64"):
        distilled.load_draft(made / "draft", other, 259)


def test_a_folder_without_a_draft_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no draft"):
        distilled.load_draft(tmp_path, target().checkpoint.path, 259)


def test_an_architecture_without_a_lean_pass_is_named() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16, n_positions=8))
    with pytest.raises(InputError, match="GPT2LMHeadModel"):
        student.grow(model, [0], torch.arange(4), 0)


def test_a_full_disk_is_told_and_leaves_nothing_half(tmp_path: Path) -> None:
    def full(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match=r"No space left on device.*make room"):
        files.write(tmp_path / "a", full)
    assert not list(tmp_path.iterdir())


def test_the_measured_rate_is_that_of_drafting_step_by_step(made: Path, tmp_path: Path) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        how = [f"folder={made / 'draft'}", f"answers={tmp_path / 'answers.json'}", "tokens=8", "dtype=float32"]
        cfg: Any = compose("distill_measure", [*how, "model=tiny", "task.limit=7"])
    lines = list(measure.measure(cfg))
    place = target()
    draft = distilled.load_draft(made / "draft", place.checkpoint.path, place.tokens, torch.float32)
    prompts = [tasks.encode(place.tokenizer, "auto", prompt) for prompt in tasks.load(cfg.task)]
    answers = list(json.loads((tmp_path / "answers.json").read_text()).values())
    rates = []
    for ids, answer in zip(prompts, answers, strict=True):
        said = [int(draft.logits([*ids, *answer[:i]])[0].argmax()) for i in range(len(answer))]
        rates.append(sum(ours == theirs for ours, theirs in zip(said, answer, strict=True)) / len(answer))
    assert lines[7].split() == ["mean", f"{sum(rates) / len(rates):.3f}"]


def test_the_command_makes_a_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    call(monkeypatch, *SMALL, "folder=run", "train.steps=2", "data.chats=32")
    entry.main()
    assert capsys.readouterr().out.strip().endswith(str(Path("run/draft")))
    assert "python -m duoexp.distill model=tiny" in (tmp_path / "run/draft/README.md").read_text()
    call(monkeypatch, *SMALL, "folder=run", "student.head=9999")
    with pytest.raises(SystemExit) as stopped:
        entry.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("error: student.head=9999")


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> Callable[[], None] | None:
    monkeypatch.setattr(sys, "argv", ["distill", *words])
    return None


def test_the_word_distilled_takes_the_packaged_draft_that_fits(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = target()
    with pytest.raises(InputError, match=r"none of the drafts that ship .* fits random"):
        load.describe("distilled", sources.resolve("distilled", place.checkpoint), target=place)
    (tmp_path / "tiny").symlink_to(made / "draft")
    monkeypatch.setattr(sources, "PACKAGED", tmp_path)
    monkeypatch.setattr(load, "PACKAGED", tmp_path)
    found = load.describe("distilled", sources.resolve("distilled", place.checkpoint), target=place)
    assert found.checkpoint.path == str(tmp_path / "tiny") and found.checkpoint.base == place.checkpoint
    with pytest.raises(InputError, match="'distilled' names no model"):
        sources.resolve("distilled")


def test_a_draft_reads_the_revision_that_its_target_names(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, asked = target(), list[tuple[str, Any]]()
    whole = load.stock(place, "cpu", "float32")

    def fetched(name: str, revision: str | None = None, **_: Any) -> Any:
        asked.append((name, revision))
        return whole

    monkeypatch.setattr(distilled.AutoModelForCausalLM, "from_pretrained", fetched)
    pinned = replace(place, checkpoint=sources.resolve("org/name@v1.2"))
    draft = load.describe(str(made / "draft"), sources.resolve(str(made / "draft")), target=pinned)
    load.load(draft, "auto", "cpu", "float32", 259)
    assert asked == [("org/name", "v1.2")]


def test_a_model_of_its_own_is_trained_and_exported(tmp_path: Path) -> None:
    """Any config, from random weights: it learns, and what is exported is an ordinary model that says the same."""
    place = target()
    GPTNeoXConfig(
        vocab_size=place.rows, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    ).save_pretrained(tmp_path / "config")
    how = [f"student.model={tmp_path / 'config'}", "data.chats=32", "train.steps=60", "train.measure_every=10"]
    draft = distil(tmp_path / "run", *how)
    curve = [point["loss"] for point in json.loads((tmp_path / "run/result.json").read_text())["curve"]]
    assert curve[-1] < curve[0] - 0.1
    assert "It is a model of its own" in (draft / "README.md").read_text()
    state = torch.load(tmp_path / "run/checkpoint.pt", weights_only=True)["average"]
    checkpoint = sources.resolve(str(draft))
    loaded: Any = load.load(load.describe(str(draft), checkpoint), "transformers", "cpu", "float32", place.tokens)
    for name, weight in loaded.model.named_parameters():
        torch.testing.assert_close(weight, state[f"model.{name}"])


def test_a_model_of_its_own_goes_on_from_its_weights(tmp_path: Path) -> None:
    source = "random:context=2048"
    draft = distil(tmp_path, f"student.model='{source}'", "data.chats=32", "train.steps=2")
    assert json.loads((tmp_path / "result.json").read_text())["held_out_acceptance_before"] == 1
    assert (draft / "model.safetensors").is_file()


def test_a_model_of_its_own_with_another_vocabulary_or_head_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    GPTNeoXConfig(vocab_size=100, **sizes).save_pretrained(tmp_path / "small")
    with pytest.raises(InputError, match="has 100 tokens, and the target 259"):
        distil(tmp_path / "a", f"student.model={tmp_path / 'small'}", "data.chats=32")
    CohereConfig(vocab_size=target().rows, logit_scale=0.25, pad_token_id=0, **sizes).save_pretrained(
        tmp_path / "scaled"
    )
    with pytest.raises(InputError, match="CohereForCausalLM, whose head does more than multiply"):
        distil(tmp_path / "b", f"student.model={tmp_path / 'scaled'}", "data.chats=32")
