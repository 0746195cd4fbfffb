"""The chat route of an OpenAI-compatible server, one session a trial; runs in the worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx

SESSION_HEADER = "X-KVBench-Session"
_BUSY = frozenset({409, 429, 503})
_LONGEST_PAUSE_S = 30.0
_CONTEXT_LIMIT = ("context_length", "context_limit", "context length")


class EndpointError(Exception):
    """The server answered with an error, or with what is not a chat completion."""


class UnreachableError(Exception):
    """The server could not be reached, or the connection broke."""


class ContextLimitError(Exception):
    """The history passes the model's last position."""


class CancelledError(Exception):
    """The trial was cancelled."""


class ChatLine:
    """A trial's line to the agent under test: one session, named in every request.

    `/v1` at the end of `url` is optional. `body` is sent with every request (max_tokens,
    temperature, seed). `timeout_s` bounds one answer, pauses on a busy server included.
    """

    def __init__(
        self,
        url: str,
        session: str,
        body: dict[str, Any],
        key: str | None,
        timeout_s: float,
        cancelled: threading.Event,
    ) -> None:
        headers = {SESSION_HEADER: session}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self._client = httpx.Client(
            base_url=url.rstrip("/").removesuffix("/v1") + "/v1/",
            headers=headers,
            timeout=timeout_s,
            # Not the machine's proxies: the endpoint is the one that the caller named.
            trust_env=False,
            # A connection that idled while the user spoke may be closed by the server just now.
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self._body = {**body, "session_id": session}
        self._timeout_s = timeout_s
        self._cancelled = cancelled

    def ask(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        """Send the whole history; return `message`, `finish_reason` and `usage`."""
        deadline = time.monotonic() + self._timeout_s
        if "model" not in self._body:
            self._body["model"] = self._served_model()
        body = {**self._body, "messages": list(messages), "tools": list(tools)}
        while True:
            answer = self._send("POST", "chat/completions", body)
            if answer.status_code == 200:
                return _choice(answer)
            pause = _pause(answer)
            if answer.status_code not in _BUSY or time.monotonic() + pause >= deadline:
                raise _error(answer)
            if self._cancelled.wait(pause):
                raise CancelledError("cancelled while the server was busy")

    def close(self) -> None:
        self._client.close()

    def _served_model(self) -> str:
        answer = self._send("GET", "models", None)
        if answer.status_code != 200:
            raise _error(answer)
        try:
            return str(answer.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise EndpointError(f"not a list of models: {answer.text[:200]!r}") from error

    def _send(self, method: str, route: str, body: dict[str, Any] | None) -> httpx.Response:
        if self._cancelled.is_set():
            raise CancelledError("cancelled")
        try:
            return self._client.request(method, route, json=body)
        except httpx.HTTPError as error:
            where = self._client.base_url
            raise UnreachableError(f"{where}: {type(error).__name__}: {error}") from error


def _choice(answer: httpx.Response) -> dict[str, Any]:
    try:
        fields = answer.json()
        choice = fields["choices"][0]
        message, usage = choice["message"], fields.get("usage") or {}
        # OpenAI clients know no `context_limit`; our server gives the exact reason here.
        reason = usage.get("kvbench", {}).get("finish_reason") or choice.get("finish_reason")
        if not isinstance(message, dict):
            raise TypeError("no message")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise EndpointError(f"not a chat completion: {answer.text[:200]!r}") from error
    return {"message": message, "finish_reason": str(reason or "stop"), "usage": usage}


def _pause(answer: httpx.Response) -> float:
    try:
        wanted = float(answer.headers.get("Retry-After") or 1.0)
    except ValueError:
        wanted = 1.0
    return min(max(wanted, 0.05), _LONGEST_PAUSE_S)


def _error(answer: httpx.Response) -> Exception:
    text = answer.text[:500]
    if answer.status_code in (400, 413) and any(words in text.lower() for words in _CONTEXT_LIMIT):
        return ContextLimitError(text)
    return EndpointError(f"HTTP {answer.status_code}: {text}")
