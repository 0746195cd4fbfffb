"""`kvbench show` and `summarize`: one run in detail, and the summaries of runs rebuilt."""

from __future__ import annotations

from pathlib import Path

import click

from agentbench_kv.cli.options import FILE, out_option, shown


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
