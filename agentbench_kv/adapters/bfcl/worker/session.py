"""An OpenAI-compatible server as a trial sees it: one session, completions or chat.

The session's text: it only ever grows, so every prompt extends the one before.

Tool calls in model text: found, checked, and written as the Python that BFCL executes.

BFCL builds a source line from the call's name and its argument names and evaluates it. Both come
from the model, so both are checked here. A refused call becomes a line that raises what an
unknown name would raise; the model reads that as the call's result and the episode goes on.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from keyword import iskeyword
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

if TYPE_CHECKING:
    from agentbench_kv.adapters.worker_child import Request


SESSION_HEADER = "X-KVBench-Session"
_BUSY = frozenset({409, 429, 503})
_LONGEST_PAUSE_S = 30.0
_CLOSING_S = 30.0
_CONTEXT_LIMIT = ("context_length", "context_limit", "context length")


class EndpointError(Exception):
    """The server answered with an error, or with what is not a completion."""


class UnreachableError(Exception):
    """The server could not be reached, or the connection broke."""


class ContextLimitError(Exception):
    """The prompt passes the model's last position."""


class CancelledError(Exception):
    """The trial was cancelled."""


@dataclass(frozen=True)
class Completion:
    """One answer of either route."""

    said: Any  # completions: the text; chat: the message, to be sent back unchanged
    finish_reason: str
    usage: dict[str, Any]  # token counts; the server's KV account under `kvbench` if it keeps one
    seconds: float  # from the request that was accepted to its answer


class Completions:
    """A trial's line to the server: one session, named in every request.

    `/v1` at the end of `url` is optional. `body` is sent with every request (max_tokens,
    temperature, seed, stop). `timeout_s` bounds one completion, pauses on a busy server included.
    Cancelling the worker's `request` breaks off a blocking read.
    """

    def __init__(
        self,
        url: str,
        session: str,
        body: dict[str, Any],
        key: str | None,
        timeout_s: float,
        request: Request,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EndpointError(f"not an http(s) URL: {url!r}")
        self._secure = parts.scheme == "https"
        self.host = parts.hostname
        self.port = parts.port or (443 if self._secure else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._session = session
        self._body = body
        self._timeout_s = timeout_s
        self._request = request
        self._headers = {"Content-Type": "application/json", SESSION_HEADER: session}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def complete(self, prompt: str) -> Completion:
        return self._ask("completions", {"prompt": prompt}, "text", str)

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Completion:
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
        while True:
            started = time.monotonic()
            status, pause, answer = self._send("POST", route, body, deadline - started)
            if status == 200:
                return _completion(answer, key, kind, time.monotonic() - started)
            if status not in _BUSY or time.monotonic() + pause >= deadline:
                raise _error(status, answer)
            if self._request.cancelled.wait(pause):
                raise CancelledError("cancelled while the server was busy")

    def _served_model(self) -> str:
        status, _, answer = self._send("GET", "models", None, self._timeout_s)
        if status != 200:
            raise _error(status, answer)
        try:
            return str(json.loads(answer)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise EndpointError(f"not a list of models: {answer[:200]!r}") from error

    def _send(
        self, method: str, route: str, body: bytes | None, timeout_s: float
    ) -> tuple[int, float, bytes]:
        """Return the status, the seconds to wait if the server is busy, and the body."""
        if self._request.cancelled.is_set():
            raise CancelledError("cancelled")
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=max(timeout_s, 0.001))
        try:
            connection.connect()
            self._request.on_cancel(lambda: _break_off(connection))
            connection.request(method, f"{self._path}/{route}", body, self._headers)
            response = connection.getresponse()
            return response.status, _pause(response.headers.get("Retry-After")), response.read()
        except (OSError, http.client.HTTPException) as error:
            if self._request.cancelled.is_set():
                raise CancelledError("cancelled during a request") from error
            what = f"{type(error).__name__}: {error}"
            raise UnreachableError(f"{self.host}:{self.port}: {what}") from error
        finally:
            self._request.on_cancel(None)
            connection.close()


def _break_off(connection: http.client.HTTPConnection) -> None:
    sock: socket.socket | None = connection.sock
    if sock is not None:
        with contextlib.suppress(OSError):  # already closed
            sock.shutdown(socket.SHUT_RDWR)


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
        said, usage = choice[key], fields.get("usage") or {}
        # OpenAI clients know no `context_limit`; our server gives the exact reason in the usage.
        reason = usage.get("kvbench", {}).get("finish_reason", choice.get("finish_reason"))
        if not isinstance(said, kind):
            raise TypeError(f"no {key}")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        name = "completion" if kind is str else "chat completion"
        raise EndpointError(f"not a {name}: {answer[:200]!r}") from error
    return Completion(said, str(reason or "stop"), usage, seconds)


def _error(status: int, answer: bytes) -> Exception:
    text = answer.decode("utf-8", "replace")[:500]
    if status in (400, 413) and any(words in text.lower() for words in _CONTEXT_LIMIT):
        return ContextLimitError(text)
    return EndpointError(f"HTTP {status}: {text}")


END = "<|im_end|>"
INSTRUCTIONS = """\
You carry out the user's requests with the tools below. Go on calling tools until \
the current request is done; then answer in plain words, and the user will speak again.

Tools, one JSON description a line:
<tools>
{tools}
</tools>

To use a tool, write one JSON object between call marks:
<tool_call>
{{"name": "the tool's name", "arguments": {{"parameter": "value"}}}}
</tool_call>
Several calls may follow one another. Each result comes back between <tool_response> and \
</tool_response>."""


class Transcript:
    """Text of one session in the chat form with `<|im_start|>` and `<|im_end|>`."""

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        lines = (json.dumps(tool, ensure_ascii=False) for tool in tools)
        self._instructions = INSTRUCTIONS.format(tools="\n".join(lines))
        self.text = ""

    def begin(self, system: Iterable[str]) -> None:
        """Write the system message: the benchmark's own, then the tools."""
        joined = "\n\n".join([*map(_safe, system), self._instructions])
        self.text = f"<|im_start|>system\n{joined}{END}\n"

    def add(self, role: str, content: str) -> None:
        self._end_assistant()
        self.text += f"<|im_start|>{role}\n{_safe(content)}{END}\n"

    def prompt(self) -> str:
        """Open the assistant's message and return the whole text."""
        self._end_assistant()
        self.text += "<|im_start|>assistant\n"
        return self.text

    def add_generated(self, raw: str) -> None:
        self.text += raw

    def add_results(self, results: Iterable[str]) -> None:
        """Add the results of the calls as one user message."""
        marked = "\n".join(f"<tool_response>\n{_safe(r)}\n</tool_response>" for r in results)
        self._end_assistant()
        self.text += f"<|im_start|>user\n{marked}{END}\n"

    def _end_assistant(self) -> None:
        if self.text.endswith(END):  # a server that leaves the stop marker in the text
            self.text += "\n"
        elif not self.text.endswith(f"{END}\n"):
            self.text += f"{END}\n"


def _safe(content: str) -> str:
    # Text that a tool returns must not be able to open or close a message, and must be encodable.
    plain = content.encode("utf-8", "replace").decode("utf-8")
    return plain.replace("<|im_", "< |im_")


_MARKED = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """A call as the model wrote it."""

    name: str
    arguments: dict[str, Any]


def visible(text: str) -> str:
    """Return what follows the think block; nothing if the block never ends."""
    _, mark, tail = text.rpartition("</think>")
    if mark:
        return tail.lstrip("\n")
    return "" if "<think>" in text else text


def parse(text: str) -> tuple[list[Call], int]:
    """Find the calls in visible text; count marks whose payload is none, or that never close."""
    payloads = _MARKED.findall(text)
    calls = [call for call in map(_read, payloads) if call is not None]
    unclosed = max(0, text.count("<tool_call>") - len(payloads))
    return calls, len(payloads) - len(calls) + unclosed


def to_python(call: Call, tools: Collection[str]) -> str:
    """Write a call as source; all it takes from the model are literals and known names."""
    if call.name not in tools:
        return _failure("NameError", f"name {call.name!r} is not defined")
    if not all(k.isascii() and k.isidentifier() and not iskeyword(k) for k in call.arguments):
        return _failure("SyntaxError", "invalid syntax")
    arguments = ",".join(f"{key}={value!r}" for key, value in call.arguments.items())
    return f"{call.name}({arguments})"


def tool_names(entry: Mapping[str, Any]) -> frozenset[str]:
    """Return the names that count as known.

    The official executor runs a held-out function that a model guesses, so they are among them.
    """
    return frozenset(tool["name"] for tool in all_tools(entry))


def all_tools(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools of an entry, then those that it shows only in a later turn."""
    return [*entry["function"], *chain.from_iterable(entry.get("missed_function", {}).values())]


def as_text(calls: Sequence[Mapping[str, Any]]) -> str:
    """Write calls in the OpenAI form as marked text, which `parse` reads."""
    functions = [call.get("function") or {} for call in calls]
    payloads = [payload_of(f.get("name"), f.get("arguments")) for f in functions]
    # JSON lets a character be written as its number, so that no argument can open or close a mark.
    return "\n".join(marked(payload.replace("<", "\\u003c")) for payload in payloads)


def payload_of(name: Any, arguments: Any) -> str:
    """Write a call as a model does, unescaped: the checker compares text."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def marked(payload: str) -> str:
    return f"<tool_call>\n{payload}\n</tool_call>"


def unmarked(text: str) -> str:
    """Return text whose call marks are no marks any more: on the chat route calls have a field."""
    return text.replace("<tool_call>", "< tool_call>")


def _read(payload: str) -> Call | None:
    try:
        fields = json.loads(payload)
        name, arguments = fields["name"], fields["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_call = isinstance(name, str) and isinstance(arguments, dict)
    return Call(name, arguments) if is_call else None


def _failure(kind: str, message: str) -> str:
    # An expression that raises: the executor turns it into the result an unknown name would get.
    return f"(_ for _ in ()).throw({kind}({message!a}))"
