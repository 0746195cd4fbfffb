"""`kvbench report`: the tables of runs, in any format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentbench_kv.cli.options import FOLDER, PATH, flag, shown
from agentbench_kv.errors import UsageError

if TYPE_CHECKING:
    from agentbench_kv.results.runs import Run
    from agentbench_kv.results.tables.model import Table

KINDS = ("accuracy", "efficiency", "throughput", "curves", "fidelity")
FORMATS = ("terminal", "markdown", "csv", "latex", "json")


@click.command()
@click.argument("paths", nargs=-1, metavar="[RUNS]...", type=PATH)
@shown(
    "--table kinds",
    "Family of tables; repeatable.  [default: all that have data]",
    click.Choice(KINDS),
    multiple=True,
)
@shown(
    "--format style",
    "[default: the suffix of --out, else terminal]",
    click.Choice(FORMATS),
    envvar="KVBENCH_REPORT_FORMAT",
)
@flag("--json as_json", "Is --format json.")
@shown(
    "--metric metrics M",
    "score or a sub-score, e.g. recurring; repeatable.  [default: score, with LoCoMo's parts]",
    multiple=True,
    envvar="KVBENCH_REPORT_METRIC",
)
@shown("--published", "Also, or alone, the papers' own tables.", is_flag=True)
@shown(
    "--out",
    "File to write, or folder for a file per table.  [default: print]",
    PATH,
    envvar="KVBENCH_REPORT_OUT",
)
@shown("--html DIR", "Write a static site instead of tables.", FOLDER)
def report(
    paths: tuple[Path, ...],
    style: str | None,
    as_json: bool,
    out: Path | None,
    html: Path | None,
    **chosen: Any,
) -> None:
    """Tables of RUNS, run directories or folders of them.

    Accuracy against budget, efficiency, what memories cost, throughput, summaries of the curves,
    distance from the full cache. What could not be read goes to stderr, a line each.
    """
    from agentbench_kv.results.runs import load_runs, run_folders
    from agentbench_kv.results.tables.formats import choose_format, show, write
    from agentbench_kv.results.terminal import visible
    from agentbench_kv.serving_bench.measurements import serving_folders

    if not paths and not chosen["published"]:
        raise UsageError("name runs or a folder of runs, e.g. kvbench report runs, or --published")
    # Folders of `kvbench bench serving` may stand among the paths.
    served = serving_folders(paths)
    others = [path for path in paths if run_folders([path]) or not serving_folders([path])]
    runs, problems = load_runs(others) if others else ([], [])
    for problem in problems:
        click.echo(visible(f"{problem.path}: {problem.reason}"), err=True)
    if html is not None:
        if not runs:
            raise UsageError("--html needs runs, e.g. kvbench report runs --html site")
        from agentbench_kv.results.site.build import build_site

        click.echo(build_site(runs, problems, html))
        return
    form = choose_format("json" if as_json else style, out)
    tables = _tables(runs, served, **chosen)
    if out is None:
        show(tables, form)
        return
    for path in write(tables, form, out):
        click.echo(path, err=True)


def _tables(
    runs: Sequence[Run],
    served: Sequence[Path],
    *,
    kinds: Sequence[str],
    metrics: Sequence[str],
    published: bool,
) -> list[Table]:
    from agentbench_kv.results.tables.accuracy import published_tables
    from agentbench_kv.results.tables.model import Kind
    from agentbench_kv.results.tables.report import report_tables
    from agentbench_kv.serving_bench.tables import serving_tables

    wanted = [Kind(kind) for kind in kinds]
    tables = report_tables(runs, wanted, metrics) if runs else []
    if served and (not wanted or Kind.THROUGHPUT in wanted):
        tables += serving_tables(served)
    papers = published_tables() if published else []
    tables += [table for table in papers if not wanted or table.kind in wanted]
    if not tables:
        what = "measurements under load" if served else "published figures"
        raise UsageError(f"no {what} in {', '.join(kinds)}")
    return tables
