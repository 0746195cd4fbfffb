"""Tool calls in model text: found, checked, and written as the Python that BFCL executes.

BFCL builds a source line from the call's name and its argument names and evaluates it. Both come
from the model, so both are checked here. A refused call becomes a line that raises what an
unknown name would raise; the model reads that as the call's result and the episode goes on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from keyword import iskeyword
from typing import Any

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
