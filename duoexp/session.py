"""Loaded models at work: each prompt decoded autoregressively and with the method, and what is measured meanwhile."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from duoexp.baseline import Baseline
from duoexp.config import InputError
from duoexp.engine import Engine, Method
from duoexp.identity import compare
from duoexp.meters import Energy, Watch
from duoexp.metrics import Decoding, Pair
from duoexp.summary import Answer, Results
from duoexp.tasks import Prompt
from duoexp.verify import match


@dataclass(frozen=True)
class Session:
    """One repeat of a run. `kept`: where baselines of other runs are to be had from."""

    engine: Engine
    baseline: Method
    method: Method
    kept: Baseline
    watch: Watch
    energy: Energy
    repeat: int

    def turns(self, prompt: Prompt, results: Results) -> Iterator[Answer]:
        """Each turn, on the baseline's answers to the turns before. A prompt that is too long is noted as failed."""
        answers: list[str] = []
        for turn in range(len(prompt.turns)):
            try:
                ids = self.engine.encode(prompt, answers)
            except InputError as error:
                failure = {"prompt": prompt.id, "turn": turn, "repeat": self.repeat, "reason": str(error)}
                results.failed.append(failure)
                return
            answer = self._turn(prompt, turn, ids, ours_first=len(results.answers) % 2 == 1)
            results.answers.append(answer)
            answers.append(answer.text)
            yield answer

    def _turn(self, prompt: Prompt, turn: int, ids: list[int], ours_first: bool) -> Answer:
        """Who goes first takes turns, as the machine warms up."""
        key = (prompt.id, turn, self.repeat)
        kept = self.kept.get(key, ids)
        self.watch.start()
        if ours_first:
            ours, theirs = self._decode(self.method, ids), kept or self._decode(self.baseline, ids)
        else:
            theirs, ours = kept or self._decode(self.baseline, ids), self._decode(self.method, ids)
        conditions = self.watch.conditions()
        if kept is None:
            self.kept.put(key, ids, theirs)
        engine = self.engine
        equality = self.method.rule is match or engine.sampler.temperature == 0
        compared = compare(engine.target, engine.sampler, ids, theirs.ids, ours.ids) if equality else None
        pair = Pair(prompt.id, prompt.kind, theirs, ours)
        text = engine.text(theirs.ids)
        return Answer(prompt, turn, self.repeat, ids, text, pair, compared, conditions, kept is not None)

    def _decode(self, method: Method, ids: Sequence[int]) -> Decoding:
        self.energy.start()
        decoding = self.engine.decode(method, ids)
        drawn = self.energy.joules()
        return replace(decoding, cpu_j=drawn.cpu, gpu_j=drawn.gpu)
