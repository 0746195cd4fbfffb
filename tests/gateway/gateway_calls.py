"""A call in every tool syntax, and what reads it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from agentbench_kv.gateway.parsing import MessageReader
from agentbench_kv.gateway.readers import reader_for
from agentbench_kv.phases.syntax import SYNTAXES

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"properties": {"x": {"type": "integer"}, "s": {"type": "string"}}},
        },
    }
]
GIVEN = {"x": 1, "s": "2"}
ONE = '{"name": "f", "arguments": {"x": 1, "s": "2"}}'
ARGUMENTS = '{"x": 1, "s": "2"}'
CALLS = {
    "hermes": f"<tool_call>{ONE}</tool_call>",
    "llama3_json": '<|python_tag|>f.call(x=1, s="2")',
    "pythonic": '[f(x=1, s="2")]',
    "mistral": f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}",
    "qwen3_coder": "<tool_call><function=f><parameter=x>1</parameter>"
    "<parameter=s>\n2\n</parameter></function></tool_call>",
    "glm": "<tool_call>f\n<arg_key>x</arg_key><arg_value>1</arg_value>"
    "<arg_key>s</arg_key><arg_value>2</arg_value></tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
    f"```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    "harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.f <|constrain|>json<|message|>{ARGUMENTS}",
    "json": f"```json\n{ONE}\n```",
}


def read(
    syntax: str, text: str, size: int = 10**6, tools: Sequence[dict[str, Any]] = TOOLS
) -> MessageReader:
    """Read an answer in chunks of `size` characters."""
    numbers = itertools.count(1)
    reader = reader_for(
        SYNTAXES[syntax], lambda: f"call_{next(numbers)}", thinking=False, tools=tools
    )
    for at in range(0, len(text), size):
        reader.feed(text[at : at + size])
    reader.finish()
    return reader
