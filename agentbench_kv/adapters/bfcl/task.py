"""BFCL v4 multi-turn, base category: 200 conversations with simulated APIs."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, ClassVar

from agentbench_kv.adapters.base import Outcome, Sample, ScriptedAgent, Task, TrialContext
from agentbench_kv.adapters.worker import (
    RemoteError,
    WorkerError,
    WorkerPool,
    WorkerTimeoutError,
)
from agentbench_kv.environments import python_of
from agentbench_kv.errors import UsageError
from agentbench_kv.results.records import TrialStatus

_WORKER = Path(__file__).with_name("worker_main.py")
_LOCAL_COMMAND_S = 120.0
_ENGINE_FAILURES = frozenset({"EndpointError"})


class MultiTurnBase(Task):
    """`multi_turn_base` over the raw completions route, scored by the official checker.

    Parameters
    ----------
    workers : int
        Worker processes; each plays many conversations at a time.
    """

    name: ClassVar[str] = "bfcl/multi_turn_base"
    summary: ClassVar[str] = "BFCL v4 multi-turn, base: 200 conversations with simulated APIs"
    needs_endpoint: ClassVar[bool] = True

    def __init__(self, workers: int = 1) -> None:
        self._workers = workers
        self._lock = threading.Lock()
        self._started: WorkerPool | None = None

    def samples(self, limit: int | None, seed: int) -> list[Sample]:  # noqa: ARG002
        """Return the entries in the official order, the first `limit` of them."""
        ids: list[str] = self._pool().call("samples", timeout=_LOCAL_COMMAND_S)
        return [Sample(id=each) for each in ids[:limit]]

    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:
        """Play one conversation in the worker and check it there."""
        if context.endpoint is None:
            raise UsageError(
                f"{self.name} talks to an endpoint and was given none; "
                "run it through kvbench run, or name a server with --endpoint"
            )
        try:
            played: dict[str, Any] = self._pool().call(
                "run", _arguments(sample, context), timeout=context.timeout_s
            )
        except WorkerTimeoutError as error:
            return Outcome(TrialStatus.TIMEOUT, error=str(error))
        except RemoteError as error:
            known = error.kind in _ENGINE_FAILURES
            status = TrialStatus.ENGINE_ERROR if known else TrialStatus.INFRA_ERROR
            return Outcome(status, error=str(error))
        except WorkerError as error:
            return Outcome(TrialStatus.INFRA_ERROR, error=str(error))
        return _outcome(played)

    def script(self, sample: Sample, agent: ScriptedAgent) -> list[str]:
        """Return the raw texts of a gold, corrupt or null agent."""
        wanted = {"sample": sample.id, "agent": agent}
        texts: list[str] = self._pool().call("script", wanted, timeout=_LOCAL_COMMAND_S)
        return texts

    def provenance(self) -> dict[str, Any]:
        """Return the benchmark's version, data hash, prompt hash and route."""
        about: dict[str, Any] = self._pool().call("about", timeout=_LOCAL_COMMAND_S)
        return about

    def close(self) -> None:
        """Stop the workers."""
        with self._lock:
            pool, self._started = self._started, None
        if pool is not None:
            pool.close()

    def _pool(self) -> WorkerPool:
        with self._lock:
            if self._started is None:
                self._started = WorkerPool(
                    python_of("bfcl"),
                    _WORKER,
                    self._workers,
                    environment={"BFCL_PROJECT_ROOT": "{scratch}/bfcl"},
                )
            return self._started


def _arguments(sample: Sample, context: TrialContext) -> dict[str, Any]:
    return {
        "sample": sample.id,
        "endpoint": context.endpoint,
        "session": context.session,
        "sampling": {
            "max_tokens": context.max_tokens,
            "temperature": context.temperature,
            "seed": context.seed,
        },
        # The worker's own environment holds no secrets.
        "key": os.environ.get("KVBENCH_API_KEY"),
        "timeout_s": context.timeout_s,
    }


def _outcome(played: dict[str, Any]) -> Outcome:
    steps, verdict = played["steps"], played["verdict"]
    error = verdict.get("error_message")
    return Outcome(
        status=TrialStatus(played["status"]),
        score=played["score"],
        metrics=_metrics(steps, verdict),
        transcript={"text": played["text"], "steps": steps, "verdict": verdict},
        error=None if error is None else str(error),
    )


def _metrics(
    steps: list[dict[str, Any]], verdict: dict[str, Any]
) -> dict[str, float | int | str | None]:
    return {
        "turns": 1 + max((step["turn"] for step in steps), default=-1),
        "steps": len(steps),
        "calls": sum(len(step["calls"]) for step in steps),
        "refused_calls": sum(step["refused"] for step in steps),
        "unparsable_calls": sum(step["unparsable"] for step in steps),
        "truncated_answers": sum(step["finish_reason"] == "length" for step in steps),
        "first_prompt_tokens": steps[0]["usage"].get("prompt_tokens") if steps else None,
        "error_type": verdict.get("error_type"),
    }
