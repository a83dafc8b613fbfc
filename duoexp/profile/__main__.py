"""`python -m duoexp.profile model=NAME hardware=NAME`: what each pass of the two models takes on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig

from duoexp.config import CONF, register
from duoexp.distill.__main__ import end, told

if TYPE_CHECKING:
    from duoexp.profile import Profile

WIDTHS = (1, 2, 4, 8, 16, 24, 32)
SEQUENCES = (1, 2, 4, 8)

register()


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def launch(cfg: DictConfig) -> None:
    told(lambda: _print(cfg, CONF / "hardware"))


def _print(cfg: DictConfig, profiles: Path) -> None:
    from duoexp import terminal
    from duoexp.profile.show import table

    shown = terminal.console()
    profile, notes = measured(cfg, profiles)
    for note in notes:
        shown.print(f"note: {note}", markup=False)
    shown.print(table(profile))
    shown.print(str(profile.file), markup=False, soft_wrap=True)


def measured(cfg: DictConfig, profiles: Path) -> tuple["Profile", tuple[str, ...]]:
    """The profile of the config's set-up, whole, and the notes on its hardware."""
    from duoexp.profile import Want, measure
    from duoexp.runner import loaded, prepare

    plan = prepare(cfg, profiles)
    profile, settings = plan.profile(), plan.config.profile
    contexts = [each for each in settings.contexts if each + WIDTHS[-1] <= plan.setting.context_size]
    sequences = SEQUENCES if plan.setting.policy is not None else ()
    modes = (False, True) if sequences and plan.hardware.worker == "process" else (False,)
    with loaded(plan) as (target, worker):
        for beside in modes:
            want = Want(beside, contexts, WIDTHS, sequences, prefill=True)
            measure(target, worker, plan.vocabulary, settings.repeats, want, profile)
    profile.save()
    return profile, plan.notes


if __name__ == "__main__":
    end(launch)
