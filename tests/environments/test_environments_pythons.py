"""Which interpreter is taken where kvbench's own will not do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentbench_kv.environments.build import find_python, version_of

HERE = sys.version_info[:2]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the machine no Python but what a test puts into the folder that is returned."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return tmp_path


def pretend(path: Path, says: str, code: int = 0) -> Path:
    """Write something that answers as an interpreter would when asked for its version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {says}\nexit {code}\n")
    path.chmod(0o755)
    return path


def test_kvbenchs_own_is_taken_if_it_will_do(machine: Path) -> None:
    pretend(machine / "python9.1", "9 1")
    assert find_python(HERE, (9, 9)) == Path(sys.executable)


def test_the_path_is_searched_older_versions_first(machine: Path) -> None:
    wanted = pretend(machine / "python9.1", "9 1")
    pretend(machine / "python9.2", "9 2")
    assert find_python((9, 0), (9, 2)) == wanted


def test_what_does_not_run_or_is_another_version_is_passed_over(machine: Path) -> None:
    pretend(machine / "python9.0", "not installed", 127)
    pretend(machine / "python9.1", "8 1")
    wanted = pretend(machine / "pyenv/versions/9.1.4/bin/python", "9 1")
    assert find_python((9, 0), (9, 1)) == wanted


def test_none_at_all_is_kvbenchs_own_for_the_message(machine: Path) -> None:
    assert machine.is_dir()
    assert find_python((9, 0), (9, 1)) == Path(sys.executable)


def test_versions(machine: Path) -> None:
    assert version_of(Path(sys.executable)) == HERE
    assert version_of(machine / "absent") is None
