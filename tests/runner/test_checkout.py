"""Which commit a run says that its code is."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentbench_kv.run.checkout import CHANGED, code_sha, commit_of
from agentbench_kv.run.provenance import environment


def git(folder: Path, *words: str) -> str:
    own = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", "-C", str(folder), *own, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a package of two files, in a checkout whose path has a space and a stranger's word."""
    made = tmp_path / "a chéckout" / "package"
    made.mkdir(parents=True)
    git(made.parent, "init", "-q")
    for name in ("__init__.py", "more.py"):
        (made / name).write_text(f'"""{name}"""\n')
    (made.parent / ".gitignore").write_text("__pycache__\n")
    (made.parent / "README.md").write_text("of no consequence\n")
    git(made.parent, "add", ".")
    git(made.parent, "commit", "-qm", "first")
    return made


def test_the_commit_of_code_without_changes(package: Path) -> None:
    commit = git(package, "rev-parse", "HEAD")
    assert commit_of(package) == commit
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "more.pyc").write_bytes(b"1")
    (package.parent / "README.md").write_text("changed\n")
    assert commit_of(package) == commit


def states(package: Path) -> Iterator[str]:
    """Change a package in one way after another, each from the state before it; name the ways."""
    more, new = package / "more.py", package / "néw one.py"
    was = more.read_text()
    more.write_text("1\n")
    yield "edited"
    more.write_text("2\n")
    yield "edited otherwise"
    more.write_text(was)
    new.write_text("1\n")
    yield "a new file"
    new.write_text("2\n")
    yield "another new file"
    new.unlink()
    more.unlink()
    yield "a file removed"
    (package / "other.py").write_text(was)
    yield "a file renamed"


def test_changes_are_noted(package: Path) -> None:
    """A run of edited code said that it was the commit's."""
    commit = git(package, "rev-parse", "HEAD")
    seen = [commit_of(package) for _ in states(package)]
    assert seen == [commit + CHANGED] * 6
    git(package, "add", ".")
    assert commit_of(package) == commit + CHANGED  # staged or not


@pytest.mark.parametrize("tracked", [True, False])
def test_code_is_told_apart_with_or_without_a_checkout(package: Path, tracked: bool) -> None:
    """Edits of an installed package left no trace."""
    first = code_sha(package)
    if not tracked:
        package = package.rename(package.parent.parent / "installed")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "more.pyc").write_bytes(b"1")
    (package / ".more.py.swp").write_bytes(b"1")
    assert code_sha(package) == first
    assert re.fullmatch("[0-9a-f]{16}", first)
    found = [first, *[code_sha(package) for _ in states(package)]]
    assert len(set(found)) == len(found) == 7


def test_what_a_file_says_is_not_taken_for_a_name(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, files in ((one, {"a": b"bc"}), (two, {"ab": b"c"})):
        folder.mkdir()
        for name, held in files.items():
            (folder / name).write_bytes(held)
    assert code_sha(one) != code_sha(two)


def test_the_commit_of_somebody_elses_checkout_is_not_ours(package: Path) -> None:
    """An environment in a user's project gave that project's commit."""
    installed = package.parent / ".venv" / "package"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert commit_of(installed) is None


def test_no_commit_without_a_checkout_or_without_git(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "__init__.py").write_text("")
    assert commit_of(tmp_path) is None
    assert commit_of(package) is not None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(package) is None


def test_a_run_notes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("agentbench_kv.run.provenance.commit_of", seen.append)
    noted = environment()
    assert noted["git_commit"] is None
    assert noted["code_sha"] == code_sha(seen[0])
    assert [path.name for path in seen] == ["agentbench_kv"]
