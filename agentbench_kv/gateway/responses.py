"""Response bodies: whole completions and server-sent chunks, as OpenAI clients read them."""

from __future__ import annotations

import itertools
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from agentbench_kv.gateway.parsing import Delta
from agentbench_kv.gateway.types import ChatResult

_numbers = itertools.count(1)
DONE = b"data: [DONE]\n\n"


def sse(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=True).encode() + b"\n\n"


class Format(ABC):
    """What chat and completion responses share."""

    prefix: ClassVar[str]  # of the id
    whole: ClassVar[str]  # the object's type
    chunk: ClassVar[str]
    empty: ClassVar[dict[str, Any]]  # the answer in a chunk that only ends the stream

    def __init__(self, model: str, *, include_usage: bool, token_ids: bool) -> None:
        self._head = {"id": f"{self.prefix}-{next(_numbers)}", "created": int(time.time())}
        self._model = model
        self._include_usage = include_usage
        self._token_ids = token_ids

    @abstractmethod
    def answer(self, result: ChatResult) -> dict[str, Any]:
        """Return the answer of a whole response."""

    @abstractmethod
    def pieces(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Yield the chunks of one delta."""

    def body(self, result: ChatResult) -> dict[str, Any]:
        choice = self._last_choice(self.answer(result), result)
        return {**self._envelope(self.whole), "choices": [choice], "usage": result.usage}

    def first(self) -> Iterator[dict[str, Any]]:
        yield from ()

    def last(self, result: ChatResult) -> Iterator[dict[str, Any]]:
        envelope = self._envelope(self.chunk)
        yield {**envelope, "choices": [self._last_choice(self.empty, result)]}
        if self._include_usage:
            yield {**envelope, "choices": [], "usage": result.usage}

    def _piece(self, answer: dict[str, Any]) -> dict[str, Any]:
        choice = {**answer, "index": 0, "finish_reason": None}
        return {**self._envelope(self.chunk), "choices": [choice]}

    def _last_choice(self, answer: dict[str, Any], result: ChatResult) -> dict[str, Any]:
        # Finish reasons that OpenAI clients know; `usage.kvbench` has the exact one.
        known = {"context_limit": "length", "cancelled": "stop"}
        reason = known.get(result.finish_reason, result.finish_reason)
        ids = {"token_ids": result.token_ids} if self._token_ids else {}
        return {**answer, "index": 0, "finish_reason": reason, **ids}

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {**self._head, "object": kind, "model": self._model}


class ChatFormat(Format):
    """Responses of `/v1/chat/completions`."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    empty: ClassVar[dict[str, Any]] = {"delta": {}}

    def __init__(self, model: str, *, include_usage: bool, token_ids: bool) -> None:
        super().__init__(model, include_usage=include_usage, token_ids=token_ids)
        self._calls = 0

    def answer(self, result: ChatResult) -> dict[str, Any]:
        """Return the message; content is null when there are only calls."""
        empty = not result.content and result.tool_calls
        return {"message": {**result.message, "content": None if empty else result.content}}

    def first(self) -> Iterator[dict[str, Any]]:
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


class CompletionFormat(Format):
    """Responses of `/v1/completions`."""

    prefix = "cmpl"
    whole = chunk = "text_completion"
    empty: ClassVar[dict[str, Any]] = {"text": "", "logprobs": None}

    def answer(self, result: ChatResult) -> dict[str, Any]:
        return {"text": result.content, "logprobs": None}

    def pieces(self, delta: Delta) -> Iterator[dict[str, Any]]:
        yield self._piece({"text": delta.text, "logprobs": None})
