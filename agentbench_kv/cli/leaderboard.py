"""`kvbench leaderboard`: make, check and add submissions."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentbench_kv.cli.documents import print_json
from agentbench_kv.errors import UsageError

if TYPE_CHECKING:
    from agentbench_kv.results.leaderboard import Finding

__all__ = ["leaderboard"]

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    envvar="KVBENCH_JSON",
    show_envvar=True,
    help="Print one JSON document.",
)


@click.group()
def leaderboard() -> None:
    """Submissions: runs with a manifest, which anybody can recompute."""


@leaderboard.command()
@click.argument("folder", metavar="DIR", type=_FOLDER)
@_json_option
def validate(folder: Path, as_json: bool) -> None:
    """Recompute every figure of the submission in DIR; exit 2 if anything is wrong."""
    # Imported here: scipy takes a second, which `kvbench --help` should not.
    from agentbench_kv.results.leaderboard import validate as check

    findings = check(folder)
    if as_json:
        print_json({"valid": not findings, "findings": [asdict(each) for each in findings]})
    _refuse(folder, findings)
    if not as_json:
        click.echo(f"{folder}: valid")


@leaderboard.command()
@click.argument("folder", metavar="DIR", type=_FOLDER)
@click.option(
    "--to",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    envvar="KVBENCH_LEADERBOARD",
    show_envvar=True,
    help="The leaderboard's folder of runs.",
)
@_json_option
def add(folder: Path, to: Path, as_json: bool) -> None:
    """Check the submission in DIR and copy its runs into a leaderboard's folder."""
    from agentbench_kv.results.leaderboard import add as add_submission

    new = add_submission(folder, to)
    if as_json:
        print_json({"leaderboard": str(to), "added": new})
    else:
        click.echo(f"{len(new)} runs added to {to}; kvbench report {to} --html SITE shows them")


@leaderboard.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--to",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    envvar="KVBENCH_SUBMISSION",
    show_envvar=True,
    help="New folder for the submission.",
)
@click.option("--who", required=True, envvar="KVBENCH_WHO", show_envvar=True, help="Your name.")
@click.option("--method", required=True, envvar="KVBENCH_METHOD", help="What it is about.")
@click.option("--link", default="", envvar="KVBENCH_LINK", help="Web address to read more.")
@click.option(
    "--transcripts",
    is_flag=True,
    envvar="KVBENCH_TRANSCRIPTS",
    help="Take the transcripts along.",
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
@_json_option
def pack(
    runs: tuple[str, ...],
    to: Path,
    who: str,
    method: str,
    link: str,
    transcripts: bool,
    out: Path,
    as_json: bool,
) -> None:
    """Make a submission of RUNS, each a path or an id, and check it."""
    from agentbench_kv.results.leaderboard import pack as make
    from agentbench_kv.results.leaderboard import validate as check
    from agentbench_kv.results.store import RunStore

    found = [RunStore(out).find(run) for run in runs]
    manifest = make(found, to, who=who, method=method, link=link, transcripts=transcripts)
    if findings := check(to):
        shutil.rmtree(to)  # it was empty before; the corrected command needs it so again
        _refuse(to, findings)
    if as_json:
        print_json(manifest.model_dump(by_alias=True))
    else:
        click.echo(f"{to}: {len(found)} runs, valid")


def _refuse(folder: Path, findings: list[Finding]) -> None:
    """Print every finding; the first one is the error."""
    if not findings:
        return
    for finding in findings[1:]:
        click.echo(f"kvbench: {' '.join(str(finding).split())}", err=True)
    raise UsageError(f"{folder}: {findings[0]}")
