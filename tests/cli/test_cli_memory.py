"""Methods with a memory, where they cannot run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_a_memory_needs_a_past(kvbench: Callable[..., Any], tmp_path: Path) -> None:
    refused = kvbench("run", "--method", "memart", "--limit", "1", "--out", str(tmp_path))
    assert refused.returncode == 2
    assert "has none; use probe/locomo" in refused.stderr
    served = kvbench("serve", "--method", "memart")
    assert served.returncode == 2
    assert "no client can say which" in served.stderr
