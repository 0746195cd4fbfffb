"""The golden agent's sessions of a benchmark that runs in workers, as messages.

The worker plays as ever; what it asks is answered over HTTP on the loopback, from the task's own
script. No model and no token is involved.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Self

from agentbench_kv.adapters.agent_client import NULL_SENTENCE, SESSION_HEADER
from agentbench_kv.adapters.base import (
    AgentClient,
    Message,
    Reply,
    Sample,
    Task,
    TrialContext,
)
from agentbench_kv.adapters.bfcl.worker.session import parse
from agentbench_kv.adapters.probe.session import ChatSession, read_sessions
from agentbench_kv.environments import home
from agentbench_kv.errors import UsageError
from agentbench_kv.results.records import TrialStatus

_THINK, _THOUGHT = "<think>", "</think>"
_CALL = "<tool_call>"
_FORM = 1  # of what is kept
_NONE = "none\n"  # is kept of a sample that the benchmark does not take to its end
# Neither the script's time nor a worker's failure.
_DEFINITE = {TrialStatus.SCORED, TrialStatus.TURN_LIMIT, TrialStatus.UNPARSABLE}


class GoldSessions:
    """A benchmark's golden sessions: played once, then kept in kvbench's folder.

    They are known by the benchmark's settings, versions and data; a file that is no such session is
    played and written again.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        about = [_FORM, task.name, task.settings(), task.provenance()]
        key = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()
        self._folder = home() / "gold" / key[:32]

    def of(self, sample: Sample) -> ChatSession | None:
        """Return a sample's session; None if the benchmark does not take it to its end."""
        path = self._folder / f"{hashlib.sha256(sample.id.encode()).hexdigest()[:32]}.jsonl"
        with suppress(OSError, UsageError, ValueError, StopIteration):
            if path.read_text(encoding="utf-8") == _NONE:
                return None
            return next(read_sessions(path))
        session, definite = _played(self._task, sample, 600.0)
        if definite:
            _keep(path, _NONE if session is None else json.dumps(asdict(session)) + "\n")
        return session


def _keep(path: Path, text: str) -> None:
    with suppress(OSError):  # it is played again the next time
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            file.write(text)
        Path(file.name).replace(path)


def gold_session(task: Task, sample: Sample, timeout_s: float = 600.0) -> ChatSession | None:
    """Play a sample's golden script; None if the benchmark does not take it to its end."""
    return _played(task, sample, timeout_s)[0]


def _played(task: Task, sample: Sample, timeout_s: float) -> tuple[ChatSession | None, bool]:
    """Return a session, or None, and whether another play would end in the same way."""
    with GoldServer(task.script(sample, "gold")) as server:
        context = TrialContext(0, 0, _NoClient(), server.url, "gold", timeout_s=timeout_s)
        outcome = task.run_trial(sample, context)
    if outcome.status is not TrialStatus.SCORED or not server.asked.messages:
        return None, outcome.status in _DEFINITE
    messages = server.asked.messages
    found = ChatSession(sample.id, tuple(messages), tuple(server.asked.tools), sample.cluster)
    return found, True


def said_in(text: str, number: int) -> Message:
    """Return a script's text as an assistant message: thoughts, calls and words apart."""
    thoughts, rest = "", text
    if text.startswith(_THINK) and _THOUGHT in text:
        thoughts, _, rest = text.removeprefix(_THINK).partition(_THOUGHT)
    written, _ = parse(rest)
    message: Message = {"role": "assistant", "content": rest.partition(_CALL)[0].strip()}
    if thoughts.strip():
        message["reasoning_content"] = thoughts.strip()
    if written:
        message["tool_calls"] = [
            {
                "id": f"call_{number}_{at}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for at, call in enumerate(written)
        ]
    return message


@dataclass
class _Asked:
    """What the worker has sent, with the answers as they were given."""

    messages: list[Message] = field(default_factory=list)
    tools: list[Mapping[str, Any]] = field(default_factory=list)
    given: dict[int, Message] = field(default_factory=dict)  # by their place in the messages


class GoldServer:
    """Answers one session's chat requests with a script's texts, one after the other."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.asked = _Asked()
        self._texts = texts
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="kvbench-gold", daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, body: Mapping[str, Any]) -> Message:
        """Return the next answer to a chat request, and note the session so far."""
        with self._lock:
            number = len(self.asked.given)
            text = self._texts[number] if number < len(self._texts) else NULL_SENTENCE
            said = said_in(text, number)
            # Benchmarks leave thoughts out of what they send back; the session has them.
            messages = [self.asked.given.get(at, m) for at, m in enumerate(body["messages"])]
            self.asked.given[len(messages)] = said
            self.asked.messages = [*messages, said]
            self.asked.tools = list(body.get("tools") or ())
            return said


def _handler(server: GoldServer) -> type[BaseHTTPRequestHandler]:
    class GoldHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"data": [{"id": "gold"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.headers.get(SESSION_HEADER) or "messages" not in body:
                self.send_error(400)
                return
            said = server.answer(body)
            reason = "tool_calls" if said.get("tool_calls") else "stop"
            choice = {"index": 0, "message": said, "finish_reason": reason}
            self._send({"choices": [choice], "usage": {}})

        def _send(self, document: Mapping[str, Any]) -> None:
            text = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    return GoldHandler


class _NoClient(AgentClient):
    """Stands where the benchmark asks over HTTP."""

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        del messages, tools, max_tokens, stop
        raise UsageError("a golden session is asked for over HTTP only")
