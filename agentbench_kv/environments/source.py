"""Packages that are on no index: exported from their own repository, at the pinned version."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentbench_kv.errors import PrerequisiteError

_GIT_S = 600


@dataclass(frozen=True)
class Source:
    """One version of a package that pip cannot find by name.

    Of the repository only `files` (at the root) and `folder` (the code) are exported. Nothing else
    is read, so a partial clone will do.
    """

    distribution: str  # name, version and description as its `pyproject.toml` says
    version: str
    description: str
    url: str  # public repository, and the pinned version in it
    tag: str
    commit: str
    namesake: str  # what an index holds under the same name
    environment: str = ""  # profile that installs it; named as the distribution if not given
    files: tuple[str, ...] = ("pyproject.toml", "README.md", "LICENSE")
    folder: str = "src"

    def create_command(self) -> str:
        return f"kvbench env create {self.environment or self.distribution} --from {self.url}"


def export(source: Source, given: str | None, target: Path) -> str:
    """Empty `target` and put the pinned version's files there; return what was exported.

    `given` is a git URL, a git directory (bare or not), or an unpacked directory; PrerequisiteError
    if nothing was given, an index was asked for, or what is there is something else.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    place = _place(source, given)
    if isinstance(place, str):
        with tempfile.TemporaryDirectory(prefix="kvbench-clone-") as folder:
            clone = ("clone", "--quiet", "--bare", "--depth", "1", "--branch", source.tag)
            _git(source, (*clone, place, f"{folder}/clone"))
            about = _from_git(source, Path(folder) / "clone", target)
    elif _is_git(place):
        about = _from_git(source, place, target)
    else:
        about = _from_directory(source, place, target)
    _check_project(source, target, str(given))
    return about


def _place(source: Source, given: str | None) -> Path | str:
    name, command = source.distribution, source.create_command()
    if not given:
        raise PrerequisiteError(
            f"{name} is installed from its repository ({source.namesake}); say where it is, "
            f"a git URL, a git directory or a directory: {command}"
        )
    if "://" in given or re.match(r"[\w.-]+@[\w.-]+:", given):
        return given.removeprefix("git+")
    path = Path(given).expanduser().absolute()
    if path.is_dir():
        return path
    if re.match(rf"(pypi:)?{re.escape(name)}\s*([=<>!~\[@].*)?$", given, re.IGNORECASE):
        raise PrerequisiteError(
            f"{given!r} names the project on PyPI, but {source.namesake}; use: {command}"
        )
    raise PrerequisiteError(f"--from {given}: neither a directory nor a URL; use: {command}")


def _is_git(path: Path) -> bool:
    bare = (path / "HEAD").is_file() and (path / "objects").is_dir()
    return bare or (path / ".git").exists()


def _from_git(source: Source, repository: Path, target: Path) -> str:
    at = ("-c", "safe.directory=*", "-C", str(repository))
    named = (*at, "rev-parse", "--verify", "--quiet", f"{source.tag}^{{commit}}")
    found = _git(source, named).decode().strip()
    if found != source.commit:
        raise PrerequisiteError(
            f"{repository}: tag {source.tag} is {found[:12]}, expected {source.commit[:12]}; "
            f"use: {source.create_command()}"
        )
    # The code's own tree, not the root with a path: an archive of the root looks at every file,
    # and a partial clone lacks the largest.
    tree = f"{source.commit}:{source.folder}"
    packed = _git(source, (*at, "archive", "--format=tar", f"--prefix={source.folder}/", tree))
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(target, filter="data")
    for name in source.files:
        (target / name).write_bytes(_git(source, (*at, "show", f"{source.commit}:{name}")))
    return f"git {source.tag} {source.commit}"


def _from_directory(source: Source, directory: Path, target: Path) -> str:
    for name in source.files:
        if (directory / name).is_file():
            shutil.copyfile(directory / name, target / name)
    if (directory / source.folder).is_dir():
        shutil.copytree(directory / source.folder, target / source.folder)
    return f"directory, version {source.version}"


def _check_project(source: Source, folder: Path, given: str) -> None:
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        project = {}
    wanted = (source.distribution, source.version, source.description)
    found = tuple(str(project.get(key)) for key in ("name", "version", "description"))
    if found != wanted or not (folder / source.folder).is_dir():
        raise PrerequisiteError(
            f"--from {given} is not {source.distribution} {source.version} (found name, version, "
            f"description: {', '.join(found)}); use: {source.create_command()}"
        )


def _git(source: Source, arguments: Sequence[str]) -> bytes:
    command = ("git", *arguments)
    try:
        run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_S)
    except FileNotFoundError:
        raise PrerequisiteError(
            "git is not installed; install it, or name an unpacked directory with --from"
        ) from None
    except subprocess.TimeoutExpired:
        raise PrerequisiteError(f"git took more than {_GIT_S} s: {' '.join(command)}") from None
    if run.returncode != 0:
        said = run.stderr.decode("utf-8", "replace").strip().splitlines()
        fatal = [line for line in said if line.startswith("fatal:")]
        reason = fatal[0] if fatal else f"no tag {source.tag}"
        raise PrerequisiteError(
            f"git found no {source.distribution} {source.tag} there ({reason}); "
            f"use: {source.create_command()}"
        )
    return run.stdout
