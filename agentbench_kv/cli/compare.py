"""`kvbench compare`: whether a candidate has become worse than a base."""

from __future__ import annotations

from pathlib import Path

import click

from agentbench_kv.errors import UsageError

FORMATS = ("terminal", "markdown", "junit", "github", "json")


@click.command()
@click.argument("base", metavar="BASE")
@click.argument("cand", metavar="CAND")
@click.argument("more", metavar="[RUN]...", nargs=-1)
@click.option(
    "--engines",
    is_flag=True,
    help="The same run on different engines: equal scores and tokens, sample by sample.",
)
@click.option(
    "--margin",
    type=float,
    default=2.0,
    envvar="KVBENCH_MARGIN",
    show_default=True,
    show_envvar=True,
    help="How much worse is still ok: points of score, percent of speed or memory.",
)
@click.option(
    "--metric",
    default="score",
    envvar="KVBENCH_METRIC",
    show_default=True,
    show_envvar=True,
    help="score, pass^K (of runs with trials), a sub-score such as recurring, peak_live, or "
    "output_tok_s.",
)
@click.option(
    "--by",
    type=click.Choice(("task",)),
    envvar="KVBENCH_BY",
    show_envvar=True,
    help="A verdict for each task; without it, one over the samples of all tasks.",
)
@click.option(
    "--allow-drift",
    is_flag=True,
    envvar="KVBENCH_ALLOW_DRIFT",
    show_envvar=True,
    help="Compare although data, template, parser or package versions differ.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="terminal",
    envvar="KVBENCH_FORMAT",
    show_default=True,
    show_envvar=True,
    help="What to print.",
)
@click.option(
    "--write",
    "writes",
    multiple=True,
    metavar="FORMAT=FILE",
    help="Also write this format to a file; repeatable.",
)
@click.option(
    "--noise",
    "repeats",
    multiple=True,
    metavar="RUN",
    help="Further runs of full, to show the A/A noise floor; repeatable.",
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
@click.option("--json", "as_json", is_flag=True, envvar="KVBENCH_JSON", help="As --format json.")
def compare(
    base: str,
    cand: str,
    more: tuple[str, ...],
    engines: bool,
    margin: float,
    metric: str,
    by: str | None,
    allow_drift: bool,
    form: str,
    writes: tuple[str, ...],
    repeats: tuple[str, ...],
    out: Path,
    as_json: bool,
) -> int:
    """Compare CAND with BASE, sample by sample, and say ok, inconclusive or regression.

    Each is a run directory, a run id, a folder of runs, a baseline file (kvbench baseline save) or
    its name, or a URL of one of these. Several runs of one method are repetitions.

    Exit codes: 0 ok, 3 regression, 4 inconclusive, 2 the two cannot be compared.

    With --engines all runs named are of one method on different engines; exit code 0 if every
    sample has the same score and the same tokens, else 1.
    """
    if engines:
        from agentbench_kv.cli.consistency import show_engines

        return show_engines((base, cand, *more), out, as_json or form == "json")
    if more:
        raise UsageError(f"{more[0]}: more than two runs are compared with --engines")
    # Imported here: scipy takes a second, which `kvbench --help` should not.
    from agentbench_kv.results.compare import compare as compare_sides
    from agentbench_kv.results.compare_text import show, targets
    from agentbench_kv.results.sources import open_sides

    files = targets(writes)
    with open_sides((base, cand, *repeats), out) as ((theirs, mine, *others), problems):
        found = compare_sides(
            theirs,
            mine,
            noise=[arm for arms in others for arm in arms],
            metric=metric,
            margin=margin,
            by_task=by is not None,
            allow_drift=allow_drift,
        )
    show(found, "json" if as_json else form, files, problems)
    return found.verdict.exit_code
