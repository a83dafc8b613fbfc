"""Prompt lookup where it matches, a draft model elsewhere."""

from collections.abc import Callable, Iterator, Sequence

from duoexp.config import InputError
from duoexp.drafters.base import Drafter
from duoexp.drafters.model import ModelDrafter
from duoexp.drafters.prompt_lookup import PromptLookup
from duoexp.lm.causal_lm import CausalLM
from duoexp.lm.load import Model
from duoexp.policy import Policy
from duoexp.sampling import Sampler
from duoexp.tree import Draft
from duoexp.verify import Verdict


class Hybrid(Drafter):
    """Looks the last words up first, which costs next to nothing and so may fill the whole budget. Where at least
    `min_ngram` of them stand nowhere before, the model drafts, up to `model_budget` tokens.
    """

    needs_model = True

    def __init__(self, policy: Policy, model_budget: int, max_ngram: int, min_ngram: int) -> None:
        if not isinstance(model_budget, int) or model_budget < 0:
            raise InputError(f"draft.drafter.model_budget={model_budget!r} is no number of tokens; give 0 or more")
        self.lookup, self.model = PromptLookup(max_ngram, min_ngram), ModelDrafter(policy)
        self.model_budget, self.observes = model_budget, self.model.observes

    def prepare(self, target: Model) -> None:
        self.lookup.prepare(target)
        self.model.prepare(target)

    def start(self, load: Callable[[], CausalLM] | None, sampler: Sampler, sampled: bool) -> None:
        self.model.start(load, sampler, sampled)

    def propose(self, context: Sequence[int], pending: Draft, budget: int, depth: int | None = None) -> Iterator[Draft]:
        found = False
        for draft in self.lookup.propose(context, pending, budget, depth):
            found = True
            yield draft
        if not found:
            yield from self.model.propose(context, pending, min(budget, self.model_budget), depth)

    def observe(self, draft: Draft, verdict: Verdict, behind: Sequence[int]) -> None:
        self.model.observe(draft, verdict, behind)

    def clear(self) -> None:
        self.lookup.clear()
        self.model.clear()
