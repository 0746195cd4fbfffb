"""Tasks whose benchmark runs in worker processes and talks to the agent over HTTP."""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agentbench_kv.adapters.base import Outcome, Sample, Task, TrialContext
from agentbench_kv.adapters.worker import (
    Limits,
    TrialLimitError,
    WorkerDiedError,
    WorkerError,
    WorkerPool,
    WorkerTimeoutError,
)
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.results.records import Metric, TrialStatus

_LOCAL_COMMAND_S = 120.0
PlayedTrial = dict[str, Any]  # what the worker's command `run` answers


@dataclass(kw_only=True)
class WorkerTask(Task):
    """A benchmark in a managed environment; its worker answers `samples`, `run` and `script`."""

    needs_endpoint: ClassVar[bool] = True
    environment: ClassVar[str]  # profile it is installed by (`kvbench env create`)

    _lock: Any = field(default_factory=threading.Lock, init=False, repr=False)
    _started: WorkerPool | None = field(default=None, init=False, repr=False)
    # What met a limit of its process: played once more, and the agent's failure after that.
    _suspects: set[tuple[str, int]] = field(default_factory=set, init=False, repr=False)

    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:
        try:
            played = self._play(sample, context)
        except WorkerError as error:
            return Outcome(error.status, error=str(error))
        return self._outcome(played)

    def close(self) -> None:
        with self._lock:
            pool, self._started = self._started, None
        if pool is not None:
            pool.close()

    @abstractmethod
    def _start(self) -> WorkerPool:
        """Start the workers."""

    def _limits(self) -> Limits:
        """Return what the process of a trial may use."""
        return Limits()

    @abstractmethod
    def _outcome(self, played: PlayedTrial) -> Outcome:
        """Turn a played trial into its result."""

    def _play(self, sample: Sample, context: TrialContext) -> PlayedTrial:
        return self._run(sample.id, context)

    def _run(self, name: str, context: TrialContext, **more: Any) -> PlayedTrial:
        args = {**self._line(context), "sample": name, **more}
        try:
            played: PlayedTrial = self._pool().call("run", args, timeout=context.timeout_s)
        except TrialLimitError as error:
            if (name, context.trial) in self._suspects:
                error.status = TrialStatus.TIMEOUT
                error.args = (f"{error}, and did so again when it was played once more",)
            self._suspects.add((name, context.trial))
            raise
        return played

    def _line(self, context: TrialContext) -> dict[str, Any]:
        if context.endpoint is None:
            raise UsageError(
                f"{self.name} talks to an endpoint and was given none; "
                "run it through kvbench run, or name a server with --endpoint"
            )
        names = ("max_tokens", "temperature", "seed")
        return {
            "endpoint": context.endpoint,
            "session": context.session,
            "sampling": {name: getattr(context, name) for name in names},
            # The worker's own environment holds no secrets.
            "key": os.environ.get("KVBENCH_API_KEY"),
            "timeout_s": context.timeout_s,
        }

    def _call(self, command: str, args: Mapping[str, Any] | None = None) -> Any:
        """Run a command that asks no agent, so that it is none's fault if there is no answer."""
        try:
            return self._pool().call(command, args, timeout=_LOCAL_COMMAND_S)
        except WorkerTimeoutError as error:
            raise WorkerDiedError(f"no answer to {command!r}: {error}") from error

    def _ask(self, command: str, args: Mapping[str, Any] | None = None) -> Any:
        """Run such a command outside of a trial; PrerequisiteError if there is no answer."""
        try:
            return self._call(command, args)
        except WorkerError as error:
            raise PrerequisiteError(
                f"the {self.environment} worker did not answer: {error}; look with: "
                f"kvbench env check {self.environment}"
            ) from error

    def _pool(self) -> WorkerPool:
        with self._lock:
            if self._started is None:
                self._started = self._start()
            return self._started


def step_metrics(steps: Sequence[Mapping[str, Any]]) -> dict[str, Metric]:
    """Return what is counted over the answers of a session (`ChatHistory.steps`)."""
    return {
        "steps": len(steps),
        "calls": sum(step["calls"] for step in steps),
        "unparsable_calls": sum(step["unparsable"] for step in steps),
        "truncated_answers": sum(step["finish_reason"] == "length" for step in steps),
        "first_prompt_tokens": steps[0]["prompt_tokens"] if steps else None,
    }
