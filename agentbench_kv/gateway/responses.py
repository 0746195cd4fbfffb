"""Response bodies: whole completions and server-sent chunks, as OpenAI clients read them."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

from agentbench_kv.gateway.parsing import Delta
from agentbench_kv.gateway.types import ChatResult

__all__ = ["ChatFormat", "CompletionFormat", "sse"]

_numbers = itertools.count(1)
DONE = b"data: [DONE]\n\n"


def sse(data: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=True).encode() + b"\n\n"


class _Format:
    """What chat and completion responses share."""

    prefix = ""
    whole = ""
    chunk = ""

    def __init__(self, model: str, *, include_usage: bool, token_ids: bool) -> None:
        self._head = {"id": f"{self.prefix}-{next(_numbers)}", "created": int(time.time())}
        self._model = model
        self._include_usage = include_usage
        self._token_ids = token_ids

    def body(self, result: ChatResult) -> dict[str, Any]:
        """Return the whole response."""
        choice = {**self.choice(result), "index": 0, "finish_reason": api_reason(result)}
        if self._token_ids:
            choice["token_ids"] = result.token_ids
        return {**self._envelope(self.whole), "choices": [choice], "usage": result.usage}

    def first(self) -> Iterator[dict[str, Any]]:
        """Yield what a stream begins with."""
        yield from ()

    def pieces(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Yield the chunks of one delta."""
        raise NotImplementedError

    def last(self, result: ChatResult) -> Iterator[dict[str, Any]]:
        """Yield what a stream ends with."""
        choice = {**self.empty(), "index": 0, "finish_reason": api_reason(result)}
        if self._token_ids:
            choice["token_ids"] = result.token_ids
        yield {**self._envelope(self.chunk), "choices": [choice]}
        if self._include_usage:
            yield {**self._envelope(self.chunk), "choices": [], "usage": result.usage}

    def choice(self, result: ChatResult) -> dict[str, Any]:
        """Return the answer of a whole response."""
        raise NotImplementedError

    def empty(self) -> dict[str, Any]:
        """Return the answer of a chunk that only ends the stream."""
        raise NotImplementedError

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {**self._head, "object": kind, "model": self._model}

    def _piece(self, choice: dict[str, Any]) -> dict[str, Any]:
        choice = {**choice, "index": 0, "finish_reason": None}
        return {**self._envelope(self.chunk), "choices": [choice]}


class ChatFormat(_Format):
    """Responses of `/v1/chat/completions`."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(self, model: str, *, include_usage: bool, token_ids: bool) -> None:
        super().__init__(model, include_usage=include_usage, token_ids=token_ids)
        self._calls = 0

    def choice(self, result: ChatResult) -> dict[str, Any]:
        """Return the message; content is null when there are only calls."""
        empty = not result.content and result.tool_calls
        return {"message": {**result.message, "content": None if empty else result.content}}

    def first(self) -> Iterator[dict[str, Any]]:
        """Yield the role."""
        yield self._piece({"delta": {"role": "assistant", "content": ""}})

    def pieces(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Yield text as it is, a call as its name and then its arguments."""
        if delta.call is None:
            field = "content" if delta.kind == "content" else "reasoning_content"
            yield self._piece({"delta": {field: delta.text}})
            return
        index, self._calls = self._calls, self._calls + 1
        function = delta.call["function"]
        head = {**delta.call, "index": index, "function": {**function, "arguments": ""}}
        tail = {"index": index, "function": {"arguments": function["arguments"]}}
        yield self._piece({"delta": {"tool_calls": [head]}})
        yield self._piece({"delta": {"tool_calls": [tail]}})

    def empty(self) -> dict[str, Any]:
        """Return an empty delta."""
        return {"delta": {}}


class CompletionFormat(_Format):
    """Responses of `/v1/completions`."""

    prefix = "cmpl"
    whole = "text_completion"
    chunk = "text_completion"

    def choice(self, result: ChatResult) -> dict[str, Any]:
        """Return the text."""
        return {"text": result.content, "logprobs": None}

    def pieces(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Yield the text."""
        yield self._piece({"text": delta.text, "logprobs": None})

    def empty(self) -> dict[str, Any]:
        """Return no text."""
        return {"text": "", "logprobs": None}


def api_reason(result: ChatResult) -> str:
    """Return a finish reason OpenAI clients know; `usage.kvbench` has the exact one."""
    known = {"context_limit": "length", "cancelled": "stop"}
    return known.get(result.finish_reason, result.finish_reason)
