"""`kvbench sweep`: a grid of runs, played by any number of workers that share a folder."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentbench_kv.cli import options as opt
from agentbench_kv.cli.config import given

if TYPE_CHECKING:
    from rich.console import RenderableType

    from agentbench_kv.sweeps.config import SweepFile
    from agentbench_kv.sweeps.executors import SweepExecutor
    from agentbench_kv.sweeps.grid import SweepRun
    from agentbench_kv.sweeps.place import RunPlace
    from agentbench_kv.sweeps.supervise import Show, SweepReport
    from agentbench_kv.sweeps.sweep import Command, Sweep

_LOOK_S = 2.0
_STATES = ("done", "running", "waiting", "given up")
_SHOWN_ROWS = 20  # of a table that is drawn again and again


class SweepGroup(click.Group):
    """Takes what is no command of its own for the file, or the options, of a sweep."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        if first not in (*self.commands, "-h", "--help"):
            args = ["start", *args]
        return super().parse_args(ctx, args)


@click.group(cls=SweepGroup)
def sweep() -> None:
    """Play a grid of runs with many workers: `kvbench sweep FILE.yaml`, or with run's options.

    The same command on another machine that shares the folder helps. Whatever is interrupted or
    killed is taken over, and nothing is played twice.
    """


out_option = opt.option("--out", "Folder of runs, or an fsspec URL of one.", default="runs")
sweep_option = opt.local("--sweep name", "Its name, or how it begins, where there are several.")


@sweep.command()
@click.argument("file", required=False, type=opt.FILE)
@opt.grid_options
@opt.spec_options
@out_option
@opt.banks_option
@opt.local("--on", "Where workers run.", click.Choice(("local", "ray", "slurm")), default="local")
@opt.local("--workers", "Most at a time. [default: as there is room; 64 elsewhere]", opt.POSITIVE)
@opt.local("--cpus", "Cores for each run. [default: 1]", opt.POSITIVE)
@opt.local("--gpus", "GPUs for each run. [default: 0]", opt.NATURAL)
@opt.local("--retries", "Further tries of a run that failed. [default: 1]", opt.NATURAL)
@opt.local("--hours", "After which everything is interrupted; it can go on later.", opt.ABOVE_ZERO)
@opt.many(
    "--slurm slurm_settings KEY=VALUE",
    "Option of sbatch (partition=gpu), or cluster=local for jobs of this machine; repeatable.",
    envvar=None,
)
@opt.dry_run_option
@opt.quiet_option
@opt.json_option
@click.pass_context
def start(
    ctx: click.Context,
    /,
    file: Path | None,
    shared: dict[str, Any],
    out: str,
    banks: Path | None,
    on: str,
    slurm_settings: tuple[str, ...],
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    **asked: Any,
) -> int:
    """Play the runs of FILE, or of the options, and wait until they are done.

    Options replace those of the same name in FILE.
    """
    from agentbench_kv.cli.interrupts import interruptible
    from agentbench_kv.run.calibration import identified
    from agentbench_kv.sweeps.grid import jobs_of

    limits = {name: asked.pop(name) for name in ("workers", "cpus", "gpus", "retries", "hours")}
    plan = _plan(file, limits)
    jobs = _checked(jobs_of(plan, given(ctx, {**shared, **asked})))
    opt.check_banks(ctx, [job.spec for job in jobs], banks)
    if dry_run:
        _show_plan([(job, identified(job.spec, make=False).id) for job in jobs], out, as_json)
        return 0
    settings = opt.parse_settings(slurm_settings, "--slurm")
    with interruptible(), _showing(quiet or as_json) as show:
        report = _run(jobs, out, plan, on, settings, show, banks)
    return _show_end(report, out, as_json)


def _plan(file: Path | None, limits: Mapping[str, Any]) -> SweepFile:
    """Return the sweep of a file, or that of options alone; `limits` come before the file's."""
    from agentbench_kv.sweeps.config import SweepFile, read_sweep

    plan = SweepFile.model_validate({"runs": [{}]}) if file is None else read_sweep(file)
    needs = {name: limits[name] for name in ("cpus", "gpus") if limits[name] is not None}
    rest = {name: limits[name] for name in ("workers", "retries", "hours") if limits[name]}
    rest |= {"retries": limits["retries"]} if limits["retries"] is not None else {}
    runs = [each.model_copy(update=needs) for each in plan.runs]
    return plan.model_copy(update={**rest, "runs": runs})


def _checked(jobs: Sequence[SweepRun]) -> Sequence[SweepRun]:
    from agentbench_kv.run.runner import check_all

    check_all([job.spec for job in jobs])
    return jobs


def _run(
    jobs: Sequence[SweepRun],
    out: str,
    plan: SweepFile,
    on: str,
    settings: Mapping[str, str],
    show: Show,
    banks: Path | None,
) -> SweepReport:
    from dataclasses import replace

    from agentbench_kv.results.objects import local_folder, objects_at
    from agentbench_kv.run.calibration import identified
    from agentbench_kv.sweeps.place import check_locks
    from agentbench_kv.sweeps.supervise import Supervisor
    from agentbench_kv.sweeps.sweep import Sweep
    from agentbench_kv.sweeps.worker import opened

    folder = local_folder(out)
    if folder is not None:
        check_locks(folder)
        out = str(folder.resolve())
    # Calibrations are made here, once: their hashes are part of what the runs are.
    known = Sweep.of(objects_at(out), [replace(job, spec=identified(job.spec)) for job in jobs])
    until = None if plan.hours is None else time.time() + 3600 * plan.hours
    executor = _executor(on, folder, known.name, settings, plan.hours)
    kept = None if banks is None else str(banks.resolve())
    command = known.register(on, plan.retries, until, kept)
    most = plan.workers or (10_000 if on == "local" else 64)
    _, place = opened(out)
    return Supervisor(out, known, place, command, executor, most, show).run()


def _executor(
    on: str, folder: Path | None, name: str, settings: Mapping[str, str], hours: float | None
) -> SweepExecutor:
    from agentbench_kv.cli.sweep_worker import work
    from agentbench_kv.errors import UsageError
    from agentbench_kv.sweeps.executors import LocalExecutor, RayExecutor, SlurmExecutor

    if settings and on != "slurm":
        raise UsageError(f"--slurm {next(iter(settings))}: only with --on slurm")
    logs = (folder / ".sweeps" if folder is not None else Path("sweep-logs")) / name / "logs"
    if on == "ray":
        return RayExecutor(work)
    if on == "slurm":
        return SlurmExecutor(work, logs, settings, hours)
    return LocalExecutor(logs)


@sweep.command()
@out_option
@sweep_option
@opt.local_flag("--live", "Go on showing it until it is done.")
@opt.json_option
def status(out: str, name: str | None, live: bool, as_json: bool) -> int:
    """Show how far a sweep is: runs, trials, failures, the time that is left."""
    known, place = _found(out, name)
    if as_json:
        report, command = _report(known, place)
        opt.print_json(_document(known, command, report))
        return 0
    while True:
        report, command = _report(known, place)
        if not live:
            _print(_table(report, len(report.rows)))
            return 0
        with _showing(False) as show:
            while True:
                show(report)
                if report.over:
                    return 0
                time.sleep(_LOOK_S)
                report, command = _report(known, place)


@sweep.command()
@out_option
@sweep_option
def cancel(out: str, name: str | None) -> None:
    """End a sweep's workers everywhere; `kvbench sweep` with the same runs goes on with it."""
    known, _ = _found(out, name)
    count = known.cancel()
    click.echo(
        f"sweep {known.name}: {count} command{'s' * (count != 1)} told to end; "
        "runs under way are interrupted and can go on later"
    )


@sweep.command()
def schema() -> None:
    """Print the JSON schema of a sweep's file, for editors."""
    from agentbench_kv.sweeps.config import schema as described

    opt.print_json(described())


def _found(out: str, name: str | None) -> tuple[Sweep, RunPlace]:
    from agentbench_kv.sweeps.sweep import find_sweep
    from agentbench_kv.sweeps.worker import opened

    objects, place = opened(out)
    return find_sweep(objects, name or ""), place


def _report(known: Sweep, place: RunPlace) -> tuple[SweepReport, Command | None]:
    from agentbench_kv.sweeps.supervise import report_of

    commands = known.commands()
    command = commands[-1] if commands else None
    rows, histories = known.rows(place, command)
    return report_of(rows, histories), command


def _document(known: Sweep, command: Command | None, report: SweepReport) -> dict[str, Any]:
    from agentbench_kv.sweeps.sweep import document

    return {
        "sweep": known.name,
        "on": command.on if command else None,
        "cancelled": bool(command and known.cancelled(command.id)),
        "counts": {state.replace(" ", "_"): report.count(state) for state in _STATES},
        "left_s": report.left_s,
        "runs": [document(row) for row in report.rows],
    }


def _headline(report: SweepReport) -> str:
    counts = [f"{report.count(state)} {state}" for state in _STATES if report.count(state)]
    words = f"{len(report.rows)} runs: {', '.join(counts)}"
    if report.left_s and math.isfinite(report.left_s):
        words += f"; about {_spoken(report.left_s)} left"
    return words


def _spoken(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _table(report: SweepReport, most: int) -> RenderableType:
    """Draw a sweep: its headline, and its runs, what needs a look first."""
    from rich.console import Group
    from rich.text import Text

    from agentbench_kv.results.terminal import new_table

    order = {"given up": 0, "running": 1, "waiting": 2, "done": 3}
    rows = sorted(report.rows, key=lambda row: order[row.state])
    cells = [
        (
            row.job.name,
            row.state,
            _progress(row.standing.finished, row.standing.expected),
            row.failed + row.died or "",
            f"{row.seconds:.0f}" if row.seconds else "",
            row.error or row.standing.holder,
        )
        for row in rows[:most]
    ]
    more = len(rows) - len(cells)
    table = new_table("run", "state", "trials", "failures", "s", "by, or why", rows=cells)
    rest = [Text(f"and {more} more")] if more > 0 else []
    return Group(Text(_headline(report)), table, *rest)


def _progress(finished: int, expected: int | None) -> str:
    return f"{finished}/{expected}" if expected is not None else str(finished or "")


def _print(what: RenderableType) -> None:
    from agentbench_kv.results.terminal import console

    console().print(what)


@contextmanager
def _showing(quiet: bool) -> Iterator[Callable[[SweepReport], None]]:
    """Yield what shows reports as they come: a live table on a terminal, else lines."""
    from rich.console import Console
    from rich.live import Live

    screen = Console(stderr=True, highlight=False, soft_wrap=True)
    said: set[str] = set()

    def tell(report: SweepReport) -> None:
        line = _headline(report).partition(";")[0]
        if line not in said and not quiet:
            said.add(line)
            screen.print(_headline(report), markup=False)

    if quiet or not screen.is_terminal:
        yield tell
        return
    with Live(console=screen, auto_refresh=False) as live:
        yield lambda report: live.update(_table(report, _SHOWN_ROWS), refresh=True)


def _show_plan(jobs: Sequence[tuple[SweepRun, str]], out: str, as_json: bool) -> None:
    if as_json:
        runs = [{"run_id": name, "spec": job.spec.document()} for job, name in jobs]
        opt.print_json(runs)
        return
    for _, name in jobs:
        click.echo(f"{out.rstrip('/')}/{name}")
    click.echo(f"{len(jobs)} runs; nothing was started")


def _show_end(report: SweepReport, out: str, as_json: bool) -> int:
    """Print the figures of the runs that are done, and why others are not; return the exit code."""
    from agentbench_kv.cli.output import show_outcome
    from agentbench_kv.errors import KVBenchError
    from agentbench_kv.results.objects import local_folder
    from agentbench_kv.results.run_reader import RunReader
    from agentbench_kv.results.summary import build

    folder, summaries = local_folder(out), []
    done = [row for row in report.rows if row.state == "done"]
    for row in done if folder is not None else ():
        with contextlib.suppress(KVBenchError, OSError):
            summaries.append(build(RunReader(folder / row.job.name)))  # type: ignore[operator]
    if as_json:
        from agentbench_kv.sweeps.sweep import document

        opt.print_json({"why": report.why, "runs": [document(row) for row in report.rows]})
    elif folder is not None and summaries:
        show_outcome(summaries, folder, False)
    click.echo(f"kvbench: {_headline(report)}{'; ' + report.why if report.why else ''}", err=True)
    for row in report.rows:
        if row.given_up:
            click.echo(f"kvbench: {row.job.name}: {row.error}", err=True)
    if not report.over:
        click.echo("kvbench: the same command goes on with it", err=True)
    return 0 if len(done) == len(report.rows) else 1
