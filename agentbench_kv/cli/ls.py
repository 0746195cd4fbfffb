"""`kvbench ls`: what there is."""

from __future__ import annotations

from pathlib import Path

import click

KINDS = ("methods", "engines", "tasks", "runs")


@click.command()
@click.argument("kind", type=click.Choice(KINDS))
@click.option("--engine", envvar="KVBENCH_ENGINE", help="Say which methods this engine can run.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs"),
    envvar="KVBENCH_OUT",
    show_default=True,
    help="Folder of runs.",
)
@click.option("--json", "as_json", is_flag=True, envvar="KVBENCH_JSON", help="One JSON document.")
def ls(kind: str, engine: str | None, out: Path, as_json: bool) -> None:
    """List methods (with presets and parameters), engines, tasks or runs."""
    from agentbench_kv.cli.output import show_listing

    show_listing(kind, engine, out, as_json)
