"""Tiny random decoders of every supported family, and helpers to drive an engine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentbench_kv.engines.base import EngineOptions, Sampling
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.serving.process import link_packages
from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.methods.base import Phase
from agentbench_kv.phases import TokenPhases
from agentbench_kv.registry import make_method


@pytest.fixture(scope="session")
def environment_python() -> Callable[[str], Path]:
    """The interpreter of a managed environment; skips with the reason if there is none."""

    def find(name: str) -> Path:
        try:
            return python_of(name)
        except PrerequisiteError as error:
            pytest.skip(str(error))

    return find


@pytest.fixture
def in_environment(tmp_path: Path) -> Callable[..., str]:
    """Run code in an environment's interpreter, with our package; returns what it printed."""

    def run(python: Path, code: str, **variables: str) -> str:
        path = link_packages(tmp_path / "path", [], {})
        done = subprocess.run(
            [str(python), "-c", code],
            env={**os.environ, "PYTHONPATH": str(path), "PYTHONSAFEPATH": "1", **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run


SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}


def tiny(family: str, seed: int = 0, **overrides: Any) -> Any:
    """A random decoder with logits far enough apart for argmax to be robust."""
    torch.manual_seed(seed)
    sizes = {**SIZES, **overrides}
    made = {
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**sizes)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(head_dim=8, **sizes)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(sliding_window=None, **sizes)),
    }[family]()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    return made.eval()


@pytest.fixture
def survives_a_kill() -> Callable[[Any, str], None]:
    """Kill a part of a micro model's backend, by a word of its title, within an answer.

    The engine is shut down afterwards.
    """

    def part(group: int, word: str) -> int:
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                pid = int(entry.name)
                title = (entry / "cmdline").read_bytes().decode(errors="replace")
                if os.getpgid(pid) == group and word in title:
                    return pid
        raise AssertionError(f"no process of the backend is called {word}")

    def answer(engine: Any, victim: str = "") -> tuple[list[int], Any]:
        prompt = [10 + i * i % 500 for i in range(200)]
        engine.open("k", TokenPhases())
        engine.extend("k", prompt, [TokenPhases().label(token) for token in prompt])
        said: list[int] = []
        # Far more tokens than a server can have written ahead of its reader.
        for token in engine.generate("k", Sampling(max_tokens=1500)):
            said.append(token)
            if victim and len(said) == 10:
                os.kill(part(engine.backend_pid, victim), signal.SIGKILL)
        return said, engine.close("k")

    def check(engine: Any, word: str) -> None:
        with contextlib.ExitStack() as started:
            alone = EmbeddedEngine.create(
                EngineOptions("micro", make_method("full", None), device="cpu")
            )
            for each in (alone, engine):
                started.callback(each.shutdown)
            expected, _ = answer(alone)
            said, stats = answer(engine, word)
        assert said == expected
        assert engine.restarts == 1
        assert stats.recomputed == stats.restarts[0][1] - 1 >= 209

    return check


class ModuloPhase:
    """Labels a token by its id, so that all phases occur."""

    def label(self, token: int) -> Phase:
        return Phase(token % 4)


def start(engine: EmbeddedEngine, name: str, ids: list[int]) -> None:
    """Open a session and queue its prompt."""
    engine.open(name, ModuloPhase())
    engine.extend(name, ids, [Phase(token % 4) for token in ids])


@pytest.fixture
def make_engine() -> Iterator[Callable[..., EmbeddedEngine]]:
    """Build engines over tiny models; shut down afterwards."""
    made: list[EmbeddedEngine] = []

    def build(
        model: Any = None,
        method: str = "full",
        budget: int | None = None,
        settings: dict[str, Any] | None = None,
        recorder: Any = None,
        **options: Any,
    ) -> EmbeddedEngine:
        chosen = EngineOptions(
            model="tiny", method=make_method(method, budget, settings), **options
        )
        network = tiny("qwen3") if model is None else model
        engine = EmbeddedEngine.create(chosen, model=network, recorder=recorder)
        made.append(engine)
        return engine

    yield build
    for engine in made:
        engine.shutdown()


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    return tiny


@pytest.fixture
def start_session() -> Callable[[EmbeddedEngine, str, list[int]], None]:
    return start
