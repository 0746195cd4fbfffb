"""What reads a model's answers, and in which syntax their calls are where it reads none."""

from __future__ import annotations

import re
from collections.abc import Callable

from agentbench_kv.gateway.calls import Tools, is_offered, offered_names
from agentbench_kv.gateway.harmony import HarmonyReader
from agentbench_kv.gateway.parsing import MessageReader, OutputParser
from agentbench_kv.phases.syntax import SYNTAXES, ToolSyntax


def reader_for(
    syntax: ToolSyntax, next_id: Callable[[], str], *, thinking: bool, tools: Tools
) -> MessageReader:
    """Return what reads one answer of a model with this syntax."""
    if syntax.name == "harmony":
        return HarmonyReader(next_id)
    return OutputParser(syntax, next_id, thinking=thinking, tools=tools)


# A call in JSON anywhere, which no syntax reads for certain.
_JSON_CALL = re.compile(r'\{\s*"name"\s*:\s*"([^"]+)"\s*,\s*"(?:arguments|parameters)"\s*:')


def unread_syntax(text: str, syntax: ToolSyntax, *, thinking: bool, tools: Tools) -> str:
    """Return the syntax in which an answer calls tools that were offered; empty if it calls none.

    For answers in which `syntax` found no call. Its own name means that it does not read calls
    where these stand.
    """
    if not any(name in text for name in offered_names(tools)):
        return ""
    # Of those that read JSON without markers, the one that tells the model to write it.
    others = (other for other in SYNTAXES.values() if other.name != syntax.name)
    for other in sorted(others, key=lambda each: (bool(each.bare), not each.prompted)):
        reader = reader_for(other, str, thinking=thinking, tools=tools)
        reader.feed(text)
        reader.finish()
        if any(is_offered(call["function"]["name"], tools) for call in reader.tool_calls):
            return other.name
    said = OutputParser(SYNTAXES["none"], str, thinking=thinking)
    said.feed(text)
    said.finish()
    found = _JSON_CALL.findall(said.content)
    return "json" if any(is_offered(name, tools) for name in found) else ""
