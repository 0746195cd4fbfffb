"""`kvbench compare` and `baseline`: has a candidate become worse, against runs or a saved file."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentbench_kv.cli import options as opt
from agentbench_kv.errors import KVBenchError, UsageError

if TYPE_CHECKING:
    from agentbench_kv.results.engines import Consistency, Difference
    from agentbench_kv.results.runs import Run


_MOST_REPLAYED = 8  # sessions that are played again for their logits
_MOST_DIGITS = 18
FORMATS = ("terminal", "markdown", "junit", "github", "json")


def _count(_: click.Context, __: click.Parameter, value: str | None) -> int:
    """Read the number of --flips, for which click takes the next word whatever it is."""
    if value is None:
        return 0
    # Python reads no number of some thousand digits, and nobody has so many samples.
    if not value.isdecimal() or len(value) > _MOST_DIGITS or not int(value):
        raise UsageError(
            f"--flips {value[:40]}: no number of samples; write --flips 20, or --flips at the end"
        )
    return int(value)


@click.command()
@click.argument("runs", metavar="BASE CAND [RUN]...", nargs=-1)
@opt.shown(
    "--margin",
    "How much worse is harmless: points of score, percent of speed or memory, 0.01 nats.",
    default=1.0,
)
@opt.shown(
    "--catch",
    "The loss that must not slip through, in the same unit. [default: 10, or the margin if "
    "that is more]",
    float,
)
@opt.shown(
    "--metric",
    "score, pass^K (of runs with trials), a sub-score such as recurring, kl or dnll and their "
    "parts (fidelity), peak_bytes, bytes_read, peak_live, or output_tok_s. [default: score; kl of "
    "runs of fidelity]",
)
@opt.shown(
    "--by",
    "A verdict for each task; without it, one over the samples of all tasks.",
    click.Choice(("task",)),
)
@opt.shown(
    "--inconclusive",
    "Whether an undecided comparison fails (exit code 4).",
    click.Choice(("fail", "ok")),
    default="fail",
)
@opt.shown(
    "--allow-drift",
    "Compare although model, data, template, parser or versions differ.",
    is_flag=True,
)
@opt.shown(
    "--bootstrap",
    "If BASE is a baseline that does not exist yet, save CAND as it and end well.",
    is_flag=True,
)
@opt.local(
    "--flips listed [N]",
    "List the samples that changed, the N largest changes first. [N: 20]",
    is_flag=False,
    callback=_count,
    flag_value="20",
)
@opt.local_flag(
    "--plan planned",
    "Say what a comparison with BASE, or with --samples, could tell; needs no CAND.",
)
@opt.local("--samples", "For --plan: samples on each side.", click.IntRange(2))
@opt.local(
    "--discordance",
    "For --plan: percent of samples whose outcome differs. "
    "[default: what BASE's repeats show, or 15]",
    click.FloatRange(0, 100),
)
@opt.local_flag(
    "--engines", "The same run on different engines: equal scores and tokens, sample by sample."
)
@opt.shown("--format form", "What to print.", click.Choice(FORMATS), default="terminal")
@opt.local(
    "--write writes FORMAT=FILE", "Also write this format to a file; repeatable.", multiple=True
)
@opt.local(
    "--noise repeats RUN",
    "Further runs of full, to show the A/A noise floor; repeatable.",
    multiple=True,
)
@opt.out_option()
@opt.flag("--json as_json", "As --format json.")
def compare(
    runs: tuple[str, ...],
    engines: bool,
    planned: bool,
    form: str,
    as_json: bool,
    out: Path,
    writes: tuple[str, ...],
    **options: Any,
) -> int:
    """Compare CAND with BASE, sample by sample, and say ok, inconclusive or regression.

    Each is a run directory, a run id, a folder of runs, a baseline file (kvbench baseline save) or
    its name, or a URL of one of these. Several runs of one method are repetitions.

    Exit codes: 0 ok, 3 regression, 4 inconclusive, 2 the two cannot be compared.

    With --engines all runs named are of one method on different engines; exit code 0 if they are
    valid and every sample has the same score and the same tokens, else 1.
    """
    form = "json" if as_json else form
    if engines:
        return _show_engines(runs, out, form == "json")
    if planned:
        return _plan(runs, out, form == "json", **options)
    from agentbench_kv.results.compare_text import targets, write_note

    files = targets(writes)
    try:
        if len(runs) != 2:
            hint = "; more than two are compared with --engines" if len(runs) > 2 else ""
            raise UsageError(f"expected BASE and CAND, got {len(runs)} runs{hint}")
        return _compare(runs, out, form, files, **options)
    except KVBenchError as error:
        write_note(files, str(error), refused=True)
        raise


def _compare(
    runs: Sequence[str], out: Path, form: str, files: Sequence[tuple[str, Path]], **options: Any
) -> int:
    from agentbench_kv.results.baseline import absent_baseline, open_sides, unread
    from agentbench_kv.results.compare import compare as compare_sides
    from agentbench_kv.results.compare_text import show

    absent = absent_baseline(runs[0], out)
    if absent is not None:
        return _without_baseline(absent, runs[1], out, files, options["bootstrap"])
    same = ("margin", "catch", "metric", "inconclusive", "allow_drift", "listed")
    chosen = {name: options[name] for name in same} | {"by_task": options["by"] is not None}
    repeats = open_sides(options["repeats"], out)
    with open_sides(runs, out) as (sides, problems), repeats as (others, odd):
        chosen |= {"noise": [run for side in others for run in side]}
        found = compare_sides(*sides, unread=unread(sides, problems), **chosen)
    show(found, form, files, [*problems, *odd])
    return found.exit_code


def _without_baseline(
    absent: Path, cand: str, out: Path, files: Sequence[tuple[str, Path]], bootstrap: bool
) -> int:
    """Save the candidate as the baseline that is missing, or say how to make one."""
    from agentbench_kv.results.baseline import how_to_make, open_sides, save_baseline
    from agentbench_kv.results.compare_text import write_note

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


def _plan(runs: Sequence[str], out: Path, as_json: bool, **options: Any) -> int:
    from agentbench_kv.results.baseline import open_sides
    from agentbench_kv.results.compare import plan, plan_lines
    from agentbench_kv.results.compare_text import tell

    if len(runs) > 1:
        raise UsageError(f"--plan takes BASE alone, got {len(runs)} runs")
    percent = options["discordance"]
    share = None if percent is None else percent / 100
    limits = options["margin"], options["catch"], options["samples"]
    with open_sides(runs, out) as (sides, problems):
        base = [run for side in sides for run in side]
        if problems and not base:
            raise UsageError(f"{problems[0].path}: {problems[0].reason}")
        found = plan(base, *limits, share)
    tell(problems)
    lines = [found.model_dump_json(indent=2)] if as_json else plan_lines(found)
    click.echo("\n".join(lines))
    return 0


@click.group()
def baseline() -> None:
    """Save runs as a baseline for kvbench compare, or show one."""


@baseline.command()
@click.argument("name", metavar="NAME")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@opt.option(
    "--to folder",
    "Folder to write NAME.json to.",
    opt.FOLDER,
    default=Path("baselines"),
    envvar="KVBENCH_BASELINES",
    show_envvar=True,
)
@opt.local_flag("--force", "Replace a baseline of that name.")
@opt.out_option()
@opt.json_option
def save(
    name: str, runs: tuple[str, ...], folder: Path, force: bool, out: Path, as_json: bool
) -> None:
    """Write finished runs to NAME.json; RUN is a path, an id, or a folder of runs.

    Several runs of one method and task are its repetitions, which verdicts on speed need.
    """
    from agentbench_kv.results.baseline import open_sides, save_baseline

    with open_sides(runs, out) as (sides, problems):
        if problems:  # half-read runs stay out: a baseline is what later runs are judged by
            raise UsageError(f"{problems[0].path}: {problems[0].reason}; not saved")
        found = list({run.path: run for side in sides for run in side}.values())
        path = save_baseline(name, found, folder, force)
    if as_json:
        opt.print_json({"path": str(path), "runs": [run.run_id for run in found]})
        return
    _show_runs(found)
    click.echo(str(path))


@baseline.command()
@click.argument("source", metavar="BASELINE")
@opt.json_option
def show(source: str, as_json: bool) -> None:
    """Show what BASELINE holds: a file, the name of one in baselines/, or a URL."""
    from agentbench_kv.results.baseline import open_sides

    with open_sides([source], Path("runs")) as ((runs,), _):
        if any(run.path.is_dir() for run in runs):
            raise UsageError(f"{source} is a folder of runs, not a baseline; kvbench show RUN")
    if not as_json:
        _show_runs(runs)
        return
    documents = []
    for run in runs:
        about = {"run_id": run.run_id, "spec": run.spec, "provenance": run.info.provenance}
        documents.append({**about, "summary": run.summary.model_dump(mode="json")})
    opt.print_json(documents)


def _show_runs(runs: Sequence[Run]) -> None:
    from agentbench_kv.results.show import summary_table
    from agentbench_kv.results.terminal import console

    console().print(summary_table([run.summary for run in runs]))


def _show_engines(sources: Sequence[str], out: Path, as_json: bool) -> int:
    """Print the cross-engine table of some runs; return the exit code."""
    from agentbench_kv.results.baseline import open_sides, unread
    from agentbench_kv.results.compare_text import tell
    from agentbench_kv.results.engines import consistency

    with open_sides(sources, out) as (sides, problems):
        if broken := unread(sides, problems):
            raise UsageError(
                f"{broken[0].path} cannot be read ({broken[0].reason}); mend it, or name the "
                "other runs one by one"
            )
        tell(problems)
        runs = [run for side in sides for run in side]
        found = consistency(runs)
    found = found.with_gaps(_gaps(runs, found))
    if as_json:
        opt.print_json(found.document())
    else:
        _print_engines(found)
    return 0 if found.equal else 1


def _print_engines(found: Consistency) -> None:
    from agentbench_kv.results.terminal import console, new_table, plain

    budget = "" if found.budget is None else f" at {found.budget}"
    console().print(f"{found.task}, {found.model}, {found.method}{budget}", markup=False)
    columns = ("engine", "run", "trials", "equal scores", "equal tokens", "score")
    rows = [
        (
            *(row.engine, row.run_id, row.trials, row.equal_scores),
            "not recorded" if row.equal_tokens is None else row.equal_tokens,
            None if row.score is None else f"{100 * row.score:.1f}%",
        )
        for row in found.rows
    ]
    console().print(new_table(*columns, rows=rows))
    for row in found.rows:
        if row.lacking:
            told = f"{row.run_id} proves nothing: {row.lacking}"
            console().print(plain(told), soft_wrap=True)
    if found.differences:
        columns = ("sample", "trial", "engine", "score", "first differing token", "logit gap")
        console().print(new_table(*columns, rows=map(_difference, found.differences)))


def _difference(each: Difference) -> tuple[object, ...]:
    mine, theirs = each.tokens
    place = f"turn {each.turn}, token {each.index}: {theirs} instead of {mine}"
    return (
        *(each.sample, each.trial, each.engine, f"{each.scores[0]:g} > {each.scores[1]:g}"),
        None if each.turn is None else place,
        each.note or (None if each.gap is None else f"{each.gap:.2e}"),
    )


def _gaps(runs: Sequence[Run], found: Consistency) -> dict[int, tuple[float | None, str]]:
    """Ask the embedded engine how close the decisions were at which another engine parted."""
    spec = next((run.spec for run in runs if run.setting.engine == "embedded"), None)
    if spec is None:
        return {}
    parted = [i for i, each in enumerate(found.differences) if each.turn is not None]
    return {i: _gap(spec, found.differences[i]) for i in parted[:_MOST_REPLAYED]}


def _gap(spec: dict[str, Any], difference: Difference) -> tuple[float | None, str]:
    from agentbench_kv.conformance.engines.comparison import decision_gap
    from agentbench_kv.run.calibration import recorded
    from agentbench_kv.run.spec import RunSpec

    if difference.trial or difference.turn is None or difference.index is None:
        return None, "only first trials are played again"
    names = {field.name for field in fields(RunSpec)}
    run = RunSpec(**{name: spec[name] for name in names & spec.keys()})
    place = (difference.sample, difference.turn, difference.index)
    try:
        return decision_gap(recorded(run), *place, difference.tokens), ""
    except KVBenchError as error:
        return None, str(error)
