"""`kvbench env` and `data`: dependencies and corpora that are not part of the package."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentbench_kv.cli.options import PATH, flag, json_option, local, local_flag, option, print_json

if TYPE_CHECKING:
    from agentbench_kv.environments import EnvironmentStatus


_JSON = flag("--json as_json", "Print JSON.")


@click.group()
def env() -> None:
    """Create, list, check and remove managed environments.

    They live under $KVBENCH_HOME (default: ~/.cache/kvbench). An interpreter of your own serves
    instead if KVBENCH_ENV_<NAME> names it.
    """


@env.command()
@click.argument("name")
@option(
    "--python",
    "Interpreter to build from; by default the one that runs kvbench, or another of the "
    "versions needed.",
    PATH,
)
@option(
    "--from source PLACE",
    "For tau2 (v0.2.0) and tau2-v1 (v1.0.1): a git URL, a git directory or a local directory "
    "of tau2-bench.",
)
@flag("--recreate", "Build from nothing.")
@_JSON
def create(name: str, as_json: bool, **how: Any) -> None:
    """Build an environment from its lock, or finish an interrupted build."""
    from agentbench_kv import environments

    report = partial(click.echo, err=True)
    made = environments.create(name, report=report, **how)
    _print(made.as_dict() if as_json else _line(made))


@env.command(name="list")
@_JSON
def list_(as_json: bool) -> None:
    """List the environments there can be and the state of each."""
    from agentbench_kv import environments

    found = environments.list_environments()
    _print([each.as_dict() for each in found] if as_json else "\n".join(map(_line, found)))


@env.command()
@click.argument("name")
@_JSON
@click.pass_context
def check(ctx: click.Context, name: str, as_json: bool) -> None:
    """Run an environment's own test; exit code 2 if it is not ready."""
    from agentbench_kv import environments

    found = environments.check(name)
    _print(found.as_dict() if as_json else _line(found))
    if found.state != "ready":
        ctx.exit(2)


@env.command()
@click.argument("name")
@_JSON
def remove(name: str, as_json: bool) -> None:
    """Delete an environment that kvbench built; never one of your own."""
    from agentbench_kv import environments

    removed = [str(folder) for folder in environments.remove(name)]
    text = "\n".join(f"removed {folder}" for folder in removed)
    _print({"removed": removed} if as_json else text or f"{name}: nothing to remove")


def _print(content: Any) -> None:
    click.echo(content if isinstance(content, str) else json.dumps(content, indent=1))


def _line(found: EnvironmentStatus) -> str:
    size = f" ({found.size_mb} MB)" if found.size_mb else ""
    source = "" if found.source == "managed" else f" from {found.source}"
    mend = f"; mend with: {found.mend}" if found.mend else ""
    return f"{found.name:<8} {found.state}{source}: {found.detail}{size}{mend}"


@click.group()
def data() -> None:
    """Import corpora for the browsing tasks.

    They live in $KVBENCH_DATA/corpora (default: the folder data in kvbench's home).
    """


@data.command("import-corpus")
@click.argument("source", type=PATH)
@local("--name", "What results call it.", required=True)
@local("--to", "Folder to write.", PATH)
@local_flag("--synthetic", "Made for tests: no benchmark result.")
@local(
    "--encoder",
    "wordllama or a local encoder's folder: also embed every document, for dense search.",
    PATH,
)
@json_option
def import_corpus(
    source: Path, name: str, to: Path | None, synthetic: bool, encoder: Path | None, as_json: bool
) -> None:
    """Import SOURCE as a corpus: a folder, .jsonl, .jsonl.gz, .parquet, .html or text file.

    \b
    kvbench data import-corpus wikipedia/ --name wikipedia-2024-08
    kvbench run --task frames/test --set corpus=wikipedia-2024-08
    """  # noqa: D301  \b is click's mark for "do not wrap"
    from dataclasses import asdict

    from agentbench_kv.adapters.browser import importing
    from agentbench_kv.adapters.data import data_folder
    from agentbench_kv.errors import UsageError

    if not name or name in {".", ".."} or Path(name).name != name:
        raise UsageError(f"--name {name!r}: expected a plain name without slashes")
    folder = to or data_folder() / "corpora" / name
    made = importing.import_corpus(source, folder, name, synthetic=synthetic, encoder=encoder)
    if as_json:
        left_out = {"empty": made.empty, "duplicates": made.duplicates}
        print_json({"folder": str(made.folder), **asdict(made.info), "left_out": left_out})
        return
    click.echo(f"{made.info.label}: {made.info.documents} documents in {made.folder}")
    if made.empty or made.duplicates:
        click.echo(f"left out: {made.empty} without text, {made.duplicates} with a repeated URL")
