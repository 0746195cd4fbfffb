"""Requests as OpenAI clients write them.

Fields that cannot be honoured are refused, not ignored.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import reprlib
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentbench_kv.gateway.api_errors import ApiError
from agentbench_kv.gateway.exchange import Options
from agentbench_kv.gateway.grammar import JsonFormat, ToolChoice
from agentbench_kv.gateway.messages import check_levels
from agentbench_kv.methods.spans import Hints
from agentbench_kv.phases.tokens import encodable

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
