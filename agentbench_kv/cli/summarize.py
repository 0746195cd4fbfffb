"""`kvbench summarize`: rebuild the summary of runs and print it."""

from __future__ import annotations

from pathlib import Path

import click

from agentbench_kv.cli.options import out_option, shown


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@out_option("Folder of runs, for those named by id.", show_envvar=True)
@shown("--json as_json", "Print one JSON list instead of tables.", is_flag=True)
def summarize(runs: tuple[str, ...], out: Path, as_json: bool) -> None:
    """Rebuild summary.json of each RUN (a path or an id) from its records and print it."""
    from agentbench_kv.results.views import summarize_runs

    summarize_runs(out, runs, as_json)
