"""Create, look at and remove managed environments."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from agentbench_kv.environments import build as builder
from agentbench_kv.environments.locations import (
    Report,
    building,
    folder_of,
    folders_of_name,
    interpreter,
    overridden,
    override_variable,
)
from agentbench_kv.environments.marker import discard_marker, read_marker
from agentbench_kv.environments.profiles import PROFILES, Profile, profile
from agentbench_kv.environments.pythons import find_python
from agentbench_kv.errors import PrerequisiteError

State = Literal["ready", "missing", "unfinished", "outdated", "broken"]


@dataclass(frozen=True)
class EnvironmentStatus:
    """What is known of one environment.

    Attributes
    ----------
    name, summary : str
        The profile.
    state : str
        `ready`, `missing`, `unfinished` (a build was interrupted), `outdated` (built from an
        earlier lock) or `broken` (the probe failed).
    source : str
        `managed`, or the environment variable that names the user's own Python.
    python : Path or None
        Interpreter, when there is one.
    detail : str
        What was found.
    mend : str or None
        The command that makes it ready.
    packages : dict
        Versions installed, for managed environments.
    folder : Path or None
        Where a managed environment lies.
    """

    name: str
    summary: str
    state: State
    source: str
    python: Path | None
    detail: str
    mend: str | None = None
    packages: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None

    @cached_property
    def size_mb(self) -> int | None:
        """Disk space of a managed environment: every file is looked at, for seconds at worst."""
        return None if self.folder is None else _size_mb(self.folder)

    def as_dict(self) -> dict[str, Any]:
        """Return what is known in JSON types."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        del plain["folder"]
        plain["python"] = None if self.python is None else str(self.python)
        return {**plain, "size_mb": self.size_mb}


def create(
    name: str,
    *,
    python: str | Path | None = None,
    source: str | None = None,
    recreate: bool = False,
    report: Report | None = None,
) -> EnvironmentStatus:
    """Build the environment `name`, or finish an interrupted build; do nothing if it is ready.

    Parameters
    ----------
    name : str
        A profile's name.
    python : path, optional
        Interpreter to build from; by default the one that runs kvbench, or one of the versions
        that the profile needs.
    source : str, optional
        For a package that is on no index: a git URL, a git directory or a directory.
    recreate : bool
        Build from nothing even if the environment is ready.
    report : callable, optional
        Gets one line of progress at a time.
    """
    wanted = profile(name)
    tell = report or (lambda _line: None)
    folder = folder_of(wanted)
    with building(name, tell):
        if recreate or _managed(wanted).state != "ready":
            # Before anything is deleted: what is there may still work.
            found = find_python(wanted.oldest, wanted.newest)
            chosen = Path(python).expanduser() if python else found
            builder.supported_version(wanted, chosen)
            fetched = builder.fetch(wanted, folder, source)
            if recreate:
                shutil.rmtree(folder, ignore_errors=True)
            discard_marker(folder)
            builder.build(wanted, folder, chosen, tell, fetched)
    return _managed(wanted)


def check(name: str) -> EnvironmentStatus:
    """Return the state of `name` after running its probe."""
    wanted = profile(name)
    found = _status(wanted)
    if found.state != "ready" or found.python is None:
        return found
    problem = builder.probe(wanted, found.python)
    if problem is None:
        return found
    mend = f"{wanted.create_command()} --recreate"
    if found.source != "managed":
        mend = f"unset {found.source}; {wanted.create_command()}"
    return EnvironmentStatus(
        name, wanted.summary, "broken", found.source, found.python, problem, mend
    )


def list_environments() -> list[EnvironmentStatus]:
    """Return the state of every profile, without running probes."""
    return [_status(each) for each in PROFILES.values()]


def remove(name: str, *, report: Report | None = None) -> list[Path]:
    """Delete every managed environment of `name`, of this lock and earlier ones.

    Returns
    -------
    list of Path
        The folders that were deleted.
    """
    profile(name)
    with building(name, report or (lambda _line: None)):
        folders = folders_of_name(name)
        for folder in folders:
            shutil.rmtree(folder)
            folder.with_name(f"{folder.name}.log").unlink(missing_ok=True)
            shutil.rmtree(folder.with_name(f"{folder.name}-source"), ignore_errors=True)
    return folders


def python_of(name: str) -> Path:
    """Return the interpreter of `name`.

    Raises
    ------
    PrerequisiteError
        The environment is not there; the message holds the command that creates it.
    """
    found = _status(profile(name))
    if found.state != "ready" or found.python is None:
        what = "not found" if found.state == "missing" else found.state
        raise PrerequisiteError(f"{name} environment {what}; create it with: {found.mend}")
    return found.python


def _status(wanted: Profile) -> EnvironmentStatus:
    own = overridden(wanted.name)
    if own is None:
        return _managed(wanted)
    source = override_variable(wanted.name)
    return EnvironmentStatus(wanted.name, wanted.summary, "ready", source, own, str(own))


def _managed(wanted: Profile) -> EnvironmentStatus:
    folder = folder_of(wanted)
    marker = read_marker(folder)
    if marker is None or not interpreter(folder).exists():
        return _not_ready(wanted, folder)
    return EnvironmentStatus(
        name=wanted.name,
        summary=wanted.summary,
        state="ready",
        source="managed",
        python=interpreter(folder),
        detail=str(folder),
        packages=marker.packages,
        folder=folder,
    )


def _not_ready(wanted: Profile, folder: Path) -> EnvironmentStatus:
    mend = wanted.create_command()
    state: State = "missing"
    detail = f"nothing at {folder}"
    if folder.exists():
        state, detail = "unfinished", f"an interrupted build at {folder}"
    elif older := folders_of_name(wanted.name):
        state, detail = "outdated", f"built from an earlier lock: {older[-1]}"
    return EnvironmentStatus(wanted.name, wanted.summary, state, "managed", None, detail, mend)


def _size_mb(folder: Path) -> int:
    files = (p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    return sum(p.stat().st_size for p in files) >> 20
