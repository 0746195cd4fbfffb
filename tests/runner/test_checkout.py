"""Which commit a run says that its code is."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from agentbench_kv.run.checkout import commit_of
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


def test_changes_are_noted_and_told_apart(package: Path) -> None:
    """A run of edited code said that it was the commit's."""
    commit = git(package, "rev-parse", "HEAD")
    more, new = package / "more.py", package / "néw one.py"
    was = more.read_text()
    found = [commit]
    more.write_text("1\n")
    found.append(commit_of(package))
    git(package, "add", "more.py")
    assert commit_of(package) == found[-1]  # staged or not
    more.write_text("2\n")
    found.append(commit_of(package))
    more.write_text(was)
    git(package, "add", "more.py")
    assert commit_of(package) == commit
    new.write_text("1\n")
    found.append(commit_of(package))
    new.write_text("2\n")
    found.append(commit_of(package))
    new.unlink()
    more.unlink()
    found.append(commit_of(package))
    git(package, "mv", "__init__.py", "other.py")
    (package / "__init__.py").write_text("")
    git(package, "add", "__init__.py")
    found.append(commit_of(package))
    assert len(set(found)) == len(found) == 7
    for each in found[1:]:
        assert each is not None
        head, plus, digits = each.partition("+")
        assert (head, plus) == (commit, "+")
        assert len(digits) == 8
        int(digits, 16)


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
    assert environment()["git_commit"] is None
    assert [path.name for path in seen] == ["agentbench_kv"]
