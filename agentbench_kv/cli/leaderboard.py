"""`kvbench leaderboard`: make, check, add and replay submissions."""

from __future__ import annotations

import secrets
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentbench_kv.cli.options import FOLDER, POSITIVE, local, option, out_option, print_json, shown
from agentbench_kv.errors import UsageError

if TYPE_CHECKING:
    from agentbench_kv.leaderboard.checking import RunVerdict
    from agentbench_kv.leaderboard.evidence import Fault
    from agentbench_kv.results.submissions import Rerun

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_json_option = shown("--json as_json", "Print one JSON document.", is_flag=True)
_model_option = shown(
    "--model",
    "Folder of the model that was run, if it is none that ships.",
    _FOLDER,
    envvar="KVBENCH_MODEL_FOLDER",
)
_rescore_option = shown(
    "--rescore",
    "Play the recorded tokens of every task that is here; micro tasks always are.",
    is_flag=True,
)


@click.group()
def leaderboard() -> None:
    """Submissions: runs with a manifest, which anybody can derive again."""


@leaderboard.command()
@click.argument("folder", metavar="DIR", type=_FOLDER)
@_rescore_option
@_model_option
@_json_option
def validate(folder: Path, rescore: bool, model: Path | None, as_json: bool) -> None:
    """Derive the submission in DIR again; exit 2 if anything is wrong."""
    from agentbench_kv.leaderboard import validate as check

    verdict = check(folder, rescore=rescore, model=model)
    if as_json:
        runs = {run.run_id: {"label": run.label.value, "notes": run.notes} for run in verdict.runs}
        findings = [asdict(each) for each in verdict.findings]
        print_json({"valid": not findings, "findings": findings, "runs": runs})
    _refuse(folder, verdict.findings)
    if not as_json:
        for run in verdict.runs:
            click.echo(_line(run))
        click.echo(f"{folder}: valid")


@leaderboard.command()
@click.argument("folder", metavar="DIR", type=_FOLDER)
@shown(
    "--to", "The leaderboard's folder of runs.", FOLDER, required=True, envvar="KVBENCH_LEADERBOARD"
)
@_rescore_option
@_model_option
@_json_option
def add(folder: Path, to: Path, rescore: bool, model: Path | None, as_json: bool) -> None:
    """Check the submission in DIR and copy its runs into a leaderboard's folder."""
    from agentbench_kv.leaderboard import add as add_submission

    added = add_submission(folder, to, rescore=rescore, model=model)
    if as_json:
        found = {"added": added.new, "replications": added.replications}
        print_json({"leaderboard": str(to), **found})
        return
    for name in added.replications:
        click.echo(f"{name}: a replication of the run that is there")
    click.echo(f"{len(added.new)} runs added to {to}; kvbench report {to} --html SITE shows them")


@leaderboard.command()
@click.argument("folder", metavar="DIR", type=_FOLDER)
@shown("--sample", "Trials of each run to play.", POSITIVE, default=5)
@shown(
    "--seed",
    "Chooses the trials.  [default: a random one, which nobody can know in advance]",
    int,
    envvar="KVBENCH_RERUN_SEED",
)
@local("--run runs RUN", "Only this run; repeatable.", multiple=True)
@shown(
    "--to",
    "The leaderboard's folder: write the outcome there, for the label.",
    FOLDER,
    envvar="KVBENCH_LEADERBOARD",
)
@_model_option
@_json_option
def rerun(
    folder: Path,
    sample: int,
    seed: int | None,
    runs: tuple[str, ...],
    to: Path | None,
    model: Path | None,
    as_json: bool,
) -> None:
    """Play a random part of the submission in DIR again and compare token by token."""
    from agentbench_kv.leaderboard import rerun as play_again
    from agentbench_kv.leaderboard import validate as check
    from agentbench_kv.leaderboard.evidence import read_run

    verdict = check(folder, model=model)
    _refuse(folder, verdict.findings)
    chosen = secrets.randbelow(1 << 31) if seed is None else seed
    names = [run.run_id for run in verdict.runs]
    if unknown := set(runs) - set(names):
        raise UsageError(f"no run {min(unknown)} in {folder}; it has {', '.join(names)}")
    outcomes: list[Rerun] = []
    for name in runs or names:
        evidence = read_run(folder / name, [])
        if evidence is not None:
            outcome = play_again(evidence, sample, chosen, model=model, leaderboard=to)
            outcomes.append(outcome)
            if not as_json:
                click.echo(_rerun_line(outcome))
    if as_json:
        print_json({"reruns": [{**each.model_dump(), "same": each.confirms} for each in outcomes]})


@leaderboard.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@shown("--to", "New folder for the submission.", FOLDER, required=True, envvar="KVBENCH_SUBMISSION")
@shown("--who", "Your name.", required=True)
@option("--method", "What it is about.", required=True)
@option("--link", "Web address to read more.", default="")
@option(
    "--transcripts/--no-transcripts",
    "Take the transcripts along; without them nothing can be re-scored or re-run.",
    default=True,
)
@out_option("Folder of runs, for those named by id.", show_envvar=True)
@_json_option
def pack(
    runs: tuple[str, ...], to: Path, transcripts: bool, out: Path, as_json: bool, **about: str
) -> None:
    """Make a submission of RUNS, each a path or an id, and check it."""
    from agentbench_kv.leaderboard import pack as make
    from agentbench_kv.leaderboard import validate as check
    from agentbench_kv.results.store import RunStore

    found = [RunStore(out).find(run) for run in runs]
    manifest = make(found, to, **about, with_transcripts=transcripts)
    verdict = check(to)
    if verdict.findings:
        shutil.rmtree(to)  # it was empty before; the corrected command needs it so again
        _refuse(to, verdict.findings)
    if as_json:
        print_json(manifest.model_dump(by_alias=True))
        return
    for run in verdict.runs:
        click.echo(_line(run))
    click.echo(f"{to}: {len(found)} runs, valid")


def _line(run: RunVerdict) -> str:
    notes = f" ({'; '.join(run.notes)})" if run.notes else ""
    return f"{run.run_id}: {run.label.value}{notes}"


def _rerun_line(outcome: Rerun) -> str:
    first = f"; first difference at {outcome.differs[0]}" if outcome.differs else ""
    figures = f"KV accounts of {outcome.accounts}, scores of {outcome.scores}"
    return (
        f"{outcome.run_id}: {outcome.equal} of {outcome.played} trials gave the same tokens "
        f"({figures}; seed {outcome.seed}){first}"
    )


def _refuse(folder: Path, findings: list[Fault]) -> None:
    """Print every finding; the first one is the error."""
    if not findings:
        return
    for finding in findings[1:]:
        click.echo(f"kvbench: {' '.join(str(finding).split())}", err=True)
    raise UsageError(f"{folder}: {findings[0]}")
