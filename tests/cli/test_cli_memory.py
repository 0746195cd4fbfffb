"""Methods with a memory, where they cannot run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_a_memory_needs_a_past(kvbench: Callable[..., Any], tmp_path: Path) -> None:
    refused = kvbench("run", "--method", "memart", "--limit", "1", "--out", str(tmp_path))
    assert refused.returncode == 2
    assert "has none; use micro/memory, probe/locomo" in refused.stderr
    served = kvbench("serve", "--method", "memart")
    assert served.returncode == 2
    assert "no client can say which" in served.stderr


@pytest.mark.parametrize("method", ["mem0", "graphiti"])
def test_a_package_that_is_not_there_is_one_line(
    kvbench: Callable[..., Any], tmp_path: Path, method: str
) -> None:
    asked = ("run", "--method", method, "--task", "probe/locomo", "--limit", "1")
    refused = kvbench(*asked, "--out", str(tmp_path), KVBENCH_HOME=str(tmp_path / "empty"))
    assert refused.returncode == 2
    assert f"kvbench env create {method}" in refused.stderr
    assert "Traceback" not in refused.stderr
