"""`hydra/sweeper=grids`: several grids in one sweep, for axes that not every choice of another axis has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override


@dataclass
class GridsConf:
    _target_: str = "hydra_plugins.duoexp_grids.GridsBasicSweeper"
    grids: list[dict[str, Any]] = field(default_factory=list)  # each an axis and its values, as in `params`
    params: dict[str, str] | None = None  # of every grid
    max_batch_size: int | None = None


ConfigStore.instance().store(group="hydra/sweeper", name="grids", node=GridsConf, provider="duoexp")


class GridsBasicSweeper(BasicSweeper):
    """Hydra's basic sweeper over each of `grids` in turn. What the command line sets holds in all of them."""

    def __init__(
        self, grids: Sequence[Mapping[str, Any]], params: dict[str, str] | None, max_batch_size: int | None
    ) -> None:
        super().__init__(max_batch_size, params)
        self.grids = grids

    def split_arguments(self, overrides: list[Override], max_batch_size: int | None) -> list[list[list[str]]]:  # type: ignore[override]
        """Batches of jobs, each a list of overrides; a job that two grids have runs once."""
        assert self.hydra_context is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        jobs: dict[tuple[str, ...], None] = {}
        for grid in self.grids:
            axes = parser.parse_overrides([f"{key}={value}" for key, value in grid.items()])
            [batch] = BasicSweeper.split_arguments(axes + overrides, None)
            jobs |= dict.fromkeys(tuple(job) for job in batch)
        return list(self.split_overrides_to_chunks([list(job) for job in jobs], max_batch_size))  # type: ignore[arg-type]
