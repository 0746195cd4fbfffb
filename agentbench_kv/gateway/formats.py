"""Answers as OpenAI clients read them: whole, or as the chunks of a stream."""

from __future__ import annotations

import itertools
import json
import time
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from agentbench_kv.gateway.api_errors import ApiError
from agentbench_kv.gateway.exchange import ChatResult
from agentbench_kv.gateway.parsing import Delta, Logprob
from agentbench_kv.gateway.requests import EmbeddingRequest

_numbers = itertools.count(1)
DONE = b"data: [DONE]\n\n"


def sse(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=True).encode() + b"\n\n"


class Format(ABC):
    """How a result is written: whole, or as the chunks of a stream."""

    end: ClassVar[bytes] = DONE  # of a stream

    @abstractmethod
    def body(self, result: ChatResult) -> dict[str, Any]:
        """Return a whole response."""

    @abstractmethod
    def first(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks before any text."""

    @abstractmethod
    def pieces(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Yield the chunks of one delta."""

    @abstractmethod
    def last(self, result: ChatResult) -> Iterator[dict[str, Any]]:
        """Yield the chunks that say how it ended."""

    def failed(self, error: ApiError) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a stream that breaks off."""
        yield error.body

    def frame(self, chunk: dict[str, Any]) -> bytes:
        """Return a chunk as an event of the stream."""
        return sse(chunk)


class ChoiceFormat(Format):
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
        self._reported = 0  # tokens whose log probabilities chunks have shown

    @abstractmethod
    def answer(self, result: ChatResult) -> dict[str, Any]:
        """Return the answer of a whole response."""

    @abstractmethod
    def logprobs(self, tokens: Sequence[Logprob]) -> dict[str, Any]:
        """Return the log probabilities of a choice, or of a chunk's new tokens."""

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

    def _piece(self, answer: dict[str, Any], tokens: Sequence[Logprob] = ()) -> dict[str, Any]:
        choice = {**answer, **self._shown(tokens), "index": 0, "finish_reason": None}
        return {**self._envelope(self.chunk), "choices": [choice]}

    def _shown(self, tokens: Sequence[Logprob]) -> dict[str, Any]:
        self._reported += len(tokens)
        return {"logprobs": self.logprobs(tokens)} if tokens else {}

    def _last_choice(self, answer: dict[str, Any], result: ChatResult) -> dict[str, Any]:
        # Finish reasons that OpenAI clients know; `usage.kvbench` has the exact one.
        known = {"context_limit": "length", "cancelled": "stop"}
        reason = known.get(result.finish_reason, result.finish_reason)
        ids = {"token_ids": result.token_ids} if self._token_ids else {}
        rest = self._shown((result.logprobs or [])[self._reported :])
        return {**answer, **rest, "index": 0, "finish_reason": reason, **ids}

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {**self._head, "object": kind, "model": self._model}


class ChatFormat(ChoiceFormat):
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

    def logprobs(self, tokens: Sequence[Logprob]) -> dict[str, Any]:
        return {"content": list(tokens), "refusal": None}

    def first(self) -> Iterator[dict[str, Any]]:
        yield self._piece({"delta": {"role": "assistant", "content": ""}})

    def pieces(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Yield text as it is, a call as its name and then its arguments."""
        if delta.call is None:
            field = "content" if delta.kind == "content" else "reasoning_content"
            yield self._piece({"delta": {field: delta.text}}, delta.logprobs)
            return
        index, self._calls = self._calls, self._calls + 1
        function = delta.call["function"]
        head = {**delta.call, "index": index, "function": {**function, "arguments": ""}}
        tail = {"index": index, "function": {"arguments": function["arguments"]}}
        yield self._piece({"delta": {"tool_calls": [head]}}, delta.logprobs)
        yield self._piece({"delta": {"tool_calls": [tail]}})


class CompletionFormat(ChoiceFormat):
    """Responses of `/v1/completions`."""

    prefix = "cmpl"
    whole = chunk = "text_completion"
    empty: ClassVar[dict[str, Any]] = {"text": "", "logprobs": None}
    reads = False
    _offset = 0  # of the next token in the text of all tokens

    def answer(self, result: ChatResult) -> dict[str, Any]:
        """Return the text, and how it was read where the request had tools."""
        read = {"message": result.message} if self.reads else {}
        return {"text": result.raw, "logprobs": None, **read}

    def pieces(self, delta: Delta) -> Iterator[dict[str, Any]]:
        yield self._piece({"text": delta.text, "logprobs": None}, delta.logprobs)

    def logprobs(self, tokens: Sequence[Logprob]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token["token"])
        best = [{each["token"]: each["logprob"] for each in t["top_logprobs"]} for t in tokens]
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": best if any(best) else None,
            "text_offset": offsets,
        }


def embeddings_body(request: EmbeddingRequest, vectors: NDArray[np.float32]) -> dict[str, Any]:
    """Return the response for vectors [texts, dimension]."""
    coded = request.encoding_format == "base64"
    little = vectors.astype("<f4")
    rows = [
        {
            "object": "embedding",
            "index": number,
            "embedding": b64encode(row.tobytes()).decode() if coded else row.tolist(),
        }
        for number, row in enumerate(little)
    ]
    usage = {"prompt_tokens": 0, "total_tokens": 0}  # the encoder counts none
    return {"object": "list", "model": request.model, "data": rows, "usage": usage}
