"""BFCL v4 tasks: what they share, and the four multi-turn categories."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agentbench_kv.adapters.base import Outcome, Sample, ScriptedAgent, Task, TrialContext
from agentbench_kv.adapters.worker import (
    Limits,
    RemoteError,
    WorkerError,
    WorkerPool,
    WorkerTimeoutError,
)
from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.params import param
from agentbench_kv.results.records import Metric, TrialStatus

_WORKER = Path(__file__).parent / "worker" / "main.py"
_LOCAL_COMMAND_S = 120.0
Played = dict[str, Any]


@dataclass(kw_only=True)
class BfclTask(Task):
    """A slice of BFCL v4, played in worker processes and scored by the official checker."""

    categories: ClassVar[tuple[str, ...]]
    needs_endpoint: ClassVar[bool] = True

    # `raw`: one append-only text over the completions route, so sessions are exact to the token.
    # `chat`: messages and tools over the chat route.
    route: str = param("raw", "how sessions are sent", choices=("raw", "chat"))
    workers: int = param(1, "worker processes", low=1, high=64)  # many conversations each

    _lock: Any = field(default_factory=threading.Lock, init=False, repr=False)
    _started: WorkerPool | None = field(default=None, init=False, repr=False)
    _scripts: dict[tuple[str, str], list[str]] = field(default_factory=dict, init=False, repr=False)

    def samples(self, limit: int | None, seed: int) -> list[Sample]:  # noqa: ARG002
        return self._all_samples()[:limit]

    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:
        try:
            played = self._play(sample, context)
        except WorkerError as error:
            return Outcome(status_of(error), error=str(error))
        return self._outcome(played)

    def script(self, sample: Sample, agent: ScriptedAgent) -> list[str]:
        return self._script(sample.id, agent)

    def provenance(self) -> dict[str, Any]:
        return {**self._call("about"), "route": self.route}

    def close(self) -> None:
        with self._lock:
            pool, self._started = self._started, None
        if pool is not None:
            pool.close()

    def _all_samples(self) -> list[Sample]:
        """Ask the worker; the first question of a run also shows whether it starts."""
        try:
            found: list[dict[str, Any]] = self._call("samples")
        except WorkerError as error:
            raise PrerequisiteError(
                f"the BFCL worker does not start: {error}; if its environment is broken: "
                "kvbench env check bfcl"
            ) from error
        return [Sample(each["id"], each["scenario"]) for each in found]

    def _play(self, sample: Sample, context: TrialContext) -> Played:
        return self._run(sample.id, context)

    def _run(self, name: str, context: TrialContext, **more: Any) -> Played:
        wanted = {**self._line(context), "sample": name, **more}
        played: Played = self._pool().call("run", wanted, timeout=context.timeout_s)
        return played

    def _script(self, name: str, agent: ScriptedAgent) -> list[str]:
        key = (name, agent)
        if key not in self._scripts:
            self._scripts[key] = self._call("script", {"sample": name, "agent": agent})
        return self._scripts[key]

    def _outcome(self, played: Played) -> Outcome:
        verdict = played["verdict"]
        error = verdict.get("error_message")
        return Outcome(
            status=TrialStatus(played["status"]),
            score=played["score"],
            metrics={**_metrics(played), **self._about_trial()},
            transcript={key: played[key] for key in ("text", "steps", "verdict")},
            error=None if error is None else str(error),
        )

    def _about_trial(self) -> dict[str, Metric]:
        """Return what every trial's record must say besides its counts."""
        return {"route": self.route}

    def _line(self, context: TrialContext) -> dict[str, Any]:
        if context.endpoint is None:
            raise UsageError(
                f"{self.name} talks to an endpoint and was given none; "
                "run it through kvbench run, or name a server with --endpoint"
            )
        return {
            "route": self.route,
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

    def _call(self, command: str, args: Mapping[str, Any] | None = None) -> Any:
        return self._pool().call(command, args, timeout=_LOCAL_COMMAND_S)

    def _pool(self) -> WorkerPool:
        with self._lock:
            if self._started is None:
                self._started = self._start()
            return self._started

    def _start(self) -> WorkerPool:
        environment = {
            "BFCL_PROJECT_ROOT": "{scratch}/bfcl",
            "OMP_NUM_THREADS": "1",
            "KVBENCH_BFCL": json.dumps({"categories": self.categories, **self._worker_config()}),
        }
        python, limits = python_of("bfcl"), self._limits()
        return WorkerPool(python, _WORKER, self.workers, environment=environment, limits=limits)

    def _worker_config(self) -> dict[str, Any]:
        """Return what the worker must know besides its categories."""
        return {}

    def _limits(self) -> Limits:
        return Limits()


class MultiTurnBase(BfclTask):
    """`multi_turn_base`: every function and parameter is there."""

    name = "bfcl/multi_turn_base"
    summary = "BFCL v4 multi-turn, base: 200 conversations with simulated APIs"
    categories = ("multi_turn_base",)


class MultiTurnMissFunc(BfclTask):
    """`multi_turn_miss_func`: a function that is needed is shown only in a later turn."""

    name = "bfcl/multi_turn_miss_func"
    summary = "BFCL v4 multi-turn: 200 with a function that comes too late"
    categories = ("multi_turn_miss_func",)


class MultiTurnMissParam(BfclTask):
    """`multi_turn_miss_param`: the user leaves out a parameter until asked."""

    name = "bfcl/multi_turn_miss_param"
    summary = "BFCL v4 multi-turn: 200 with a parameter that comes too late"
    categories = ("multi_turn_miss_param",)


class MultiTurnLongContext(BfclTask):
    """`multi_turn_long_context`: the APIs' answers are long."""

    name = "bfcl/multi_turn_long_context"
    summary = "BFCL v4 multi-turn: 200 whose APIs give long answers"
    categories = ("multi_turn_long_context",)


def status_of(error: WorkerError) -> TrialStatus:
    if isinstance(error, WorkerTimeoutError):
        return TrialStatus.TIMEOUT
    if isinstance(error, RemoteError) and error.kind == "EndpointError":
        return TrialStatus.ENGINE_ERROR
    return TrialStatus.INFRA_ERROR


def _metrics(played: Played) -> dict[str, Metric]:
    steps = played["steps"]
    return {
        "turns": 1 + max((step["turn"] for step in steps), default=-1),
        "steps": len(steps),
        "calls": sum(len(step["calls"]) for step in steps),
        "refused_calls": sum(step["refused"] for step in steps),
        "unparsable_calls": sum(step["unparsable"] for step in steps),
        "truncated_answers": sum(step["finish_reason"] == "length" for step in steps),
        "first_prompt_tokens": steps[0]["usage"].get("prompt_tokens") if steps else None,
        "error_type": played["verdict"].get("error_type"),
    }
