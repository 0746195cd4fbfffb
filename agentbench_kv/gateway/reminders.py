"""Breadcrumbs: a line of text for every evicted span that a message brings to mind.

The method says which spans, the gateway makes the words: no text passes through the method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentbench_kv.engines.base import SpanRange
from agentbench_kv.gateway.messages import Message, text_of
from agentbench_kv.phases.codec import TokenCodec


def reminder(codec: TokenCodec, tokens: Sequence[int], spans: Sequence[SpanRange]) -> str:
    """Return one line per span of a session's tokens, special tokens left out."""
    lines = []
    for start, end in spans:
        ids = [token for token in tokens[start:end] if token not in codec.special]
        text = " ".join(codec.decode(ids).split())
        lines.append(f"[earlier: {text}]\n")
    return "".join(lines)


def remind(messages: Sequence[Message], text: str) -> list[dict[str, Any]]:
    """Return messages of which the last one by the user begins with the reminder."""
    reminded = [dict(message) for message in messages]
    users = [message for message in reminded if message.get("role") == "user"]
    if users:
        users[-1]["content"] = text + text_of(users[-1].get("content"))
    return reminded
