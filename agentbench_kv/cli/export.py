"""`kvbench export`: the trials of runs as one table, or runs in a tracker, for other programs."""

from __future__ import annotations

from pathlib import Path

import click

TRACKERS = ("wandb", "mlflow", "trackio")


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUNS...")
@click.option(
    "--to",
    "target",
    required=True,
    metavar="FILE|TRACKER",
    envvar="KVBENCH_TO",
    show_envvar=True,
    help="Path or fsspec URL that ends in .parquet, .csv or .jsonl; or wandb, mlflow or trackio.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs"),
    envvar="KVBENCH_OUT",
    show_default=True,
    show_envvar=True,
    help="Folder of runs, for those named by id.",
)
@click.option(
    "--card", is_flag=True, help="Write README.md beside a parquet file: a card for a data hub."
)
@click.option(
    "--project",
    envvar="KVBENCH_PROJECT",
    show_envvar=True,
    help="Project or experiment of the tracker.  [default: kvbench]",
)
@click.option("--offline", is_flag=True, help="Let the tracker write to this machine only.")
@click.option(
    "--force", is_flag=True, envvar="KVBENCH_FORCE", help="Replace a file or run that is there."
)
@click.option("--json", "as_json", is_flag=True, envvar="KVBENCH_JSON", help="One JSON document.")
def export(
    runs: tuple[str, ...], target: str, out: Path, card: bool, project: str | None, offline: bool,
    force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Write the trials of RUNS, one row each, to one file; or RUNS to an experiment tracker.

    RUNS are run directories, folders of runs, run ids, or fsspec URLs (s3://bucket/runs).
    """
    if target in TRACKERS:
        if card:
            raise click.UsageError("--card is for a parquet file: --to trials.parquet")
        # Imported here: pandas takes half a second, which `kvbench --help` should not.
        from agentbench_kv.results.trackers import PROJECT, track_runs

        track_runs(out, runs, target, project or PROJECT, offline, force, as_json)
        return
    if project or offline:
        raise click.UsageError(f"--project and --offline are for --to {', '.join(TRACKERS)}")
    from agentbench_kv.results.export import export_trials

    export_trials(out, runs, target, card, force, as_json)
