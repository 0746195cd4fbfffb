"""The SGLang environment, or the reason why its tests are skipped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
"""Where `sglang_logits` is imported from."""


@pytest.fixture(scope="session")
def sglang_python(environment_python: Callable[[str], Path]) -> Path:
    return environment_python("sglang")


@pytest.fixture
def in_sglang(sglang_python: Path, in_environment: Callable[..., str]) -> Callable[[str], str]:
    """Run code in the environment, with the stand-ins; returns what it printed."""
    run = partial(in_environment, sglang_python, SGLANG_USE_CPU_ENGINE="1")
    return lambda code: run("import agentbench_kv.engines.sglang.plugin.launch\n" + code)
