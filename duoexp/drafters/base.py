"""Where draft tokens come from."""

from collections.abc import Callable, Iterator, Sequence

from duoexp.lm.causal_lm import CausalLM
from duoexp.lm.load import Model
from duoexp.sampling import Sampler
from duoexp.tree import Draft
from duoexp.verify import Verdict


class Drafter:
    """Proposes tokens. This one has none to propose, which makes a run autoregressive."""

    needs_model = False
    observes = False  # whether `observe` is to be called

    def prepare(self, target: Model) -> None:
        """Called once, before any weights are read. Raises InputError for a target that it cannot draft for."""

    def start(self, load: Callable[[], CausalLM] | None, sampler: Sampler, sampled: bool) -> None:
        """Called once, in the process where the drafter runs. `load` loads the draft model, for one that needs it.

        sampled: the rule needs tokens drawn from q and q itself, not the target's likeliest token.
        """

    def propose(self, context: Sequence[int], pending: Draft, budget: int, depth: int | None = None) -> Iterator[Draft]:
        """`pending`, which the target is verifying, with up to `budget` more nodes: the draft so far, again and again.

        depth: how many tokens behind the context can be of use, those of `pending` included; None: any number.
        The work can be stopped after any item.
        """
        yield from ()

    def observe(self, draft: Draft, verdict: Verdict, behind: Sequence[int]) -> None:
        """What the target made of a draft: called after each of its passes, before the next question.

        behind: the target's likeliest token behind the context, then behind each node.
        """

    def shape(self, sequences: int | None) -> None:
        """From now on drafts so many sequences; None: as its policy says. Without a policy there is nothing to do."""

    def clear(self) -> None:
        """Forgets the prompt."""
