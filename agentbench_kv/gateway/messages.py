"""OpenAI messages in one canonical form, for templates and for comparing histories."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentbench_kv.errors import UsageError

__all__ = ["canonical", "for_template", "text_of", "tools_key"]

Message = Mapping[str, Any]


def text_of(content: object) -> str:
    """Return the text of a message's content: a string, None, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(_part_text(part) for part in content)
    raise UsageError(f"message content must be text, not {type(content).__name__}")


def canonical(message: Message) -> tuple[str, str, str]:
    """Return what makes a message the same message: role, content, calls.

    Reasoning, ids, white space around an assistant's content and the spelling of JSON arguments
    do not count: clients drop or rewrite them.
    """
    role = _role(message)
    content = text_of(message.get("content"))
    calls = [_canonical_call(call) for call in message.get("tool_calls") or ()]
    if role == "assistant":
        content = content.strip()
    return role, content, json.dumps(calls, sort_keys=True) if calls else ""


def for_template(message: Message) -> dict[str, Any]:
    """Return the message as chat templates expect it: text content, arguments as objects."""
    plain = {key: value for key, value in message.items() if value is not None}
    plain["role"] = _role(message)
    plain["content"] = text_of(message.get("content"))
    plain.pop("tool_calls", None)
    calls = [_template_call(call) for call in message.get("tool_calls") or ()]
    return {**plain, "tool_calls": calls} if calls else plain


def tools_key(tools: Sequence[Mapping[str, Any]] | None) -> str:
    """Return a string equal for equal tool lists."""
    return json.dumps(list(tools), sort_keys=True) if tools else ""


def _role(message: Message) -> str:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UsageError("every message needs a role")
    return role


def _part_text(part: object) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise UsageError(f"message content part {kind!r} is not text; this server takes text only")


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError("every tool call needs a function with a name")
    return function


def _parsed(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return arguments


def _canonical_call(call: Mapping[str, Any]) -> list[object]:
    function = _function(call)
    return [function["name"], _parsed(function.get("arguments"))]


def _template_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = _function(call)
    arguments = _parsed(function.get("arguments"))
    inner = {"name": function["name"], "arguments": {} if arguments is None else arguments}
    return {"id": call.get("id", ""), "type": "function", "function": inner}
