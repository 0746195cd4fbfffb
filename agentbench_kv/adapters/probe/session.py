"""A recorded session in OpenAI's chat form, and the calls in it with their results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.base import Message
from agentbench_kv.adapters.data import json_rows
from agentbench_kv.errors import UsageError

_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class ChatSession:
    """Messages, and the tools that the agent was shown; thoughts stand in `reasoning_content`."""

    id: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    cluster: str | None = None

    @property
    def sha(self) -> str:
        """The beginning of the SHA-256 of its messages and tools, in hex."""
        said = json.dumps([self.messages, self.tools], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:16]

    @property
    def answers(self) -> list[int]:
        """Messages that the agent wrote; a greeting before the user's first words is a prompt.

        So is what has `weight` 0, as OpenAI's fine-tuning format marks what is read only.
        """
        roles = [message["role"] for message in self.messages]
        first = roles.index("user") if "user" in roles else 1  # nothing asks for message 0
        return [
            at
            for at, message in enumerate(self.messages)
            if message["role"] == "assistant" and at >= first and message.get("weight") != 0
        ]


@dataclass(frozen=True)
class ToolUse:
    """A call with where it stands and where its result does."""

    name: str
    arguments: dict[str, Any]
    message: int
    result: int | None


def text_of(message: Message) -> str:
    return str(message.get("content") or "")


def thoughts_of(message: Message) -> str:
    return str(message.get("reasoning_content") or "")


def tool_uses(messages: Sequence[Message]) -> list[ToolUse]:
    """Return the calls in their order; a result belongs to the first call of its id before it."""
    results = {
        (str(message["tool_call_id"]), at): at
        for at, message in enumerate(messages)
        if message["role"] == "tool" and message.get("tool_call_id") is not None
    }
    found: list[ToolUse] = []
    taken: set[int | None] = set()
    for at, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            function, name = call["function"], str(call.get("id"))
            # An id may come again, in a later turn or beside the call: each takes the next one.
            after = [place for (id_, place) in results if id_ == name and place > at]
            result = min((place for place in after if place not in taken), default=None)
            taken.add(result)
            arguments = _object(function.get("arguments"))
            if arguments is None:
                continue
            found.append(ToolUse(str(function["name"]), arguments, at, result))
    return found


def _object(given: object) -> dict[str, Any] | None:
    """Return a call's arguments, which may be JSON text; None if they are no object."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return None
    return dict(given) if isinstance(given, Mapping) else None


def read_sessions(path: Path) -> Iterator[ChatSession]:
    """Read recorded trajectories, one JSON object with `messages` and `tools` a line.

    `id` and `cluster` are optional. UsageError for what is no such line.
    """
    for number, row in json_rows(path):
        messages: Any = row.get("messages")
        tools: Any = row.get("tools") or []
        if problem := _problem(messages) or _tools_problem(tools):
            raise UsageError(f"{path} line {number}: {problem}")
        cluster = row.get("cluster")
        name = str(row.get("id", number))
        yield ChatSession(
            name, tuple(messages), tuple(tools), None if cluster is None else str(cluster)
        )


def refuse_repeated(path: Path, sessions: Iterable[ChatSession]) -> None:
    """Refuse a session that is another one, or its beginning, and is not in the same cluster.

    A file with a line for each request has one session many times, which no interval would show.
    """
    ends: dict[str, ChatSession] = {}
    begun: dict[str, ChatSession] = {}
    for session in sessions:
        chain = list(_beginnings(session))
        whole = chain[-1]
        others = (begun.get(whole), *(ends.get(each) for each in chain))
        for other in others:
            if other is None or (session.cluster is not None and session.cluster == other.cluster):
                continue
            raise UsageError(
                f"{path}: of sessions {other.id!r} and {session.id!r} one is the other or its "
                "beginning, so they are no two; keep the longer one, or give both one `cluster`"
            )
        ends.setdefault(whole, session)
        begun |= dict.fromkeys(chain, session)


def _beginnings(session: ChatSession) -> Iterator[str]:
    """Yield a hash of the tools and the first message, the first two, ... and all of them."""
    digest = hashlib.sha256(json.dumps(session.tools, sort_keys=True, default=str).encode())
    for message in session.messages:
        digest.update(json.dumps(message, sort_keys=True, default=str).encode())
        yield digest.hexdigest()


def _tools_problem(tools: object) -> str:
    good = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    return "" if good else "tools are no list of objects"


def _problem(messages: object) -> str:
    if not isinstance(messages, list) or not messages:
        return "expected an object with a list `messages`"
    for at, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            return f"message {at} has no role among {', '.join(_ROLES)}"
        if not isinstance(message.get("content"), str | None):
            return f"message {at}: content is no text"
        if message.get("weight") not in (None, 0, 1):
            return f"message {at}: weight is 0 (read only) or 1"
        for call in message.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                return f"message {at}: a call without a function's name"
    return ""
