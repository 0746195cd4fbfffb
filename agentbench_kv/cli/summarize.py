"""`kvbench summarize`: rebuild the summary of runs and print it."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["summarize"]


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
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
    "--json",
    "as_json",
    is_flag=True,
    envvar="KVBENCH_JSON",
    show_envvar=True,
    help="Print one JSON list instead of tables.",
)
def summarize(runs: tuple[str, ...], out: Path, as_json: bool) -> None:
    """Rebuild summary.json of each RUN (a path or an id) from its records and print it."""
    # Imported here: scipy takes a second, which `kvbench --help` should not.
    from agentbench_kv.results.views import summarize_runs

    summarize_runs(out, runs, as_json)
