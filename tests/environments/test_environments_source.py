"""A package from its own repository: what is exported, and what is refused."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentbench_kv import environments
from agentbench_kv.cli.env import env
from agentbench_kv.environments import build
from agentbench_kv.environments import profiles as source
from agentbench_kv.environments.profiles import PROFILES, TAU2, TAU2_V1, Repository, export
from agentbench_kv.errors import PrerequisiteError

PROJECT = '[project]\nname = "small"\nversion = "1.2"\ndescription = "made"\n'


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    run = subprocess.run(
        ("git", *who, "-C", str(folder), *arguments), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Make a git work tree with a tag, and a later commit that must not be taken."""
    root = tmp_path / "project"
    (root / "src" / "small").mkdir(parents=True)
    for name, text in (("pyproject.toml", PROJECT), ("README.md", ""), ("LICENSE", "")):
        (root / name).write_text(text)
    (root / "src" / "small" / "__init__.py").write_text("VALUE = 1\n")
    (root / "data").mkdir()
    (root / "data" / "big").write_text("not exported")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "one")
    git(root, "tag", "v1.2")
    (root / "src" / "small" / "__init__.py").write_text("VALUE = 2\n")
    git(root, "commit", "--quiet", "-a", "-m", "two")
    return root


@pytest.fixture
def small(project: Path) -> Repository:
    return Repository(
        distribution="small",
        version="1.2",
        description="made",
        url="https://example.org/small",
        tag="v1.2",
        commit=git(project, "rev-parse", "v1.2"),
        namesake="the small on PyPI is another",
    )


def exported(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


WANTED = {"pyproject.toml", "README.md", "LICENSE", "src/small/__init__.py"}


@pytest.mark.parametrize("form", ["work tree", "bare", "url"])
def test_git_gives_the_tag_and_only_what_is_needed(
    small: Repository, project: Path, tmp_path: Path, form: str
) -> None:
    given = str(project)
    if form == "bare":
        given = str(tmp_path / "bare")
        git(project, "clone", "--quiet", "--bare", ".", given)
    elif form == "url":
        given = project.as_uri()
    target = tmp_path / "target"
    assert export(small, given, target) == f"git v1.2 {small.commit}"
    assert exported(target) == WANTED
    assert (target / "src/small/__init__.py").read_text() == "VALUE = 1\n"


def test_a_missing_large_file_elsewhere_does_no_harm(
    small: Repository, project: Path, tmp_path: Path
) -> None:
    blob = git(project, "rev-parse", "v1.2:data/big")
    (project / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    export(small, str(project), tmp_path / "target")
    assert exported(tmp_path / "target") == WANTED


def test_an_unpacked_directory_is_copied(small: Repository, project: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    project.rename(plain)
    subprocess.run(("rm", "-r", str(plain / ".git")), check=True)
    target = tmp_path / "target"
    target.mkdir()
    (target / "left over").touch()
    assert export(small, str(plain), target) == "directory, version 1.2"
    assert exported(target) == WANTED


def test_files_of_another_content_are_refused(
    small: Repository, project: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    export(small, str(project), target)
    pinned = replace(small, sha256=source.content_sha256(target))
    plain = tmp_path / "plain"
    export(pinned, str(project), plain)
    (plain / "src/small/__pycache__").mkdir()
    (plain / "src/small/__pycache__/x.pyc").touch()
    export(pinned, str(plain), target)
    (plain / "src/small/__init__.py").write_text("VALUE = 1  # and more\n")
    with pytest.raises(PrerequisiteError, match=r"its files are not those of small v1\.2"):
        export(pinned, str(plain), target)


@pytest.mark.parametrize("given", ["small", "small==1.2", "pypi:small", "SMALL>=1", None, ""])
def test_the_index_is_refused_by_name(small: Repository, tmp_path: Path, given: str | None) -> None:
    with pytest.raises(PrerequisiteError, match="the small on PyPI is another") as caught:
        export(small, given, tmp_path / "target")
    assert "kvbench env create small --from https://example.org/small" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_there_is_refused(small: Repository, project: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    with pytest.raises(PrerequisiteError, match="neither a directory nor a URL"):
        export(small, str(tmp_path / "absent"), target)
    with pytest.raises(PrerequisiteError, match=r"no small v1\.2 there .*absent"):
        export(small, (tmp_path / "absent").as_uri(), target)
    git(project, "tag", "-d", "v1.2")
    with pytest.raises(PrerequisiteError, match=r"no small v1\.2 there \(no tag v1\.2\)"):
        export(small, str(project), target)
    git(project, "tag", "v1.2")
    with pytest.raises(PrerequisiteError, match=r"tag v1\.2 is .*, expected "):
        export(small, str(project), target)


def test_another_version_is_refused(small: Repository, project: Path, tmp_path: Path) -> None:
    newer = replace(small, version="2.0")
    with pytest.raises(PrerequisiteError, match=r"is not small 2\.0 .*small, 1\.2, made"):
        export(newer, str(project), tmp_path / "target")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(PrerequisiteError, match=r"is not small 1\.2"):
        export(small, str(empty), tmp_path / "target")


def test_without_git(small: Repository, project: Path, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def absent(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(source.subprocess, "run", absent)
    with pytest.raises(PrerequisiteError, match="git is not installed"):
        export(small, str(project), tmp_path / "target")


@pytest.fixture
def empty_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KVBENCH_ENV_TAU2", raising=False)
    monkeypatch.setattr(build, "_run_logged", lambda *_: pytest.fail("something was built"))
    return tmp_path


@pytest.mark.usefixtures("empty_home")
def test_tau2_needs_a_place_and_the_list_says_so() -> None:
    listed = CliRunner().invoke(env, ["list"]).output
    assert f"mend with: {TAU2.create_command()}" in listed
    result = CliRunner().invoke(env, ["create", "tau2"])
    assert isinstance(result.exception, PrerequisiteError)
    assert "magnetic relaxation" in str(result.exception)
    named = CliRunner().invoke(env, ["create", "tau2", "--from", "tau2==2.4.0"])
    assert "'tau2==2.4.0' names the project on PyPI" in str(named.exception)


@pytest.mark.usefixtures("empty_home")
def test_a_profile_without_a_source_takes_none() -> None:
    with pytest.raises(PrerequisiteError, match="bfcl takes no --from"):
        environments.create("bfcl", source="https://example.org/x")


def test_recreate_with_a_wrong_place_deletes_nothing(empty_home: Path) -> None:
    folder = empty_home / "home" / "envs" / PROFILES["tau2"].folder_name()
    folder.mkdir(parents=True)
    (folder / "witness").touch()
    with pytest.raises(PrerequisiteError):
        environments.create("tau2", source=str(empty_home / "absent"), recreate=True)
    assert (folder / "witness").exists()


def test_the_two_releases_are_two_environments(empty_home: Path) -> None:
    old, new = PROFILES["tau2"], PROFILES["tau2-v1"]
    assert new.create_command() == f"kvbench env create tau2-v1 --from {TAU2.url}"
    assert (old.oldest, new.oldest, new.newest) == ((3, 11), (3, 12), (3, 13))
    folders = [empty_home / "home" / "envs" / each.folder_name() for each in (old, new)]
    for folder in folders:
        folder.mkdir(parents=True)
    environments.remove("tau2")
    assert [folder.exists() for folder in folders] == [False, True]


@pytest.mark.usefixtures("empty_home")
def test_the_other_release_is_refused(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    (plain / "src").mkdir(parents=True)
    about = f'name = "tau2"\nversion = "{TAU2.version}"\ndescription = "{TAU2.description}"\n'
    (plain / "pyproject.toml").write_text(f"[project]\n{about}")
    with pytest.raises(PrerequisiteError, match=r"is not tau2 1\.0\.1 .*create tau2-v1 --from"):
        export(TAU2_V1, str(plain), tmp_path / "target")


@pytest.mark.parametrize(("name", "backend"), [("tau2", "pdm-backend"), ("tau2-v1", "hatchling")])
def test_the_lock_pins_everything_exactly(name: str, backend: str) -> None:
    lines = PROFILES[name].lock.read_text().splitlines()
    pins = [line for line in lines if line and line[0] not in "# "]
    assert all(pin.count("==") == 1 and "@" not in pin for pin in pins)
    names = {pin.partition("==")[0].lower() for pin in pins}
    assert {"litellm", backend} <= names
    assert not {"tau2", "torch"} & names
