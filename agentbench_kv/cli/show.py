"""`kvbench show`, `summarize`, `export`: what runs hold, for people and for other programs."""

from __future__ import annotations

from pathlib import Path

import click

from agentbench_kv.cli.options import FILE, flag, json_option, local_flag, out_option, shown

TRACKERS = ("wandb", "mlflow", "trackio")


@click.command()
@click.argument("run", metavar="RUN")
@shown(
    "--sample ID",
    "Show the turns and transcripts of this sample: phases, and what was evicted when.",
)
@shown("--png FILE", "Draw the timeline of live KV into this file.", FILE)
@out_option("Folder of runs, for one named by id.", show_envvar=True)
@shown("--json as_json", "Print one JSON document instead of tables.", is_flag=True)
def show(run: str, sample: str | None, png: Path | None, out: Path, as_json: bool) -> None:
    """Show the summary, the failures and the live KV turn by turn of RUN, a path or an id."""
    from agentbench_kv.results.show import show_run

    show_run(out, run, sample, as_json, png)


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@out_option("Folder of runs, for those named by id.", show_envvar=True)
@shown("--json as_json", "Print one JSON list instead of tables.", is_flag=True)
def summarize(runs: tuple[str, ...], out: Path, as_json: bool) -> None:
    """Rebuild summary.json of each RUN (a path or an id) from its records and print it."""
    from agentbench_kv.results.show import summarize_runs

    summarize_runs(out, runs, as_json)


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUNS...")
@shown(
    "--to target FILE|TRACKER",
    "Path or fsspec URL that ends in .parquet, .csv or .jsonl; or wandb, mlflow or trackio.",
    required=True,
)
@out_option("Folder of runs, for those named by id.", show_envvar=True)
@local_flag("--card", "Write README.md beside a parquet file: a card for a data hub.")
@shown("--project", "Project or experiment of the tracker.  [default: kvbench]")
@local_flag("--offline", "Let the tracker write to this machine only.")
@flag("--force", "Replace a file or run that is there.")
@json_option
def export(
    runs: tuple[str, ...],
    target: str,
    out: Path,
    card: bool,
    project: str | None,
    offline: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write the trials of RUNS, one row each, to one file; or RUNS to an experiment tracker.

    RUNS are run directories, folders of runs, run ids, or fsspec URLs (s3://bucket/runs).
    """
    if target in TRACKERS:
        if card:
            raise click.UsageError("--card is for a parquet file: --to trials.parquet")
        from agentbench_kv.results.trackers import PROJECT, track_runs

        track_runs(out, runs, target, project or PROJECT, offline, force, as_json)
        return
    if project or offline:
        raise click.UsageError(f"--project and --offline are for --to {', '.join(TRACKERS)}")
    from agentbench_kv.results.export import export_trials

    export_trials(out, runs, target, card, force, as_json)
