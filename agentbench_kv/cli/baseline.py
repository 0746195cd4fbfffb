"""`kvbench baseline`: runs as one file that can be committed and compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentbench_kv.cli.documents import print_json
from agentbench_kv.cli.options import FOLDER, json_option, local_flag, option, out_option
from agentbench_kv.errors import UsageError

if TYPE_CHECKING:
    from agentbench_kv.results.runs import Run


@click.group()
def baseline() -> None:
    """Save runs as a baseline for kvbench compare, or show one."""


@baseline.command()
@click.argument("name", metavar="NAME")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@option(
    "--to folder",
    "Folder to write NAME.json to.",
    FOLDER,
    default=Path("baselines"),
    envvar="KVBENCH_BASELINES",
    show_envvar=True,
)
@local_flag("--force", "Replace a baseline of that name.")
@out_option()
@json_option
def save(
    name: str, runs: tuple[str, ...], folder: Path, force: bool, out: Path, as_json: bool
) -> None:
    """Write finished runs to NAME.json; RUN is a path, an id, or a folder of runs.

    Several runs of one method and task are its repetitions, which verdicts on speed need.
    """
    from agentbench_kv.results.baseline import save_baseline
    from agentbench_kv.results.sources import open_sides

    with open_sides(runs, out) as (sides, problems):
        if problems:  # half-read runs stay out: a baseline is what later runs are judged by
            raise UsageError(f"{problems[0].path}: {problems[0].reason}; not saved")
        found = list({run.path: run for side in sides for run in side}.values())
        path = save_baseline(name, found, folder, force)
    if as_json:
        print_json({"path": str(path), "runs": [run.run_id for run in found]})
        return
    _print(found)
    click.echo(str(path))


@baseline.command()
@click.argument("source", metavar="BASELINE")
@json_option
def show(source: str, as_json: bool) -> None:
    """Show what BASELINE holds: a file, the name of one in baselines/, or a URL."""
    from agentbench_kv.results.sources import open_sides

    with open_sides([source], Path("runs")) as ((runs,), _):
        if any(run.path.is_dir() for run in runs):
            raise UsageError(f"{source} is a folder of runs, not a baseline; kvbench show RUN")
    if not as_json:
        _print(runs)
        return
    documents = [
        {
            "run_id": run.run_id,
            "spec": run.spec,
            "provenance": run.info.provenance,
            "summary": run.summary.model_dump(mode="json"),
        }
        for run in runs
    ]
    print_json(documents)


def _print(runs: Sequence[Run]) -> None:
    from agentbench_kv.results import render, terminal

    terminal.console().print(render.summary_table([run.summary for run in runs]))
