"""`kvbench compare`: whether a candidate has become worse than a base."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentbench_kv.cli.options import flag, local, local_flag, out_option, shown
from agentbench_kv.errors import KVBenchError, UsageError

if TYPE_CHECKING:
    from agentbench_kv.results.runs import Run

FORMATS = ("terminal", "markdown", "junit", "github", "json")


def _count(_: click.Context, __: click.Parameter, value: str | None) -> int:
    """Read the number of --flips, for which click takes the next word whatever it is."""
    if value is None:
        return 0
    if not value.isdecimal() or not int(value):
        raise UsageError(f"--flips {value}: no number; write --flips 20, or --flips at the end")
    return int(value)


@click.command()
@click.argument("runs", metavar="BASE CAND [RUN]...", nargs=-1)
@shown(
    "--margin",
    "How much worse is harmless: points of score, percent of speed or memory.",
    default=1.0,
)
@shown(
    "--catch",
    "The loss that must not slip through, in the same unit. [default: 10, or the margin if "
    "that is more]",
    float,
)
@shown(
    "--metric",
    "score, pass^K (of runs with trials), a sub-score such as recurring, peak_live, or "
    "output_tok_s.",
    default="score",
)
@shown(
    "--by",
    "A verdict for each task; without it, one over the samples of all tasks.",
    click.Choice(("task",)),
)
@shown(
    "--inconclusive",
    "Whether an undecided comparison fails (exit code 4).",
    click.Choice(("fail", "ok")),
    default="fail",
)
@shown(
    "--allow-drift",
    "Compare although model, data, template, parser or versions differ.",
    is_flag=True,
)
@shown(
    "--bootstrap",
    "If BASE is a baseline that does not exist yet, save CAND as it and end well.",
    is_flag=True,
)
@local(
    "--flips listed [N]",
    "List the samples that changed, the N largest changes first. [N: 20]",
    is_flag=False,
    callback=_count,
    flag_value="20",
)
@local_flag(
    "--plan planned",
    "Say what a comparison with BASE, or with --samples, could tell; needs no CAND.",
)
@local("--samples", "For --plan: samples on each side.", click.IntRange(2))
@local(
    "--discordance",
    "For --plan: percent of samples whose outcome differs. "
    "[default: what BASE's repeats show, or 15]",
    click.FloatRange(0, 100),
)
@local_flag(
    "--engines", "The same run on different engines: equal scores and tokens, sample by sample."
)
@shown("--format form", "What to print.", click.Choice(FORMATS), default="terminal")
@local("--write writes FORMAT=FILE", "Also write this format to a file; repeatable.", multiple=True)
@local(
    "--noise repeats RUN",
    "Further runs of full, to show the A/A noise floor; repeatable.",
    multiple=True,
)
@out_option()
@flag("--json as_json", "As --format json.")
def compare(
    runs: tuple[str, ...],
    engines: bool,
    planned: bool,
    samples: int | None,
    discordance: float | None,
    form: str,
    as_json: bool,
    out: Path,
    writes: tuple[str, ...],
    bootstrap: bool,
    **options: Any,
) -> int:
    """Compare CAND with BASE, sample by sample, and say ok, inconclusive or regression.

    Each is a run directory, a run id, a folder of runs, a baseline file (kvbench baseline save) or
    its name, or a URL of one of these. Several runs of one method are repetitions.

    Exit codes: 0 ok, 3 regression, 4 inconclusive, 2 the two cannot be compared.

    With --engines all runs named are of one method on different engines; exit code 0 if every
    sample has the same score and the same tokens, else 1.
    """
    form = "json" if as_json else form
    if engines:
        from agentbench_kv.cli.consistency import show_engines

        return show_engines(runs, out, form == "json")
    if planned:
        limits = options["margin"], options["catch"]
        return _plan(runs, out, limits, samples, discordance, form == "json")
    from agentbench_kv.results.compare_text import targets, write_note

    files = targets(writes)
    try:
        if len(runs) != 2:
            hint = "; more than two are compared with --engines" if len(runs) > 2 else ""
            raise UsageError(f"expected BASE and CAND, got {len(runs)} runs{hint}")
        return _compare(*runs, out, form, files, bootstrap, **options)
    except KVBenchError as error:
        write_note(files, str(error), refused=True)
        raise


def _compare(
    base: str,
    cand: str,
    out: Path,
    form: str,
    files: Sequence[tuple[str, Path]],
    bootstrap: bool,
    *,
    repeats: tuple[str, ...],
    by: str | None,
    **options: Any,
) -> int:
    from agentbench_kv.results.compare import compare as compare_sides
    from agentbench_kv.results.compare_text import show
    from agentbench_kv.results.sources import absent_baseline, open_sides

    absent = absent_baseline(base, out)
    if absent is not None:
        return _without_baseline(absent, cand, out, files, bootstrap)
    with open_sides((base, cand, *repeats), out) as ((theirs, mine, *others), problems):
        noise = [run for side in others for run in side]
        found = compare_sides(theirs, mine, noise=noise, by_task=by is not None, **options)
    show(found, form, files, problems)
    return found.exit_code


def _without_baseline(
    absent: Path, cand: str, out: Path, files: Sequence[tuple[str, Path]], bootstrap: bool
) -> int:
    """Save the candidate as the baseline that is missing, or say how to make one."""
    from agentbench_kv.results.baseline import save_baseline
    from agentbench_kv.results.compare_text import write_note
    from agentbench_kv.results.sources import how_to_make, open_sides

    runs: list[Run] = []
    if not bootstrap:
        with suppress(KVBenchError), open_sides([cand], out) as ((runs,), _):
            pass
        raise UsageError(how_to_make(absent, runs, out))
    with open_sides([cand], out) as ((runs,), problems):
        if problems:
            raise UsageError(f"{problems[0].path}: {problems[0].reason}; not saved")
        save_baseline(absent.stem, runs, absent.parent)
    note = f"bootstrapped: there was no {absent}, so CAND was saved as it; commit that file"
    write_note(files, note)
    click.echo(note)
    return 0


def _plan(
    runs: Sequence[str],
    out: Path,
    limits: tuple[float, float | None],
    samples: int | None,
    discordance: float | None,
    as_json: bool,
) -> int:
    from agentbench_kv.results.plan import plan, plan_lines
    from agentbench_kv.results.sources import open_sides

    if len(runs) > 1:
        raise UsageError(f"--plan takes BASE alone, got {len(runs)} runs")
    share = None if discordance is None else discordance / 100
    with open_sides(runs, out) as (sides, _):
        found = plan([run for side in sides for run in side], *limits, samples, share)
    lines = [found.model_dump_json(indent=2)] if as_json else plan_lines(found)
    click.echo("\n".join(lines))
    return 0
