"""Stand-ins for engines and their devices."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_device import refuse_waiting
from vllm_stand_ins import PLUGIN, Runner, stand_ins


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
