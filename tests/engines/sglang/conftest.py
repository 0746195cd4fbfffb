"""The SGLang environment, or the reason why its tests are skipped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

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


@pytest.fixture
def session_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for what SGLang's sessions are made of."""
    nodes = ModuleType("sglang.srt.session.session_controller")
    requests = ModuleType("sglang.srt.managers.io_struct")
    nodes.SessionReqNode = lambda req: SimpleNamespace(req=req)  # type: ignore[attr-defined]
    requests.OpenSessionReqInput = SimpleNamespace  # type: ignore[attr-defined]
    for module in (nodes, requests):
        monkeypatch.setitem(sys.modules, module.__name__, module)
