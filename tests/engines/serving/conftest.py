"""Stand-ins for engines and their devices."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import fake_engine
from fake_device import refuse_waiting
from vllm_stand_ins import PLUGIN, Runner, stand_ins

from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.engines.serving.engine import ServingEngine, run_server
from agentbench_kv.registry import make_method


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make every wait for the device `meta` an error."""
    with refuse_waiting(monkeypatch):
        yield


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The runner's module, imported above the stand-ins and forgotten again.

    A test module's `RUNNER` stands for vLLM's, if it has one.
    """
    for name, module in stand_ins(getattr(request.module, "RUNNER", Runner)).items():
        monkeypatch.setitem(sys.modules, name, module)
    ours = [f"{PLUGIN}.{name}" for name in ("attention", "runner")]
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(ours[1])
    for name in ours:
        sys.modules.pop(name, None)


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_engine.Build]:
    """Start an engine over a fake whose starts go by `plans`; the last one holds for all others."""
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path / "home"))
    made: list[ServingEngine] = []

    def start(*plans: dict[str, Any], stock: bool = False) -> ServingEngine:
        folder = tmp_path / f"backend{len(made)}"
        folder.mkdir()
        (folder / "starts.json").write_text(json.dumps(plans or [{}]))
        options = EngineOptions("fake", make_method("full" if stock else "full-constrained", None))
        wire = fake_engine.FakeWire(
            options, fake_engine.FACTS, Path(sys.executable), tmp_path, folder, False, stock
        )
        made.append(run_server(ServingEngine, wire, "fake", "sha"))
        return made[-1]

    yield start
    for engine in made:
        engine.shutdown()
