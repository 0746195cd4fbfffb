"""The environment's interpreter, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agentbench_kv.engines.llamacpp.models import environment_of
from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError


@pytest.fixture(scope="session")
def llamacpp_python() -> Path:
    try:
        return python_of("llamacpp")
    except PrerequisiteError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def backend_environment() -> Callable[[], object]:
    return environment_of
