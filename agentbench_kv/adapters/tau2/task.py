"""tau2-bench: customer-service simulations, and the three domains of v0.2.0."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx

from agentbench_kv.adapters.base import Outcome, Sample, ScriptedAgent, Task, TrialContext
from agentbench_kv.adapters.tau2.published import data_state, require_data
from agentbench_kv.adapters.tau2.releases import V0, Release
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

USER_KEY = "KVBENCH_USER_API_KEY"
_WORKER = Path(__file__).with_name("worker_main.py")
_LOCAL_COMMAND_S = 120.0
_PROBE_S = 10.0
# A simulation of the airline holds three databases, 60 MB each, and there are many at a time.
_LIMITS = Limits(address_space=32 << 30)


@dataclass(kw_only=True)
class Simulations(Task):
    """One domain over the chat route, scored by the benchmark's own checker.

    A trial is one simulation: the agent, a user simulator and the domain's environment. One
    session serves the agent's side; the user is never the model under test unless it is named so.
    """

    needs_endpoint: ClassVar[bool] = True
    # Where the dropped action only reads, the database is right all the same.
    corrupt_score: ClassVar[float | None] = None
    release: ClassVar[Release] = V0  # tasks of different ones have different names
    domain: ClassVar[str]

    user: str = param(
        "scripted",
        "scripted (replays the golden user actions; for tests), the base URL of an "
        "OpenAI-compatible server, or litellm for a provider's model",
    )
    user_model: str = param("", "model that plays the user; fixed for all methods of a comparison")
    max_steps: int = param(200, "messages after which a simulation is given up", low=1)

    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _started: WorkerPool | None = field(default=None, init=False, repr=False)

    def samples(self, limit: int | None, seed: int) -> list[Sample]:  # noqa: ARG002
        self._require_partners()
        return [Sample(id=each) for each in self._ask("samples")[:limit]]

    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:
        arguments = self._arguments(sample, context)
        try:
            played = self._pool().call("run", arguments, timeout=context.timeout_s)
        except WorkerTimeoutError as error:
            return Outcome(TrialStatus.TIMEOUT, error=str(error))
        except WorkerError as error:
            kind = error.kind if isinstance(error, RemoteError) else None
            if kind == "JudgeFailedError":
                self._require_partners()
            engine = kind == "EndpointError"
            status = TrialStatus.ENGINE_ERROR if engine else TrialStatus.INFRA_ERROR
            return Outcome(status, error=str(error))
        if played["status"] == TrialStatus.USER_ERROR:
            # A user that is gone for good would fail every trial to come.
            self._require_partners()
        return Outcome(
            status=TrialStatus(played["status"]),
            score=played["score"],
            metrics=_metrics(played),
            transcript={key: played[key] for key in ("agent", "trajectory", "steps", "verdict")},
            error=played["error"],
        )

    def script(self, sample: Sample, agent: ScriptedAgent) -> list[str]:
        texts: list[str] = self._ask("script", {"sample": sample.id, "agent": agent})
        return texts

    def provenance(self) -> dict[str, Any]:
        about: dict[str, Any] = self._ask("about")
        data = require_data(self.release, self.domain)
        state = data_state(self.release, self.domain, data)
        return {**about, **state, "user": self.user, "user_model": self.user_model}

    def close(self) -> None:
        with self._lock:
            pool, self._started = self._started, None
        if pool is not None:
            pool.close()

    def _ask(self, command: str, args: dict[str, Any] | None = None) -> Any:
        try:
            return self._pool().call(command, args, timeout=_LOCAL_COMMAND_S)
        except WorkerError as error:
            raise PrerequisiteError(
                f"the tau2 worker did not answer: {error}; look with: "
                f"kvbench env check {self.release.environment}"
            ) from error

    def _pool(self) -> WorkerPool:
        with self._lock:
            if self._started is None:
                data = require_data(self.release, self.domain)
                self._started = WorkerPool(
                    python_of(self.release.environment),
                    _WORKER,
                    limits=_LIMITS,
                    environment={
                        "TAU2_DATA_DIR": str(data),
                        "KVBENCH_TAU2_DOMAIN": self.domain,
                        "KVBENCH_TAU2_VERSION": self.release.installed,
                        "KVBENCH_TAU2_NETWORK": "any" if self.user == "litellm" else "named",
                        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                    },
                )
            return self._started

    def _require_partners(self) -> None:
        """Refuse a user that is badly named or does not answer."""
        if self.user == "scripted":
            return
        if not self.user_model:
            raise UsageError(f"user={self.user} needs a model: --set user_model=NAME")
        if self.user == "litellm":
            return
        if urlsplit(self.user).scheme not in ("http", "https"):
            raise UsageError(
                f"user={self.user}: expected scripted, litellm or the http(s) URL of a server"
            )
        require_server(self.user, "user simulator", "user=URL")

    def _arguments(self, sample: Sample, context: TrialContext) -> dict[str, Any]:
        if context.endpoint is None:
            raise UsageError(
                f"{self.name} talks to an endpoint and was given none; "
                "run it through kvbench run, or name a server with --endpoint"
            )
        named = self.user not in ("scripted", "litellm")
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
            "max_steps": self.max_steps,
            "user": {
                "kind": "scripted" if self.user == "scripted" else "llm",
                "url": base_url(self.user) if named else None,
                "model": self.user_model,
                "key": os.environ.get(USER_KEY),
            },
            "judge": self._judge_arguments(),
        }

    def _judge_arguments(self) -> dict[str, Any] | None:
        """Return who judges what the agent said; None where nobody does."""
        return None


class Airline(Simulations):
    """50 simulations."""

    name = "tau2/airline"
    summary = "tau2-bench v0.2.0, airline: 50 customer-service simulations"
    domain = "airline"


class Retail(Simulations):
    """114 simulations."""

    name = "tau2/retail"
    summary = "tau2-bench v0.2.0, retail: 114 customer-service simulations"
    domain = "retail"


class Telecom(Simulations):
    """114 simulations in which the user has tools, too."""

    name = "tau2/telecom"
    summary = "tau2-bench v0.2.0, telecom: 114 simulations, the user acts, too"
    domain = "telecom"
    corrupt_score = 0.0


def base_url(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1") + "/v1"


def require_server(url: str, who: str, setting: str) -> None:
    """Refuse a server that does not answer (PrerequisiteError)."""
    try:
        httpx.get(f"{base_url(url)}/models", timeout=_PROBE_S)
    except httpx.HTTPError as error:
        raise PrerequisiteError(
            f"the {who} at {url} does not answer ({type(error).__name__}); "
            f"start it, or name another with --set {setting}"
        ) from error


def _metrics(played: dict[str, Any]) -> dict[str, Metric]:
    steps, verdict, user = played["steps"], played["verdict"], played["user"]
    parts = verdict.get("reward_breakdown") or {}
    return {
        "steps": len(steps),
        "messages": len(played["trajectory"]),
        "calls": sum(step["calls"] for step in steps),
        "unparsable_calls": sum(step["unparsable"] for step in steps),
        "truncated_answers": sum(step["finish_reason"] == "length" for step in steps),
        "first_prompt_tokens": steps[0]["prompt_tokens"] if steps else None,
        "ended_by": verdict.get("ended_by"),
        **{f"reward_{name.lower()}": value for name, value in parts.items()},
        **{f"user_{name}": count for name, count in user.items()},
    }
