"""The command `python -m duoexp.dashboard`: a workspace in Weights & Biases with the panels that fit our runs."""

import argparse
import os
import sys
from typing import Any

from duoexp.config import InputError


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: the workspace is there, and its address printed; 2: it cannot be made."""
    parser = argparse.ArgumentParser("python -m duoexp.dashboard", description=__doc__)
    parser.add_argument("--project", default=os.environ.get("WANDB_PROJECT", "duoexp"))
    parser.add_argument("--entity", default=os.environ.get("WANDB_ENTITY"), help="by default that of your account")
    parser.add_argument("--name", default="duoexp", help="of the workspace")
    given = parser.parse_args(arguments)
    try:
        print(save(given.project, given.entity, given.name))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def save(project: str, entity: str | None, name: str) -> str:
    """Makes the workspace and returns its address. Raises InputError without the extra, an account or a network."""
    try:
        import wandb_workspaces  # noqa: F401
    except ImportError as error:
        raise InputError("the dashboard needs wandb-workspaces; pip install 'duoexp[dashboard]'") from error
    import wandb

    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        made = workspace(project, entity or str(wandb.Api(timeout=20).default_entity), name)
        made.save()
    except Exception as error:  # of W&B's own kinds, and of the library beneath it
        cause = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"the dashboard of project {project} cannot be made: {cause}; see `wandb login`") from error
    return str(made.url)


def workspace(project: str, entity: str, name: str) -> Any:
    """The workspace, which nobody has been told of yet. The names are those that `tracking.Wandb` sends."""
    from wandb_workspaces import workspaces as ws
    from wandb_workspaces.reports import v2 as wr

    method = wr.Config("draft.name")

    def bars(title: str, *figures: str) -> Any:
        return wr.BarPlot(title, [wr.SummaryMetric(each) for each in figures], groupby=method, orientation="h")

    def media(title: str, key: str) -> Any:
        return wr.MediaBrowser(title=title, media_keys=[key], num_columns=1)

    sections = {
        "Speed": [
            bars("Speedup over autoregressive decoding", "speedup"),
            bars("Tokens per second", "tokens_per_s", "baseline_tokens_per_s"),
            wr.ScatterPlot(
                title="Block efficiency and speedup", x=wr.SummaryMetric("tau"), y=wr.SummaryMetric("speedup")
            ),
            wr.ScatterPlot(
                title="Draft budget and speedup", x=wr.Config("draft.budget"), y=wr.SummaryMetric("speedup")
            ),
            bars("Time to first token, median (s)", "ttft_s.median", "baseline_ttft_s.median"),
        ],
        "Acceptance": [
            wr.CustomChart(
                query={"summaryTable": {"tableKey": "acceptance_by_position_table"}},
                chart_name="wandb/bar/v0",  # W&B's own kind of chart, which `wandb.plot.bar` asks for too
                chart_fields={"label": "position", "value": "alpha"},
                chart_strings={"title": "Acceptance rate by position"},
            ),
            bars("Acceptance rate alpha", "alpha"),
            bars("Block efficiency tau (tokens per target pass)", "tau"),
            bars("Draft efficiency", "draft_efficiency"),
        ],
        "Time": [
            media("Some rounds: target, draft, waits", "timeline"),
            bars("Share of the time that each waited", "target_idle", "draft_idle"),
        ],
        "Answers": [
            media("Who wrote which token", "texts_in_colour"),
            *(
                wr.LinePlot(title=each, x="Step", y=[f"prompt/{each}"])
                for each in ("speedup", "tau", "alpha", "ttft_s")
            ),
        ],
        "Settings": [wr.RunComparer(diff_only="split")],
    }
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[ws.Section(name=title, panels=panels, is_open=True) for title, panels in sections.items()],
        runset_settings=ws.RunsetSettings(groupby=[ws.Metric("Group"), ws.Config("draft.name")]),
    )


if __name__ == "__main__":
    sys.exit(main())
