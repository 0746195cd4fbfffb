"""The SGLang environment, or the reason why its tests are skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentbench_kv.engines.serving.links import link_packages
from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError

sys.path.insert(0, str(Path(__file__).parent))
"""Where `sglang_logits` is imported from."""


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    try:
        return python_of("sglang")
    except PrerequisiteError as error:
        pytest.skip(str(error))


@pytest.fixture
def in_sglang(sglang_python: Path, tmp_path: Path) -> Callable[[str], str]:
    """Run code in the environment, with the stand-ins; returns what it printed."""

    def run(code: str) -> str:
        path = link_packages(tmp_path / "path", [], {})
        own = {"PYTHONPATH": str(path), "SGLANG_USE_CPU_ENGINE": "1", "PYTHONSAFEPATH": "1"}
        done = subprocess.run(
            [
                str(sglang_python),
                "-c",
                "import agentbench_kv.engines.sglang.backend.launch\n" + code,
            ],
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run
