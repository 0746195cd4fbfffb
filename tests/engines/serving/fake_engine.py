"""An engine over a fake backend, and what tests do with it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fake_backend
import httpx

from agentbench_kv.engines.base import Sampling
from agentbench_kv.engines.serving.engine import ServingEngine
from agentbench_kv.engines.serving.model_facts import ModelFacts
from agentbench_kv.engines.serving.process import Launch
from agentbench_kv.engines.vllm.engine import VllmEngineWire
from agentbench_kv.phases import TokenPhases

FACTS = ModelFacts("qwen3", 2, 4, 2, 32, 4096, (1,), vocabulary=97)
PROMPT = list(range(20, 60))
Build = Callable[..., ServingEngine]


class FakeWire(VllmEngineWire):
    """vLLM's wire to a server that is not vLLM."""

    def launch(self) -> Launch:
        real = super().launch()
        control = "-" if self.stock else str(self.control)
        command = [sys.executable, fake_backend.__file__, str(self.folder), control]
        return replace(real, command=command, start_s=60.0)


def folder_of(engine: ServingEngine) -> Path:
    return engine._wire.folder


def starts(engine: ServingEngine) -> int:
    return len((folder_of(engine) / "started").read_text())


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def well(engine: ServingEngine) -> bool:
    """Return whether the front end still has what computes behind it.

    The kernel calls a process of several threads a zombie when its first thread is, before its
    parent can tell.
    """
    transport = httpx.HTTPTransport(uds=str(folder_of(engine) / "http"))
    with httpx.Client(transport=transport, base_url="http://front") as client:
        return client.get("/health").status_code == 200


def kill(engine: ServingEngine, who: str) -> None:
    """Kill a part of the backend and wait until it is dead."""
    core, front = int((folder_of(engine) / "core.pid").read_text()), engine.backend_pid
    assert front is not None
    if who == "group":
        os.killpg(front, signal.SIGKILL)
    else:
        os.kill(core if who == "core" else front, signal.SIGKILL)
    while well(engine) if who == "core" else runs(front):
        time.sleep(0.005)


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(fake_backend.next_token(tokens))
    return tokens[len(prompt) :]


def extend(engine: ServingEngine, name: str, tokens: list[int]) -> None:
    engine.extend(name, tokens, [TokenPhases().label(token) for token in tokens])


def turn(engine: ServingEngine, name: str, tokens: list[int], count: int) -> list[int]:
    extend(engine, name, tokens)
    return list(engine.generate(name, Sampling(count)))
