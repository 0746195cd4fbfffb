"""Chat requests and completions, as endpoints write and read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentbench_kv.engines.api.spending import Prices
from agentbench_kv.engines.text import TextReply, TextSampling

_NOT_SENT = frozenset({"reasoning_content", "reasoning"})
_SEEDS = 1 << 31


class RubbishError(Exception):
    """The body is not a chat completion; the message says what is missing."""


def request_body(
    model: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    sampling: TextSampling,
    limit_name: str,
) -> dict[str, Any]:
    """Return a chat request without thoughts, which providers refuse; `limit_name`: max_tokens."""
    sent = [{k: v for k, v in message.items() if k not in _NOT_SENT} for message in messages]
    body: dict[str, Any] = {
        "model": model,
        "messages": sent,
        "temperature": sampling.temperature,
        "seed": sampling.seed % _SEEDS,
        limit_name: sampling.max_tokens,
    }
    optional = {
        "tools": list(tools) if tools else None,
        "top_p": sampling.top_p if sampling.top_p != 1.0 else None,
        "top_k": sampling.top_k or None,
        "stop": list(sampling.stop) or None,
        "response_format": sampling.response_format,
        "tool_choice": sampling.tool_choice,
        "parallel_tool_calls": sampling.parallel_tool_calls,
        "logprobs": None if sampling.top_logprobs is None else True,
        "top_logprobs": sampling.top_logprobs,
    }
    return body | {name: value for name, value in optional.items() if value is not None}


def read_reply(data: Any, prices: Prices | None) -> TextReply:
    """Read a chat completion; RubbishError if it is none or does not say what it bills."""
    choice = _first_choice(data)
    message = choice["message"]
    prompt, output, cached, thinking = _usage(data)
    return TextReply(
        content=_text(message, "content"),
        reasoning=_text(message, "reasoning_content") or _text(message, "reasoning"),
        tool_calls=_calls(message),
        finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
        prompt_tokens=prompt,
        output_tokens=output,
        cached_tokens=cached,
        cost=None if prices is None else prices.cost(prompt, output, cached),
        thinking_tokens=thinking,
        logprobs=_logprobs(choice),
    )


def _first_choice(data: Any) -> Mapping[str, Any]:
    choices = data.get("choices") if isinstance(data, Mapping) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, Mapping) or not isinstance(choice.get("message"), Mapping):
        raise RubbishError("no message in it")
    return choice


def _text(message: Mapping[str, Any], name: str) -> str:
    value = message.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RubbishError(f"its {name} is no text")
    # Half a surrogate pair can come out of a JSON escape; no record can hold it.
    return value.encode("utf-8", "replace").decode("utf-8")


def _calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RubbishError("its tool_calls are no list of objects")
    return calls


def _logprobs(choice: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    found = choice.get("logprobs")
    tokens = found.get("content") if isinstance(found, Mapping) else None
    known = isinstance(tokens, list) and all(isinstance(token, dict) for token in tokens)
    return tokens if known else None


def _usage(data: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return the tokens of prompt and output, and how many were cached, and thoughts."""
    usage = data.get("usage")
    known = usage if isinstance(usage, Mapping) else {}
    prompt, output = _count(known.get("prompt_tokens")), _count(known.get("completion_tokens"))
    cached = _detail(known, "prompt_tokens_details", "cached_tokens")
    thinking = _detail(known, "completion_tokens_details", "reasoning_tokens")
    return prompt, output, min(cached, prompt), min(thinking, output)


def _detail(usage: Mapping[str, Any], group: str, name: str) -> int:
    details = usage.get(group)
    return _count((details.get(name) if isinstance(details, Mapping) else 0) or 0)


def _count(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise RubbishError("no usage (prompt_tokens, completion_tokens) in it")
    return value
