"""The agent as worker processes see it: one session of an OpenAI-compatible server, and its texts.

Standard library only: workers import it in interpreters that do not have this package.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

if TYPE_CHECKING:
    from agentbench_kv.adapters.worker_child import WorkerRequest

SESSION_HEADER = "X-KVBench-Session"
_DEEPEST = 64  # levels of arguments
NULL_SENTENCE = "I would rather not."  # all that the null agent says
_BUSY = frozenset({409, 429, 503})
_LONGEST_PAUSE_S = 30.0
_CLOSING_S = 30.0
# More than servers take, and more text than a context can hold.
_LONGEST_BODY = 32 << 20
_CONTEXT_LIMIT = ("context_length", "context_limit", "context length")


def think_block(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"


def call_text(name: Any, arguments: Any) -> str:
    """Write a tool call as a model does, unescaped: the checkers compare text."""
    return marked_call(json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False))


def marked_call(payload: str) -> str:
    return f"<tool_call>\n{payload}\n</tool_call>"


def is_shallow(arguments: Any) -> bool:
    """Say whether the arguments of a call nest no deeper than any tool's do.

    Deeper ones are no call: what copies, prints or validates them recurses, and breaks elsewhere.
    """
    level = [arguments]
    for _ in range(_DEEPEST):
        nested = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for inner in nested for each in inner if isinstance(each, (dict, list))]
        if not level:
            return True
    return False


class ServerError(Exception):
    """The server answered with an error, or with what is not a completion."""


class UnreachableError(Exception):
    """The server could not be reached, or the connection broke."""


class ContextFullError(Exception):
    """The session passes the model's last position."""


@dataclass(frozen=True)
class Completion:
    """One answer of either route."""

    said: Any  # completions: the text; chat: the message, to be sent back unchanged
    message: dict[str, Any]  # what was said, thoughts and calls taken apart
    finish_reason: str
    usage: dict[str, Any]  # token counts; the server's KV account under `kvbench` if it keeps one
    seconds: float  # from the request that was accepted to its answer


def address_of(url: str) -> tuple[str, int]:
    """Return the host and port of an http(s) URL; ServerError if it is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ServerError(f"not an http(s) URL: {url!r}")
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def base_url(url: str) -> str:
    """Return a server's URL with `/v1` at its end, which is optional where users name servers."""
    return url.rstrip("/").removesuffix("/v1") + "/v1"


@dataclass
class ChatHistory:
    """The messages of a session over the chat route, which only grows, and a record per answer."""

    messages: list[dict[str, Any]]
    steps: list[dict[str, Any]] = field(default_factory=list)

    def add(self, completion: Completion) -> dict[str, Any]:
        """Take in an answer; return the message that goes back with the next request.

        Its reasoning does not go back: the server's session has it.
        """
        answer, usage = completion.said, completion.usage
        said = {"role": "assistant", "content": answer.get("content")}
        if answer.get("tool_calls"):
            said["tool_calls"] = answer["tool_calls"]
        self.messages.append(said)
        self.steps.append({
            "calls": len(answer.get("tool_calls") or ()),
            "unparsable": int(unparsable(completion)),
            "finish_reason": completion.finish_reason,
            "prompt_tokens": usage.get("prompt_tokens"),
            "completion_tokens": usage.get("completion_tokens"),
        })  # fmt: skip
        if completion.finish_reason == "context_limit":
            raise ContextFullError("the session reached the model's last position")
        return said


class AgentConnection:
    """A trial's line to the server of the agent: one session, named in every request.

    `body` is sent with every request (max_tokens, temperature, seed, stop). `timeout_s` bounds one
    completion, pauses on a busy server included. `answered` is called at every answer.
    """

    def __init__(
        self,
        url: str,
        session: str,
        body: dict[str, Any],
        key: str | None,
        timeout_s: float,
        answered: Callable[[], None] = lambda: None,
    ) -> None:
        self._address = address_of(url)
        parts = urlsplit(base_url(url))
        self._secure, self._path = parts.scheme == "https", parts.path
        self._session = session
        self._body = body
        self._timeout_s = timeout_s
        self._answered = answered
        self._headers = {"Content-Type": "application/json", SESSION_HEADER: session}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    @classmethod
    def of_trial(cls, request: WorkerRequest, **body: Any) -> AgentConnection:
        """Return the line that a trial's request describes, which its worker may then use."""
        args = request.args
        request.guard.allow(*address_of(args["endpoint"]))
        asked, key, timeout_s = {**body, **args["sampling"]}, args["key"], args["timeout_s"]
        return cls(args["endpoint"], args["session"], asked, key, timeout_s, request.renew)

    def complete(self, prompt: str, tools: Sequence[dict[str, Any]]) -> Completion:
        """Ask a server of this project, which reads the answer's calls of the tools."""
        return self._ask("completions", {"prompt": prompt, "tools": tools}, "text", str)

    def chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> Completion:
        fields: dict[str, Any] = {"messages": messages}
        if tools:
            fields["tools"] = tools
        return self._ask("chat/completions", fields, "message", dict)

    def close_session(self) -> dict[str, Any]:
        """Close the session at the server; return its KV account, empty if it keeps none."""
        path = f"sessions/{quote(self._session, safe='')}"
        status, _, answer = self._send("DELETE", path, None, _CLOSING_S)
        try:
            account = json.loads(answer)["kvbench"] if status == 200 else {}
        except (ValueError, LookupError, TypeError):
            return {}
        return account if isinstance(account, dict) else {}

    def _ask(self, route: str, fields: dict[str, Any], key: str, kind: type) -> Completion:
        """Ask until the server is not busy; what it said is a `kind` under `key`."""
        deadline = time.monotonic() + self._timeout_s
        if "model" not in self._body:
            self._body["model"] = self._served_model()
        body = json.dumps({**self._body, **fields}).encode()
        if len(body) > _LONGEST_BODY:
            raise ContextFullError(f"the session is a request of {len(body) >> 20} MiB")
        while True:
            started = time.monotonic()
            status, pause, answer = self._send("POST", route, body, deadline - started)
            if status == 200:
                self._answered()
                return _completion(answer, key, kind, time.monotonic() - started)
            if status not in _BUSY or time.monotonic() + pause >= deadline:
                raise _failure(status, answer)
            time.sleep(pause)

    def _served_model(self) -> str:
        status, _, answer = self._send("GET", "models", None, self._timeout_s)
        if status != 200:
            raise _failure(status, answer)
        try:
            return str(json.loads(answer)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ServerError(f"not a list of models: {answer[:200]!r}") from error

    def _send(
        self, method: str, route: str, body: bytes | None, timeout_s: float
    ) -> tuple[int, float, bytes]:
        """Return the status, the seconds to wait if the server is busy, and the body."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(*self._address, timeout=max(timeout_s, 0.001))
        try:
            connection.request(method, f"{self._path}/{route}", body, self._headers)
            response = connection.getresponse()
            return response.status, _pause(response.headers.get("Retry-After")), response.read()
        except (OSError, http.client.HTTPException) as error:
            host, port = self._address
            raise UnreachableError(f"{host}:{port}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()


def _pause(header: str | None) -> float:
    try:
        wanted = float(header or 1.0)
    except ValueError:
        wanted = 1.0
    return min(max(wanted, 0.05), _LONGEST_PAUSE_S)


def _completion(answer: bytes, key: str, kind: type, seconds: float) -> Completion:
    try:
        fields = json.loads(answer)
        choice = fields["choices"][0]
        said, message, usage = choice[key], choice["message"], fields.get("usage") or {}
        # OpenAI clients know no `context_limit`; our server gives the exact reason in the usage.
        reason = usage.get("kvbench", {}).get("finish_reason") or choice.get("finish_reason")
        if not isinstance(said, kind) or not isinstance(message, dict):
            raise TypeError(f"no {key}")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        name = "completion" if kind is str else "chat completion"
        raise ServerError(f"not a {name}: {answer[:200]!r}") from error
    return Completion(said, message, str(reason or "stop"), usage, seconds)


def unparsable(answer: Completion) -> bool:
    """Return whether an answer has a call's marker without a call, as the server says."""
    return bool((answer.usage.get("kvbench") or {}).get("unparsable"))


def _failure(status: int, answer: bytes) -> Exception:
    text = answer.decode("utf-8", "replace")[:500]
    if status == 413 or (status == 400 and any(w in text.lower() for w in _CONTEXT_LIMIT)):
        return ContextFullError(text)
    return ServerError(f"HTTP {status}: {text}")
