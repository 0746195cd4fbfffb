"""Create, look at and remove managed environments."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from agentbench_kv.environments import build as builder
from agentbench_kv.environments.build import MARKER_FILE, find_python, read_marker
from agentbench_kv.environments.locations import (
    Report,
    builder_of,
    building,
    folder_of,
    folders_of_name,
    interpreter,
    overridden,
    override_variable,
)
from agentbench_kv.environments.profiles import PROFILES, Profile, profile
from agentbench_kv.errors import PrerequisiteError


@dataclass(frozen=True)
class EnvironmentStatus:
    """What is known of one environment."""

    name: str
    summary: str
    # building: by another process, now; unfinished: a build was interrupted; outdated: built from
    # an earlier lock; broken: the probe failed.
    state: Literal["ready", "missing", "building", "unfinished", "outdated", "broken"]
    source: str  # `managed`, or the environment variable that names the user's own Python
    python: Path | None
    detail: str  # what was found
    mend: str | None = None  # the command that makes it ready
    packages: dict[str, str] = field(default_factory=dict)  # versions, for managed environments
    folder: Path | None = None  # of a managed environment

    @cached_property
    def size_mb(self) -> int | None:
        """Disk space of a managed environment: every file is looked at, for seconds at worst."""
        if self.folder is None:
            return None
        files = (p for p in self.folder.rglob("*") if p.is_file() and not p.is_symlink())
        return sum(p.stat().st_size for p in files) >> 20

    def as_dict(self) -> dict[str, Any]:
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

    Without `python` it is built from the interpreter that runs kvbench, or one of the versions that
    the profile needs. `source` is for a package that is on no index: a git URL, a git directory or
    a directory.
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
            (folder / MARKER_FILE).unlink(missing_ok=True)
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
    create, managed = wanted.create_command(), found.source == "managed"
    mend = f"{create} --recreate" if managed else f"unset {found.source}; {create}"
    plain = replace(found, packages={}, folder=None)
    return replace(plain, state="broken", detail=problem, mend=mend)


def list_environments() -> list[EnvironmentStatus]:
    """Return the state of every profile, without running probes."""
    return [_status(each) for each in PROFILES.values()]


def remove(name: str, *, report: Report | None = None) -> list[Path]:
    """Delete every managed environment of `name`, of this lock and earlier ones; return which."""
    profile(name)
    with building(name, report or (lambda _line: None)):
        folders = folders_of_name(name)
        for folder in folders:
            shutil.rmtree(folder)
            folder.with_name(f"{folder.name}.log").unlink(missing_ok=True)
            shutil.rmtree(folder.with_name(f"{folder.name}-source"), ignore_errors=True)
    return folders


def python_of(name: str) -> Path:
    """Return the interpreter of `name`; PrerequisiteError with the command that creates it."""
    found = _status(profile(name))
    if found.state != "ready" or found.python is None:
        what = {"missing": "not found", "building": "being built"}.get(found.state, found.state)
        raise PrerequisiteError(f"{name} environment {what}; create it with: {found.mend}")
    return found.python


def _status(wanted: Profile) -> EnvironmentStatus:
    own = overridden(wanted.name)
    if own is None:
        return _managed(wanted)
    source = override_variable(wanted.name)
    return EnvironmentStatus(wanted.name, wanted.summary, "ready", source, own, str(own))


def _managed(wanted: Profile) -> EnvironmentStatus:
    name, summary, folder = wanted.name, wanted.summary, folder_of(wanted)
    marker, python = read_marker(folder), interpreter(folder)
    if marker is not None and python.exists():
        return EnvironmentStatus(
            name, summary, "ready", "managed", python, str(folder), None, marker.packages, folder
        )
    missing = EnvironmentStatus(
        name, summary, "missing", "managed", None, f"nothing at {folder}", wanted.create_command()
    )
    if who := builder_of(name):
        log = folder.with_name(f"{folder.name}.log")
        detail = f"another process builds it ({who}; {log}); the command waits for it"
        return replace(missing, state="building", detail=detail)
    if folder.exists():
        return replace(missing, state="unfinished", detail=f"an interrupted build at {folder}")
    if older := folders_of_name(name):
        return replace(missing, state="outdated", detail=f"built from an earlier lock: {older[-1]}")
    return missing
