"""Asking an endpoint until it answers or it is no use."""

from __future__ import annotations

import asyncio
import math
import os
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Self

from agentbench_kv.engines.api.completions import RubbishError, read_reply
from agentbench_kv.engines.api.endpoints import Endpoint, redacted
from agentbench_kv.engines.api.spending import Prices, Spending
from agentbench_kv.engines.api.transports import NO_ANSWER, EndpointAnswer, Transport
from agentbench_kv.engines.text import TextReply
from agentbench_kv.errors import (
    ContextLimitError,
    EndpointError,
    KVBenchError,
    PrerequisiteError,
    UsageError,
)

# One more than a trial's attempts: a single sample that the endpoint chokes on ends no run.
_MOST_FAILURES = 4
_SHOWN = 160
_CONTEXT_WORDS = ("context_length", "context length", "maximum context", "context window")
_PASSING = (NO_ANSWER, 408, 409, 425, 429)  # failures that may be over the next time, as >= 500
_WRONG_SETUP = {
    401: "refuses the key; set {keys} to a valid one",
    402: "wants to be paid first",
    403: "refuses this key or model; check {keys} and --model",
    404: "knows no such model or path; check --model and KVBENCH_API_BASE",
}


@dataclass(frozen=True)
class RetryPolicy:
    """How patient to be."""

    retries: int = 5  # times a request that failed is sent again
    timeout_s: float = 300.0  # for one answer
    # Pauses double from the first to the longest, each shortened by up to a half at random. A
    # `Retry-After` beyond the longest is not waited for.
    first_pause_s: float = 0.5
    longest_pause_s: float = 60.0
    per_minute: float | None = None  # requests begun, retries included

    @classmethod
    def from_environment(cls) -> Self:
        """Read `KVBENCH_API_RETRIES`, `_TIMEOUT`, `_BACKOFF` and `_RPM`."""
        return cls(
            retries=int(_number("KVBENCH_API_RETRIES", cls.retries, 0)),
            timeout_s=_number("KVBENCH_API_TIMEOUT", cls.timeout_s, 0.001),
            first_pause_s=_number("KVBENCH_API_BACKOFF", cls.first_pause_s, 0),
            per_minute=_number("KVBENCH_API_RPM", 0, 0) or None,
        )

    def pause(self, attempt: int, answer: EndpointAnswer, chance: float) -> float | None:
        """Seconds before the next attempt, None to give up; `chance` in [0, 1) spreads clients."""
        asked = _retry_after(answer.headers)
        if attempt >= self.retries or (asked or 0) > self.longest_pause_s:
            return None
        grown = min(self.first_pause_s * 2**attempt, self.longest_pause_s)
        return float(max(asked or 0.0, grown * (1 - chance / 2)))


@dataclass(eq=False)
class Asker:
    """Sends requests until they are answered or it is no use."""

    endpoint: Endpoint
    transport: Transport
    policy: RetryPolicy
    prices: Prices | None
    spending: Spending

    def __post_init__(self) -> None:
        # Requests begin no closer together than the rate allows.
        self._interval = 60.0 / self.policy.per_minute if self.policy.per_minute else 0.0
        self._next_start = 0.0
        self._failures = 0
        self._answered = False
        self._lock = threading.Lock()

    async def ask(self, body: Mapping[str, Any]) -> TextReply:
        """Return the answer; raises what `TextRequest.result` does."""
        attempt = 0
        while True:
            self.spending.check()
            if self._failures >= _MOST_FAILURES:
                raise PrerequisiteError(self._dead(f"failed {self._failures} requests in a row"))
            await self._wait_for_turn()
            answer = await self.transport.send(body)
            problem = answer.text if answer.status != 200 else ""
            if not problem:
                try:
                    return self._good(read_reply(answer.data, self.prices))
                except RubbishError as error:
                    problem = f"an answer that is no chat completion ({error}): {answer.text}"
            elif answer.status not in _PASSING and answer.status < 500:
                raise self._refused(answer)
            pause = self.policy.pause(attempt, answer, random.random())
            if pause is None:
                raise self._failed(answer, problem, attempt + 1)
            await asyncio.sleep(pause)
            attempt += 1

    async def _wait_for_turn(self) -> None:
        """Wait for a request's turn; called in one event loop only."""
        now = time.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + self._interval
        if start > now:
            await asyncio.sleep(start - now)

    def _good(self, reply: TextReply) -> TextReply:
        self.spending.add(reply.cost)
        with self._lock:
            self._failures, self._answered = 0, True
        return reply

    def _failed(self, answer: EndpointAnswer, problem: str, attempts: int) -> KVBenchError:
        with self._lock:
            self._failures += 1
            lost = self._failures >= _MOST_FAILURES or (answer.refused and not self._answered)
        what = f"HTTP {answer.status}: " if answer.status not in (NO_ANSWER, 200) else ""
        problem = f"{what}{_short(problem)} ({attempts} attempts)"
        if lost:
            return PrerequisiteError(self._dead(f"does not answer: {problem}"))
        return EndpointError(f"{self.endpoint.shown}: {problem}")

    def _dead(self, problem: str) -> str:
        return (
            f"{self.endpoint.shown} {problem}; start or mend the endpoint, then the same command "
            "goes on"
        )

    def _refused(self, answer: EndpointAnswer) -> KVBenchError:
        """Return what an answer means that asking again will not change."""
        if any(words in answer.text.lower() for words in _CONTEXT_WORDS):
            return ContextLimitError(_short(answer.text))
        where = self.endpoint.shown
        if answer.status in _WRONG_SETUP:
            keys = "OPENAI_API_KEY" if self.endpoint.public else "KVBENCH_API_KEY"
            if self.endpoint.litellm:
                keys = "the provider's key"
            return PrerequisiteError(f"{where} {_WRONG_SETUP[answer.status].format(keys=keys)}")
        said = f"{where} refused the request with HTTP {answer.status}: {_short(answer.text)}"
        # A request that is wrong before any was right is a wrong set-up.
        return KVBenchError(said) if self._answered else PrerequisiteError(said)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds a server asks to wait: a number, or a date."""
    text = headers.get("retry-after", "").strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    return None if math.isnan(seconds) else max(seconds, 0.0)


def _number(name: str, default: float, low: float) -> float:
    text = os.environ.get(name, "").strip()
    try:
        value = float(text) if text else float(default)
    except ValueError:
        value = -1.0
    if not low <= value < float("inf"):
        raise UsageError(f"{name}={text!r}: expected a number >= {low:g}")
    return value


def _short(text: str) -> str:
    line = " ".join(redacted(text).split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"
