"""Every method's ids are the autoregressive ids of the same seed, token for token, and these are the model's own."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from conftest import (
    DRAFTS,
    ECHO_PROMPT,
    TEMPERATURES,
    autoregressive,
    composed,
    engine,
    expected,
    fixed,
    inline,
    loaded,
    planned,
    prompt_of,
    target_of,
)
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from duoexp import metrics
from duoexp.budget import Deadline, Fixed
from duoexp.drafters import Drafter, ModelDrafter
from duoexp.engine import Engine, Method
from duoexp.metrics import Decoding
from duoexp.policy import Chain, Dynamic, FixedK
from duoexp.runner import worker_of
from duoexp.sampling import Sampler
from duoexp.schedule import SCHEDULES
from duoexp.tree import Draft
from duoexp.verify import Verdict, match
from duoexp.worker import DraftFailed, Inline, Process

PROMPT = prompt_of(16)
ECHO = ECHO_PROMPT
DRAFT = {name: OmegaConf.to_container(composed(f"draft={name}").draft, resolve=True) for name in DRAFTS}
# One file of each drafter and policy: what files differ in besides, budget and schedule, is a parameter of the tests.
DISTINCT = list({str((draft["drafter"], draft["policy"])): name for name, draft in DRAFT.items()}.values())
GROWN = [
    (name, growth)
    for name in DISTINCT
    for growth in (("batched", "serial") if "growth" in (DRAFT[name]["policy"] or {}) else (None,))
]


def same(ours: Engine, method: Method, prompt: Sequence[int]) -> Decoding:
    """The method's answer, which is the autoregressive one."""
    theirs, found = expected(ours, prompt), ours.decode(method, prompt)
    assert (found.ids, found.reason) == (theirs.ids, theirs.reason)
    assert ours.text(found.ids) == ours.text(theirs.ids)
    return found


def scheduled(name: str, schedule: str, *overrides: str, **sampling: Any) -> Method:
    """The method of a file of conf/draft, on this schedule."""
    return replace(inline(f"draft={name}", *overrides, **sampling), schedule=SCHEDULES[schedule])


def accepted(decoding: Decoding) -> int:
    return sum(ok for _, ok in metrics.tests(decoding.rounds))


# Against transformers


@pytest.mark.parametrize("passes", ("lean", "transformers", "static"))
@pytest.mark.parametrize("length", (1, 3, 16, 17))
def test_autoregressive_equals_transformers_generate(length: int, passes: str) -> None:
    target = target_of(f"model.engine={passes}")
    model = AutoModelForCausalLM.from_pretrained(planned().target.checkpoint.path, dtype=torch.float32)
    ids = torch.tensor([prompt_of(length)])
    settings = {"do_sample": False, "max_new_tokens": 31, "pad_token_id": 258, "attention_mask": torch.ones_like(ids)}
    whole = model.generate(ids, eos_token_id=None, **settings)[0, length:].tolist()
    assert list(engine(target).decode(autoregressive(), ids[0].tolist()).ids) == whole
    eos = whole[7]
    ended = model.generate(ids, eos_token_id=eos, **settings)[0, length:].tolist()
    assert list(engine(target, eos=[eos]).decode(autoregressive(), ids[0].tolist()).ids) == ended


# Every file of conf/draft


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", DRAFTS)
def test_every_method_equals_autoregressive_inline(name: str, schedule: str, temperature: float) -> None:
    method = scheduled(name, schedule, temperature=temperature)
    ours = engine(temperature=temperature)
    found = [same(ours, method, prompt) for prompt in (PROMPT, ECHO)]
    if schedule == DRAFT[name]["schedule"] and name != "none":
        assert any(accepted(each) for each in found), "nothing was accepted, so nothing was tested"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", DISTINCT)
@pytest.mark.parametrize("passes", ("transformers", "static"))
def test_every_method_equals_autoregressive_through_other_engines(passes: str, name: str, schedule: str) -> None:
    """As above, with both models run by transformers, or the target in fixed shapes."""
    setting = f"model.engine={passes}"
    same(engine(target_of(setting)), scheduled(name, schedule, setting), ECHO)


class Switch(Drafter):
    """All methods in one process, as a process takes seconds to start: the prompt's first id says whose turn it is."""

    def __init__(self, drafters: list[tuple[Drafter, Sampler]]) -> None:
        self.drafters = drafters

    def start(self, weights: Any, sampler: Sampler, sampled: bool) -> None:
        lm = weights()
        for drafter, own in self.drafters:
            drafter.start(lambda: lm, own, sampled)

    def propose(self, context: Sequence[int], pending: Draft, budget: int, depth: int | None = None) -> Iterator[Draft]:
        return self.drafters[context[0]][0].propose(context, pending, budget, depth)

    def clear(self) -> None:
        for drafter, _ in self.drafters:
            drafter.clear()


def started(drafter: Drafter, weights: Any) -> Drafter:
    drafter.start(weights, Sampler(), sampled=False)
    return drafter


def placed() -> Any:
    from contextlib import nullcontext

    torch.set_num_threads(1)
    return nullcontext()


PLACES = [(name, temperature) for name in DRAFTS for temperature in TEMPERATURES]


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    drafters = [(deepcopy(planned(f"draft={name}").drafter), Sampler(temperature)) for name, temperature in PLACES]
    draft = planned("draft=vanilla").draft
    weights = partial(loaded, draft)
    worker = Process(partial(started, Switch(drafters), weights), placed, draft.tokens)
    worker.ready()
    yield worker
    worker.close()


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", DRAFTS)
def test_every_method_equals_autoregressive_in_a_process(  # A4
    name: str, schedule: str, temperature: float, process: Process
) -> None:
    method = Method(SCHEDULES[schedule], process, match, fixed(planned(f"draft={name}").config.draft.budget))
    place = PLACES.index((name, temperature))
    ours = engine(temperature=temperature)
    found = same(ours, method, [place, *ECHO[1:]])
    assert name == "none" or found.draft_tokens, "nothing was drafted, so nothing was tested"


@pytest.mark.parametrize("name", ("single", "dynamic"))
def test_a_draft_that_ends_with_the_pass_equals_autoregressive(name: str, process: Process) -> None:
    found = same(
        engine(), Method(SCHEDULES["overlapped"], process, match, Deadline(8)), [PLACES.index((name, 0)), *ECHO[1:]]
    )
    assert all(each.wait_s < 1 and each.budget <= 8 for each in found.rounds)


@pytest.mark.parametrize("budget", (0, 1, 2, 7, 16, 24))
@pytest.mark.parametrize(("name", "growth"), GROWN)
def test_any_budget_equals_autoregressive(name: str, growth: str | None, budget: int) -> None:  # A6
    grown = [] if growth is None else [f"draft.policy.growth={growth}"]
    for schedule in SCHEDULES:
        method = replace(scheduled(name, schedule, *grown), budget=Fixed(budget))
        found = same(engine(), method, ECHO)
        assert max(each.verified for each in found.rounds) <= budget
        assert found.draft_tokens == 0 if budget == 0 else found.draft_tokens > 0 or name == "none"


@pytest.mark.parametrize("limit", (1, 2, 31))
@pytest.mark.parametrize("name", DISTINCT)
def test_an_answer_has_exactly_the_tokens_of_the_limit(name: str, limit: int) -> None:  # B2
    for schedule in SCHEDULES:
        method = replace(scheduled(name, schedule), budget=Fixed(16))
        found = same(engine(limit=limit), method, ECHO)
        assert (len(found.ids), found.reason) == (limit, "length")
        assert sum(len(each.tokens) for each in found.rounds) == limit
        assert max(each.verified for each in found.rounds) < limit, "the draft is shortened near the end"


@pytest.mark.parametrize("length", (1, 3, 16, 17))
@pytest.mark.parametrize("name", DISTINCT)
def test_prompts_of_any_length_equal_autoregressive(name: str, length: int) -> None:  # B4
    for schedule in SCHEDULES:
        same(engine(), scheduled(name, schedule), prompt_of(length, seed=1))


@pytest.mark.parametrize(("top_k", "top_p"), ((5, 1.0), (0, 0.7), (20, 0.9), (1, 1.0)))
@pytest.mark.parametrize("name", DISTINCT)
def test_filtered_sampling_equals_autoregressive(name: str, top_k: int, top_p: float) -> None:
    sampling = {"temperature": 0.8, "top_k": top_k, "top_p": top_p, "seed": 3}
    same(engine(**sampling), inline(f"draft={name}", **sampling), ECHO)


@pytest.mark.parametrize("name", DISTINCT)
def test_an_answer_and_its_rounds_do_not_depend_on_the_prompts_before(name: str) -> None:  # A7
    method, facts = scheduled(name, "serial"), []
    for prompts in ((ECHO,), (PROMPT, ECHO)):
        rounds = [engine().decode(method, prompt) for prompt in prompts][-1].rounds
        facts.append([(each.tokens, each.verified, each.drafted, each.sequences) for each in rounds])
    assert facts[0] == facts[1]


def test_a_seed_gives_its_own_text_and_gives_it_again() -> None:  # A4
    texts = [engine(temperature=0.8, seed=seed).decode(autoregressive(), PROMPT).ids for seed in (7, 7, 8, 9)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


# Where an answer ends


class Spy:
    """Remembers what the rule saw and what the worker answered."""

    def __init__(self, name: str, schedule: str, temperature: float) -> None:
        self.seen: list[tuple[Draft, Verdict]] = []
        self.method = replace(scheduled(name, schedule, temperature=temperature), rule=self.rule, budget=Fixed(12))

    def rule(self, draft: Draft, logits: torch.Tensor, sampler: Sampler, position: int) -> Verdict:
        verdict = match(draft, logits, sampler, position)
        self.seen.append((draft, verdict))
        return verdict


def first_at(ids: Sequence[int], places: Iterator[int]) -> int:
    """The first of the places whose id stands nowhere before it."""
    return next(place for place in places if ids.index(ids[place]) == place)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", DISTINCT)
def test_eos_first_and_last_end_the_answer(name: str, schedule: str, temperature: float) -> None:  # B1
    method = scheduled(name, schedule, temperature=temperature)
    ids = expected(engine(temperature=temperature), PROMPT).ids
    first = same(engine(eos=[ids[0]], temperature=temperature), method, PROMPT)
    assert (first.ids, first.reason) == (ids[:1], "eos")
    last = first_at(ids, iter(range(30, 0, -1)))
    found = same(engine(eos=[ids[last]], limit=last + 1, temperature=temperature), method, PROMPT)
    assert (found.ids, found.reason) == (ids[: last + 1], "eos")


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ("vanilla", "fixed", "dynamic"))
def test_eos_in_the_middle_of_a_block_ends_the_answer(name: str, schedule: str, temperature: float) -> None:  # B1
    spy = Spy(name, schedule, temperature)
    for prompt in (prompt_of(16, seed) for seed in range(20)):
        spy.seen.clear()
        whole = engine(temperature=temperature).decode(spy.method, prompt)
        middle = [
            start + 1
            for start, each in zip(starts(whole), whole.rounds, strict=True)
            if len(each.tokens) > 3 and whole.ids.index(each.tokens[1]) == start + 1
        ]
        if middle:
            break
    found = same(engine(eos=[whole.ids[middle[0]]], temperature=temperature), spy.method, prompt)
    assert (found.ids, found.reason) == (whole.ids[: middle[0] + 1], "eos")
    last, verdict = found.rounds[-1], spy.seen[-1][1]
    assert len(last.tokens) == last.accepted == 2 < verdict.accepted, "the block went on behind the EOS"
    assert not last.rejected


def starts(decoding: Decoding) -> list[int]:
    """Where in the answer each round begins."""
    places, place = [], 0
    for each in decoding.rounds:
        places.append(place)
        place += len(each.tokens)
    return places


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", ("fixed", "dynamic"))
def test_eos_in_a_sequence_that_is_not_the_first_ends_the_answer(name: str, temperature: float) -> None:  # B1
    spy = Spy(name, "serial", temperature)
    for prompt in (prompt_of(16, seed) for seed in range(40)):
        spy.seen.clear()
        whole = engine(temperature=temperature).decode(spy.method, prompt)
        rivals = [
            start
            for start, (draft, verdict) in zip(starts(whole), spy.seen, strict=True)
            if verdict.node >= 0
            and draft.path(verdict.node)[0] != 0
            and start < len(whole.ids)
            and whole.ids.index(whole.ids[start]) == start
        ]
        if rivals:
            break
    found = same(engine(eos=[whole.ids[rivals[0]]], temperature=temperature), spy.method, prompt)
    assert (found.ids, found.reason) == (whole.ids[: rivals[0] + 1], "eos")
    assert len(found.rounds[-1].tokens) == 1 == found.rounds[-1].accepted


@pytest.mark.parametrize("name", ("fixed", "dynamic"))
def test_eos_behind_a_chosen_sequence_that_is_not_the_first_ends_the_answer(name: str) -> None:
    """Overlapped: the target's own token selects the sequence, and the EOS stands in what hangs below it."""
    spy = Spy(name, "overlapped", 0.0)
    answers: list[Draft] = []

    class Listening(Inline):
        def answer(self, at_least: int | None = None) -> Draft:
            answers.append(super().answer(at_least))
            return answers[-1]

    assert isinstance(spy.method.worker, Inline)
    method = replace(spy.method, worker=Listening(spy.method.worker.drafter, 259))
    for prompt in (prompt_of(16, seed) for seed in range(60)):
        spy.seen.clear(), answers.clear()
        whole = engine(limit=60).decode(method, prompt)
        rivals = [
            start
            for start, (_, before), (_, verdict), ahead in zip(
                starts(whole)[1:], spy.seen, spy.seen[1:], answers, strict=False
            )
            if (node := ahead.find(before.tokens)) is not None
            and ahead.children(ahead.parents[node])[0] != node
            and verdict.accepted
            and whole.ids.index(whole.ids[start]) == start
        ]
        if rivals:
            break
    found = same(engine(eos=[whole.ids[rivals[0]]], limit=60), method, prompt)
    assert (found.ids, found.reason) == (whole.ids[: rivals[0] + 1], "eos")
    assert found.rounds[-1].head and len(found.rounds[-1].tokens) == 1 == found.rounds[-1].accepted


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ("vanilla", "fixed", "dynamic"))
def test_a_stop_string_of_two_tokens_in_mid_block_ends_the_answer(name: str, schedule: str) -> None:  # B5
    spy = Spy(name, schedule, 0.8)
    for prompt in (prompt_of(16, seed) for seed in range(200)):
        whole = engine(temperature=0.8).decode(spy.method, prompt)
        places = [
            start + i
            for start, each in zip(starts(whole), whole.rounds, strict=True)
            for i in range(len(each.tokens) - 2)
            if max(each.tokens[i : i + 2]) < 128
        ]
        text = bytes(token for token in whole.ids if token < 256)
        words = {place: bytes(whole.ids[place : place + 2]) for place in places}
        places = [place for place in places if text.index(words[place]) == place and max(whole.ids[:place]) < 256]
        if places:
            break
    ours = engine(temperature=0.8, stop=["never", words[places[0]].decode()])
    found = same(ours, spy.method, prompt)
    assert (found.ids, found.reason) == (whole.ids[: places[0] + 2], "stop")
    assert ours.text(found.ids) == ours.text(whole.ids[: places[0]])
    assert len(found.rounds[-1].tokens) == found.rounds[-1].accepted, "the block went on behind the stop string"


# Drafts of all sorts


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("policy", (Chain(), FixedK(3), Dynamic()))
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_target_as_its_own_draft_is_always_accepted(temperature: float, policy: Any, schedule: str) -> None:
    drafter = ModelDrafter(policy)
    drafter.start(lambda: loaded(planned().target), Sampler(temperature), sampled=False)
    found = same(
        engine(temperature=temperature), Method(SCHEDULES[schedule], Inline(drafter, 259), match, Fixed(6)), PROMPT
    )
    if schedule == "overlapped" or isinstance(policy, Chain):
        assert metrics.acceptance_rate(found.rounds) == 1
    else:  # the other sequences are rejected by rights, the first one never
        assert all(ok for position, ok in metrics.tests(found.rounds) if position == 1)


def random_draft(settings: str, temperature: float = 0.0, policy: Any = None, engine: str = "auto") -> ModelDrafter:
    from duoexp.lm.load import describe
    from duoexp.lm.sources import resolve

    model = describe(settings, resolve(settings))
    drafter = ModelDrafter(policy or Chain())
    drafter.start(lambda: loaded(model, engine), Sampler(temperature), sampled=False)
    return drafter


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("policy", (Chain(), FixedK(3), Dynamic()))
def test_a_draft_with_a_shorter_context_stops_and_the_output_goes_on(policy: Any, schedule: str) -> None:  # C6
    drafter = random_draft("random:context=24,noise=0.2", policy=policy)
    found = same(engine(), Method(SCHEDULES[schedule], Inline(drafter, 259), match, Fixed(4)), PROMPT)
    late = [each for start, each in zip(starts(found), found.rounds, strict=True) if start > 12]
    assert found.draft_tokens > 0
    assert late and not any(each.drafted or each.verified for each in late)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_padded_rows_of_either_model_are_never_said(temperature: float) -> None:  # B6, D1
    drafter = random_draft("random:extra_rows=7,noise=0.2", temperature, engine="transformers")
    target = target_of("model.engine=transformers", 'model.target="random:extra_rows=5"')
    for lm in (drafter.lm, target):
        with torch.no_grad():
            lm.model.lm_head.weight[259:] *= 100  # left alone, a padded row would win every other token
    padded = engine(target, limit=60, temperature=temperature)
    found = same(padded, Method(SCHEDULES["overlapped"], Inline(drafter, 259), match, Fixed(4)), PROMPT)
    assert max(found.ids) < 259 and target.logits([256]).shape == (1, 259)
    assert accepted(found)


class Strange(Drafter):
    """Proposes an id that no vocabulary has."""

    def propose(self, context: Sequence[int], pending: Draft, budget: int, depth: int | None = None) -> Iterator[Draft]:
        if budget:
            yield pending.hang(pending.tip(), Draft((5, 259), (-1, 0)))


def test_an_id_beyond_the_vocabulary_is_the_drafters_failure() -> None:
    worker = worker_of(replace(planned("draft=prompt_lookup"), drafter=Strange()))
    with pytest.raises(DraftFailed, match=r"id 259.* 259 ids"):
        engine().decode(Method(SCHEDULES["serial"], worker, match, Fixed(4)), PROMPT)
