"""A task that does what a test says, and engines that the test holds in its hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from agentbench_kv.adapters.base import Outcome, Sample, ScriptedAgent, Task, TrialContext
from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.store import RunStore
from agentbench_kv.run import runner
from agentbench_kv.run.spec import RunSpec, resolve

Behave = Callable[[str, int, TrialContext], Outcome]


def scripted_spec(**changes: Any) -> RunSpec:
    values = {
        "engine": "scripted",
        "model": "gold",
        "method": "full",
        "budget": None,
        "task": "micro/recall-1k",
        "limit": 6,
        **changes,
    }
    return resolve(RunSpec(**values), {})


class Told(Task):
    """Does in every trial what the test says; counts how often each sample was tried."""

    name: ClassVar[str] = "told"
    summary: ClassVar[str] = ""

    def __init__(self, behave: Behave, ids: Sequence[str], texts: Sequence[str]) -> None:
        self._behave = behave
        self._ids = ids
        self._texts = list(texts)
        self._tries: dict[str, int] = {}
        self._lock = threading.Lock()
        self.closed = 0

    def samples(self, limit: int | None, seed: int) -> list[Sample]:  # noqa: ARG002
        return [Sample(id=name) for name in self._ids[:limit]]

    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:
        with self._lock:
            self._tries[sample.id] = self._tries.get(sample.id, 0) + 1
        return self._behave(sample.id, self._tries[sample.id], context)

    def script(self, sample: Sample, agent: ScriptedAgent) -> list[str]:  # noqa: ARG002
        number = str(self._ids.index(sample.id))
        return [text.replace("{number}", number) for text in self._texts]

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def spec() -> Callable[..., RunSpec]:
    """Return a function that resolves a spec of the scripted engine."""
    return scripted_spec


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Task]:
    """Make the runner play a task that behaves as told; the task has a server if it needs one."""

    def tell(
        behave: Behave,
        ids: Sequence[str] = ("x-0", "x-1", "x-2", "x-3"),
        texts: Sequence[str] = ("hello",),
        endpoint: bool = False,
    ) -> Task:
        task = Told(behave, ids, texts)
        task.needs_endpoint = endpoint  # type: ignore[misc]
        monkeypatch.setattr(task, "create", lambda _: task, raising=False)
        monkeypatch.setattr(runner, "load_task", lambda _: task)
        return task

    return tell


@pytest.fixture
def play(told: Callable[..., Task], tmp_path: Path) -> Callable[..., dict[str, TrialRecord]]:
    """Return a function that plays trials as told and returns the records by sample id."""

    def run(
        behave: Behave,
        ids: Sequence[str] = ("x-0", "x-1", "x-2", "x-3"),
        texts: Sequence[str] = ("hello",),
        endpoint: bool = False,
        **changes: Any,
    ) -> dict[str, TrialRecord]:
        told(behave, ids, texts, endpoint)
        one = scripted_spec(limit=None, **changes)
        runner.run_one(one, tmp_path, lambda *_: None)
        return {record.sample_id: record for record in RunStore(tmp_path).find(one.id).trials()}

    return run


@pytest.fixture
def use_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[ScriptedEngine]]:
    """Return a function that makes the runner start `kind`, and lists what it started."""

    def use(kind: Callable[..., ScriptedEngine], **options: Any) -> list[ScriptedEngine]:
        path = Path(str(files("agentbench_kv.models"))) / "micro"
        started: list[ScriptedEngine] = []

        def start(_: str, engine_options: EngineOptions, __: Any) -> ScriptedEngine:
            started.append(kind(engine_options.scripts, tokenizer_path=path, **options))
            return started[-1]

        monkeypatch.setattr("agentbench_kv.run.engines.start_engine", start)
        return started

    return use


@pytest.fixture
def ask() -> Callable[..., httpx.Response]:
    """Return a function that asks over HTTP, as a worker does that knows no more than that."""

    def post(context: TrialContext, text: str = "hello") -> httpx.Response:
        return httpx.post(
            f"{context.endpoint}/chat/completions",
            json={"model": "gold", "messages": [{"role": "user", "content": text}]},
            headers={"X-KVBench-Session": context.session},
            timeout=30,
        )

    return post
