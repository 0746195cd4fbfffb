"""Request bodies of the HTTP surface. Fields we cannot honour are refused, not ignored."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentbench_kv.engines.base import Hints
from agentbench_kv.gateway.api_errors import ApiError
from agentbench_kv.gateway.types import Options

Body = TypeVar("Body", bound=BaseModel)
TokenId = Annotated[int, Field(ge=0)]
Prompt = str | list[TokenId] | list[str] | list[list[TokenId]]

# Each with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "logprobs": (None, False, 0),
    "top_logprobs": (None, 0),
    "echo": (None, False),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
    "functions": (None, []),
}


class _StreamOptions(BaseModel):
    include_usage: bool = False


class _KVBench(BaseModel):
    session: str | None = None


class CommonRequest(BaseModel):
    """The fields that both kinds of request have."""

    model_config = ConfigDict(extra="ignore")

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    session_id: str | None = None
    kvbench: _KVBench | None = None
    tool_choice: Any = None
    return_token_ids: bool = False
    evoke_priority: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    evoke_pinned: bool | None = None
    evoke_task_boundary: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        for name, harmless in _UNSUPPORTED.items():
            if isinstance(data, dict) and data.get(name) not in harmless:
                raise ApiError(
                    400,
                    f"this server does not support {name}={data[name]!r}",
                    code="unsupported_parameter",
                    param=name,
                )
        return data

    @property
    def session(self) -> str | None:
        return self.session_id or (self.kvbench.session if self.kvbench else None)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def options(self) -> Options:
        """Return the sampling; greedy unless a temperature is given."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Options(
            max_tokens=self.max_tokens,
            temperature=self.temperature or 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            # -1 is how vLLM clients switch it off.
            top_k=max(self.top_k or 0, 0),
            seed=self.seed or 0,
            stop=tuple(stop for stop in stops if stop),
            parse_tools=self.tool_choice != "none",
            hints=Hints(
                priority=1.0 if self.evoke_priority is None else self.evoke_priority,
                pinned=bool(self.evoke_pinned),
                task_boundary=bool(self.evoke_task_boundary),
            ),
        )


class ChatRequest(CommonRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    def options(self) -> Options:
        """Return the sampling; the limit has two names."""
        limit = self.max_completion_tokens or self.max_tokens
        return replace(super().options(), max_tokens=limit)


class CompletionRequest(CommonRequest):
    """Body of `POST /v1/completions`; a prompt is text or token ids, one of them."""

    prompt: Prompt
    ignore_eos: bool = False

    def options(self) -> Options:
        """Return the sampling; a raw completion may go on behind the model's turn end."""
        return replace(super().options(), ignore_eos=self.ignore_eos)

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


def parse_request(kind: type[Body], data: object) -> Body:
    """Return the validated body; the first thing wrong with it becomes a 400."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"])
        raise ApiError(400, f"{param or 'body'}: {first['msg']}", param=param or None) from error
