"""Requests, responses and errors of the HTTP surface, as OpenAI clients write and read them.

Fields of a request that cannot be honoured are refused, not ignored.
"""

from __future__ import annotations

import difflib
import itertools
import json
import logging
import math
import re
import reprlib
import time
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from agentbench_kv.errors import (
    CapacityError,
    EndpointError,
    EngineGoneError,
    KVBenchError,
    SessionFailedError,
)
from agentbench_kv.gateway.grammar import JsonFormat, ToolChoice
from agentbench_kv.gateway.messages import check_levels
from agentbench_kv.gateway.parsing import Delta, Logprob
from agentbench_kv.gateway.session import (
    ChatResult,
    Options,
    SessionBusyError,
    SessionLimitError,
    UnknownSessionError,
)
from agentbench_kv.methods.spans import Hints
from agentbench_kv.phases.tokens import encodable

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


_log = logging.getLogger(__name__)
_RETRY = {"Retry-After": "1"}

# First match wins: status, code and headers of a foreseen error.
_KNOWN: list[tuple[type[KVBenchError], int, str | None, dict[str, str]]] = [
    (SessionBusyError, 409, "session_busy", _RETRY),
    (SessionLimitError, 429, "session_limit", _RETRY),
    (UnknownSessionError, 404, "session_not_found", {}),
    (CapacityError, 400, "kv_capacity_exceeded", {}),
    (EndpointError, 502, "endpoint_failed", {}),
    (EngineGoneError, 500, "engine_gone", {}),
    (SessionFailedError, 500, "session_failed", {}),
    (KVBenchError, 400, None, {}),
]


class ApiError(Exception):
    """An error response: HTTP status, machine-readable `code`, and the request field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = encodable(message)
        self.code = code
        self.param = param
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        types = {401: "authentication_error", 429: "rate_limit_error"}
        default = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": types.get(self.status, default)}
        return {"error": {**error, "param": self.param, "code": self.code}}


def as_api_error(error: BaseException) -> ApiError:
    """Return the response an exception stands for; an unforeseen one is logged and hidden."""
    if isinstance(error, ApiError):
        return error
    for kind, status, code, headers in _KNOWN:
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code, headers=headers)
    _log.error("request failed", exc_info=error)
    return ApiError(500, "the engine failed; the server's log says how", code="internal_error")


Body = TypeVar("Body", bound=BaseModel)
Count = Annotated[int, Field(ge=1, lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Stop = Annotated[str, Field(max_length=1000)]
Prompt = str | list[TokenId] | list[str] | list[list[TokenId]]

# Taken whatever they hold: they label a request or say how it is billed and stored, and change
# nothing that is answered. docs/server.md lists them.
IGNORED = frozenset(
    {
        "metadata", "moderation", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "request_id", "safety_identifier", "service_tier", "user",
    }
)  # fmt: skip

# Each with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "functions": (None, []),
    "function_call": (None, "auto", "none"),
    "store": (None, False),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "repetition_penalty": (None, 1),
    "stop_token_ids": (None, []),
    "skip_special_tokens": (None, True),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "chat_template_kwargs": (None, {}),
}
# What only chat has.
_NOT_OF_COMPLETIONS: dict[str, tuple[Any, ...]] = {
    "tool_choice": (None, "auto", "none"),
    "response_format": (None, {"type": "text"}),
    "top_logprobs": (None, 0),
    "parallel_tool_calls": (None, True),
}


class StrictModel(BaseModel):
    """A part of a request."""

    # A number is not taken from text, nor a flag from a number.
    model_config = ConfigDict(extra="forbid", strict=True)


class _StreamOptions(StrictModel):
    include_usage: bool | None = False
    # Padding against listeners who measure lengths; there is none.
    include_obfuscation: bool | None = False


class _KVBench(StrictModel):
    session: str | None = None


class _KVBenchOfIds(_KVBench):
    new_tokens: Count | None = None


class CommonRequest(StrictModel):
    """The fields that both kinds of request have."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = _UNSUPPORTED

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=64)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    session_id: str | None = None
    kvbench: _KVBench | None = None
    return_token_ids: bool | None = None
    evoke_priority: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    evoke_pinned: bool | None = None
    evoke_task_boundary: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _take_what_counts(cls, data: Any) -> Any:
        """Refuse what cannot be done, and leave out what changes nothing."""
        if not isinstance(data, dict):
            return data
        for name, harmless in cls.unsupported.items():
            if data.get(name) not in harmless:
                message = f"this server does not support {name}={reprlib.repr(data[name])}"
                raise ApiError(400, message, code="unsupported_parameter", param=name)
        passed = (IGNORED | cls.unsupported.keys()) - cls.model_fields.keys()
        return {name: value for name, value in data.items() if name not in passed}

    @property
    def session(self) -> str | None:
        given = self.kvbench.session if self.kvbench else None
        return given if self.session_id is None else self.session_id

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def options(self) -> Options:
        """Return the sampling; greedy unless a temperature is given."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        priority = 1.0 if self.evoke_priority is None else self.evoke_priority
        return Options(
            max_tokens=self.max_tokens,
            temperature=self.temperature or 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            # -1 is how vLLM clients switch it off.
            top_k=max(self.top_k or 0, 0),
            seed=self.seed or 0,
            stop=tuple(stop for stop in stops if stop),
            hints=Hints(priority, bool(self.evoke_pinned), bool(self.evoke_task_boundary)),
        )


class _JsonSchema(StrictModel):
    """A schema and what it is called; chat has it in a field, responses have it flat."""

    name: str = ""
    description: str | None = None
    body: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None

    def answer(self) -> JsonFormat:
        return JsonFormat(self.body, self.name, strict=bool(self.strict))


class _PlainFormat(StrictModel):
    type: Literal["text", "json_object"]

    def answer(self) -> JsonFormat | None:
        return JsonFormat() if self.type == "json_object" else None


class _SchemaFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: _JsonSchema

    def answer(self) -> JsonFormat:
        return self.json_schema.answer()


class FlatSchemaFormat(_JsonSchema):
    """`text.format` of a response."""

    type: Literal["json_schema"]


class _Named(StrictModel):
    name: Annotated[str, Field(min_length=1)]


class _NamedTool(StrictModel):
    type: Literal["function"]
    function: _Named


AnswerFormat = Annotated[_PlainFormat | _SchemaFormat, Field(discriminator="type")]
FlatAnswerFormat = Annotated[_PlainFormat | FlatSchemaFormat, Field(discriminator="type")]
ToolMode = Literal["none", "auto", "required"]
MostLogprobs = Annotated[int, Field(ge=0, le=20)]


def tool_choice(mode: ToolMode | None, name: str, parallel: bool | None) -> ToolChoice:
    """Return what a request says of tools: a mode, or the name of the one to call."""
    return ToolChoice("required" if name else mode or "auto", name, parallel is not False)


def _functions(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for tool in tools:
        function = tool.get("function")
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if tool.get("type", "function") != "function" or not named:
            raise ValueError('a tool is {"type": "function", "function": {"name": ...}}')
    return tools


Functions = Annotated[list[dict[str, Any]], AfterValidator(_functions)]


class ChatRequest(CommonRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: Functions | None = None
    max_completion_tokens: Count | None = None
    tool_choice: ToolMode | _NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: AnswerFormat | None = None
    logprobs: bool | None = None
    top_logprobs: MostLogprobs | None = None

    def options(self) -> Options:
        """Return the sampling; the limit has two names."""
        chosen = self.tool_choice
        named = chosen.function.name if isinstance(chosen, _NamedTool) else ""
        mode = None if isinstance(chosen, _NamedTool) else chosen
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        return replace(
            super().options(),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            tool_choice=tool_choice(mode, named, self.parallel_tool_calls),
            answer=self.response_format.answer() if self.response_format else None,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class CompletionRequest(CommonRequest):
    """Body of `POST /v1/completions`; a prompt is text or token ids, one of them."""

    unsupported = _UNSUPPORTED | _NOT_OF_COMPLETIONS

    prompt: Prompt
    kvbench: _KVBenchOfIds | None = None
    # Those that the prompt explains: the answer comes with the message that it says, calls read.
    tools: Functions | None = None
    ignore_eos: bool | None = None
    logprobs: MostLogprobs | None = None

    def options(self) -> Options:
        """Return the sampling; a raw completion may go on behind the model's turn end."""
        ignored = bool(self.ignore_eos)
        if self.tools and self.stream:
            raise ApiError(400, "a completion with tools is not streamed", param="stream")
        return replace(super().options(), ignore_eos=ignored, logprobs=self.logprobs)

    @property
    def new_tokens(self) -> int | None:
        """Tokens of the prompt that the session has not had, if its client drops messages."""
        return self.kvbench.new_tokens if self.kvbench else None

    def one_prompt(self) -> str | list[int]:
        """Return the prompt; a batch of one is one."""
        if isinstance(self.prompt, str):
            return self.prompt
        nested = [part for part in self.prompt if not isinstance(part, int)]
        if not nested:
            return [part for part in self.prompt if isinstance(part, int)]
        if len(nested) > 1:
            raise ApiError(400, "one prompt per request, please", param="prompt")
        return nested[0]


# Half of a character that JSON writes as two escapes; clients that cut text send it.
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


class EmbeddingRequest(StrictModel):
    """A request for the vectors of texts."""

    model: str
    input: str | list[str]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None  # taken only if it is the encoder's
    user: str | None = None

    @property
    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input


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


def read_json(body: bytes) -> Any:
    """Return what a body says; a number that is none, or endless nesting, is a 400."""
    try:
        text = body.decode()
        data = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
        check_levels(data, "the body's objects and lists")
        # The same text goes to the template, the log and other servers: none of them takes halves.
        if _HALF.search(body):
            data = json.loads(encodable(json.dumps(data, ensure_ascii=False)))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    return data


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def parse_request(kind: type[Body], data: object) -> Body:
    """Return the validated body; the first thing wrong with it becomes a 400."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = encodable(".".join(str(part) for part in first["loc"]))[:200]
        if first["type"] == "extra_forbidden":
            raise _unknown(kind, param) from error
        reason = encodable(" ".join(str(first["msg"]).split()))[:500]  # it may quote the value
        raise ApiError(400, f"{param or 'body'}: {reason}", param=param or None) from error


def _unknown(kind: type[BaseModel], name: str) -> ApiError:
    near = difflib.get_close_matches(name, kind.model_fields, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "docs/server.md lists those that are taken"
    return ApiError(400, f"unknown field {name!r}; {hint}", code="unknown_parameter", param=name)
