"""Asking an endpoint: which one, over HTTP or litellm, at what price, and again when it fails."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from agentbench_kv.engines.text import TextReply, TextSampling
from agentbench_kv.errors import (
    ContextLimitError,
    EndpointError,
    KVBenchError,
    PrerequisiteError,
    UsageError,
)

OPENAI = "https://api.openai.com/v1"
# Keys come from the environment only.
BASE, KEY, OPENAI_KEY = "KVBENCH_API_BASE", "KVBENCH_API_KEY", "OPENAI_API_KEY"
_FORMS = (
    "expected openai/NAME, http(s)://HOST/v1#NAME or litellm/NAME, e.g. openai/gpt-4.1-mini "
    "or http://127.0.0.1:8000/v1#qwen3"
)
_SHORTEST_SECRET = 4


@dataclass(frozen=True)
class Endpoint:
    """Where requests go."""

    base: str  # URL without a slash at its end; empty where litellm knows it
    model: str  # as the endpoint knows it
    litellm: bool = False  # asked through that package, which reads its own variables
    key: str | None = field(default=None, repr=False)  # bearer token; never shown

    @property
    def public(self) -> bool:
        return self.base.startswith("https://api.openai.com/")

    @property
    def shown(self) -> str:
        """Name for messages and records."""
        return f"litellm/{self.model}" if self.litellm else self.base


def parse_model(model: str) -> Endpoint:
    """Read `--model`.

    `openai/NAME` asks OpenAI, or the server in `KVBENCH_API_BASE`, with `OPENAI_API_KEY` or
    `KVBENCH_API_KEY`. A URL with the model's name after `#` is asked with `KVBENCH_API_KEY` only,
    so that no other server is ever shown OpenAI's key.
    """
    scheme, _, name = model.partition("/")
    if model.startswith(("http://", "https://")):
        base, _, name = model.partition("#")
        endpoint = Endpoint(_checked(base), name, key=_key(KEY))
    elif scheme == "openai":
        base = _checked(os.environ.get(BASE) or OPENAI)
        endpoint = Endpoint(base, name, key=_key(OPENAI_KEY, KEY))
    elif scheme == "litellm":
        endpoint = Endpoint("", name, litellm=True)
    else:
        raise UsageError(f"model {model!r} of engine api: {_FORMS}")
    if not name.strip():
        raise UsageError(f"model {model!r} of engine api names no model: {_FORMS}")
    if endpoint.public and endpoint.key is None:
        raise PrerequisiteError(
            f"{endpoint.base} needs a key; set {OPENAI_KEY} in the environment, "
            f"or {BASE} to ask another server"
        )
    return endpoint


def redacted(text: str) -> str:
    """Return a text without any key that the environment holds."""
    for name, value in os.environ.items():
        if name.endswith("_API_KEY") and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, f"[{name}]")
    return text


def _key(*names: str) -> str | None:
    values = (os.environ.get(name, "").strip() for name in names)
    return next((value for value in values if value), None)


def _checked(base: str) -> str:
    """Refuse what is no URL, and URLs that would carry a secret into the records."""
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"not an http(s) URL of an endpoint: {base!r}")
    if parts.username or parts.password or parts.query:
        raise UsageError(
            f"the URL of {parts.hostname} holds a user, a password or a query, which would be "
            f"recorded; put the key into {KEY}"
        )
    return base.rstrip("/")


NO_ANSWER = 0  # status of an answer that never came
_CONNECT_S = 20.0


@dataclass(frozen=True)
class EndpointAnswer:
    """What came back."""

    status: int  # of HTTP, or `NO_ANSWER`
    text: str  # body, or what went wrong on the way
    data: Any = None  # body as JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    refused: bool = False  # no connection could be made


class HttpTransport:
    """`POST /chat/completions` of an OpenAI-compatible server; failures are answers too."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        key = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
        self._timeout_s = timeout_s
        self._url = f"{endpoint.base}/chat/completions"
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(headers=key, timeout=timeout, limits=limits)

    async def send(self, body: Mapping[str, Any]) -> EndpointAnswer:
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.post(self._url, json=dict(body))
        except TimeoutError:
            return EndpointAnswer(NO_ANSWER, f"no answer within {self._timeout_s:g} s")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return EndpointAnswer(NO_ANSWER, _named(error), refused=True)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return EndpointAnswer(NO_ANSWER, _named(error))
        try:
            data = response.json()
        except (ValueError, RecursionError):
            data = None
        return EndpointAnswer(response.status_code, response.text, data, response.headers)

    async def close(self) -> None:
        await self._client.aclose()


class LitellmTransport:
    """Any provider litellm knows; its keys are the variables litellm documents."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        # Otherwise the import asks the network for a price list that is not used.
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        check_litellm()
        self._litellm: Any = import_module("litellm")
        self._model = endpoint.model
        self._timeout_s = timeout_s

    async def send(self, body: Mapping[str, Any]) -> EndpointAnswer:
        fields = {**body, "model": self._model, "timeout": self._timeout_s, "num_retries": 0}
        try:
            # Newer releases want the mcp package for any call with tools.
            reply = await self._litellm.acompletion(**fields, _skip_mcp_handler=True)
        except Exception as error:  # noqa: BLE001  every provider has errors of its own
            status = getattr(error, "status_code", NO_ANSWER)
            return EndpointAnswer(status if isinstance(status, int) else NO_ANSWER, _named(error))
        data = reply.model_dump()
        return EndpointAnswer(200, json.dumps(data, default=str), data)

    async def close(self) -> None:
        return None


Transport = HttpTransport | LitellmTransport


def check_litellm() -> None:
    if find_spec("litellm") is None:
        raise PrerequisiteError(
            "--model litellm/NAME needs litellm; install it with: pip install 'agentbench-kv[api]'"
        )


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


PRICES = "KVBENCH_API_PRICES"
_PER = 1_000_000


@dataclass(frozen=True)
class Prices:
    """Money per million tokens, in the user's currency."""

    prompt: float
    output: float
    cached: float

    @classmethod
    def from_environment(cls) -> Self | None:
        """Read `KVBENCH_API_PRICES=PROMPT,OUTPUT[,CACHED]`; None if it is not set.

        Cached prompt tokens cost what others do unless a price is given.
        """
        text = os.environ.get(PRICES, "").strip()
        if not text:
            return None
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) not in (2, 3) or not all(0 <= number < float("inf") for number in numbers):
            raise UsageError(
                f"{PRICES}={text!r}: expected PROMPT,OUTPUT or PROMPT,OUTPUT,CACHED, "
                "money per million tokens, e.g. 2.5,10"
            )
        return cls(numbers[0], numbers[1], numbers[2] if len(numbers) == 3 else numbers[0])

    def cost(self, prompt: int, output: int, cached: int) -> float:
        """Return the price of one request; `cached` tokens are part of `prompt`."""
        fresh = max(prompt - cached, 0)
        return (fresh * self.prompt + cached * self.cached + output * self.output) / _PER


class Spending:
    """Money spent by one command, requests under way at the limit included. Thread-safe."""

    def __init__(self, limit: float | None = None) -> None:
        self.limit = limit
        self.spent = 0.0
        self.requests = 0
        self._lock = threading.Lock()

    def add(self, cost: float | None) -> None:
        with self._lock:
            self.requests += 1
            self.spent += cost or 0.0

    def check(self) -> None:
        if self.limit is not None and self.spent >= self.limit:
            raise PrerequisiteError(
                f"--max-cost {self.limit:g} is reached: {self.spent:.6g} spent on {self.requests} "
                "requests; what is done stays, the same command goes on with the rest"
            )


_current: ContextVar[Spending | None] = ContextVar("spending", default=None)


@contextmanager
def spending_limit(limit: float | None) -> Iterator[Spending]:
    """Let every engine made inside share one account with this limit; None only counts."""
    spending = Spending(limit)
    token = _current.set(spending)
    try:
        yield spending
    finally:
        _current.reset(token)


def spending_of_this_command() -> Spending:
    return _current.get() or Spending()


_NOT_SENT = frozenset({"reasoning_content", "reasoning"})
_SEEDS = 1 << 31


class RubbishError(Exception):
    """The body is not a chat completion; the message says what is missing."""


def request_body(
    model: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    sampling: TextSampling,
    limit_name: str,
) -> dict[str, Any]:
    """Return a chat request without thoughts, which providers refuse; `limit_name`: max_tokens."""
    sent = [{k: v for k, v in message.items() if k not in _NOT_SENT} for message in messages]
    body: dict[str, Any] = {
        "model": model,
        "messages": sent,
        "temperature": sampling.temperature,
        "seed": sampling.seed % _SEEDS,
        limit_name: sampling.max_tokens,
    }
    optional = {
        "tools": list(tools) if tools else None,
        "top_p": sampling.top_p if sampling.top_p != 1.0 else None,
        "top_k": sampling.top_k or None,
        "stop": list(sampling.stop) or None,
        "response_format": sampling.response_format,
        "tool_choice": sampling.tool_choice,
        "parallel_tool_calls": sampling.parallel_tool_calls,
        "logprobs": None if sampling.top_logprobs is None else True,
        "top_logprobs": sampling.top_logprobs,
    }
    return body | {name: value for name, value in optional.items() if value is not None}


def read_reply(data: Any, prices: Prices | None) -> TextReply:
    """Read a chat completion; RubbishError if it is none or does not say what it bills."""
    choice = _first_choice(data)
    message = choice["message"]
    prompt, output, cached, thinking = _usage(data)
    return TextReply(
        content=_text(message, "content"),
        reasoning=_text(message, "reasoning_content") or _text(message, "reasoning"),
        tool_calls=_calls(message),
        finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
        prompt_tokens=prompt,
        output_tokens=output,
        cached_tokens=cached,
        cost=None if prices is None else prices.cost(prompt, output, cached),
        thinking_tokens=thinking,
        logprobs=_logprobs(choice),
    )


def _first_choice(data: Any) -> Mapping[str, Any]:
    choices = data.get("choices") if isinstance(data, Mapping) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, Mapping) or not isinstance(choice.get("message"), Mapping):
        raise RubbishError("no message in it")
    return choice


def _text(message: Mapping[str, Any], name: str) -> str:
    value = message.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RubbishError(f"its {name} is no text")
    # Half a surrogate pair can come out of a JSON escape; no record can hold it.
    return value.encode("utf-8", "replace").decode("utf-8")


def _calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RubbishError("its tool_calls are no list of objects")
    return calls


def _logprobs(choice: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    found = choice.get("logprobs")
    tokens = found.get("content") if isinstance(found, Mapping) else None
    known = isinstance(tokens, list) and all(isinstance(token, dict) for token in tokens)
    return tokens if known else None


def _usage(data: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return the tokens of prompt and output, and how many were cached, and thoughts."""
    usage = data.get("usage")
    known = usage if isinstance(usage, Mapping) else {}
    prompt, output = _count(known.get("prompt_tokens")), _count(known.get("completion_tokens"))
    cached = _detail(known, "prompt_tokens_details", "cached_tokens")
    thinking = _detail(known, "completion_tokens_details", "reasoning_tokens")
    return prompt, output, min(cached, prompt), min(thinking, output)


def _detail(usage: Mapping[str, Any], group: str, name: str) -> int:
    details = usage.get(group)
    return _count((details.get(name) if isinstance(details, Mapping) else 0) or 0)


def _count(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise RubbishError("no usage (prompt_tokens, completion_tokens) in it")
    return value


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
