"""Running the command line as a user does: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Result = subprocess.CompletedProcess[str]


@pytest.fixture
def kvbench(tmp_path: Path) -> Callable[..., Result]:
    """Return a function that runs `kvbench ARGS` in an empty folder."""

    def call(*args: str, timeout: float = 600, **environment: str) -> Result:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("KVBENCH_")}
        return subprocess.run(
            [sys.executable, "-c", "from agentbench_kv.cli import main; main()", *args],
            cwd=tmp_path,
            env={**clean, "OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return call
