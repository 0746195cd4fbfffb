"""Benchmarks behind HTTP: they see a failed request, the records say why."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from agentbench_kv.adapters.base import Outcome, Sample, ScriptedAgent, Task, TrialContext
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.results.records import TrialStatus
from agentbench_kv.results.store import RunStore
from agentbench_kv.run import runner, spec
from agentbench_kv.run.spec import RunSpec


class Worker(Task):
    """Asks once over HTTP; any error is the engine's, for all it knows."""

    name: ClassVar[str] = "worker"
    summary: ClassVar[str] = ""
    needs_endpoint: ClassVar[bool] = True
    body: ClassVar[dict[str, Any]] = {"messages": [{"role": "user", "content": "hi"}]}
    route: ClassVar[str] = "chat/completions"

    def samples(self, limit: int | None, seed: int) -> list[Sample]:  # noqa: ARG002
        return [Sample(id=f"x-{i}") for i in range(3)][:limit]

    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:  # noqa: ARG002
        base = f"{context.endpoint}"
        model = httpx.get(f"{base}/models", timeout=60).json()["data"][0]["id"]
        headers = {"X-KVBench-Session": context.session}
        body = {"model": model, **self.body}
        answer = httpx.post(f"{base}/{self.route}", json=body, headers=headers, timeout=60)
        if answer.status_code != 200:
            return Outcome(TrialStatus.ENGINE_ERROR, error=f"HTTP {answer.status_code}")
        return Outcome(TrialStatus.SCORED, score=1.0)

    def script(self, sample: Sample, agent: ScriptedAgent) -> list[str]:  # noqa: ARG002
        return []


class Raw(Worker):
    body: ClassVar[dict[str, Any]] = {"prompt": "once"}
    route: ClassVar[str] = "completions"


def spec_of(cls: type[Task], server: Any, monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    for module in (runner, spec):
        monkeypatch.setattr(module, "load_task", lambda _: cls)
    monkeypatch.setenv("KVBENCH_API_RETRIES", "0")
    model = f"{server.url}#fake"
    base = RunSpec(engine="api", model=model, method="full", budget=None, task="worker")
    return spec.resolve(spec.replace(base, concurrency=1), {})


def test_a_failing_endpoint_is_no_engine_error(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = spec_of(Worker, server, monkeypatch)
    server.always = 503
    with pytest.raises(PrerequisiteError, match="same command goes on"):
        runner.run_one(one, tmp_path, lambda *_: None)
    trials = RunStore(tmp_path).find(one.id).trials()
    assert [(trial.status, trial.attempts) for trial in trials] == [(TrialStatus.INFRA_ERROR, 3)]
    server.always = None
    runner.run_one(one, tmp_path, lambda *_: None)
    assert [trial.score for trial in RunStore(tmp_path).find(one.id).trials()] == [1.0] * 3


def test_raw_prompts_end_the_run_and_score_nothing(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = spec_of(Raw, server, monkeypatch)
    with pytest.raises(UsageError, match="chat messages only"):
        runner.run_one(one, tmp_path, lambda *_: None)
    assert RunStore(tmp_path).find(one.id).trials() == []
    assert server.bodies == []
