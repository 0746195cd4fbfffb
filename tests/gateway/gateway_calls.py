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
    "lfm2": '<|tool_call_start|>[f(x=1, s="2")]<|tool_call_end|>',
    "granite": f"<|tool_call|>[{ONE}]",
    "cohere": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": '
    f"{ARGUMENTS}}}]<|END_ACTION|>",
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=x>1</parameter>\n"
    "<parameter=s>2</parameter>\n</function>\n</seed:tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">1</parameter>\n'
    '<parameter name="s">2</parameter>\n</invoke>\n</minimax:tool_call>',
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


VLLM = "vLLM 0.19.1, tests/tool_parsers/test_{}_tool_parser.py"
BEIJING, SHANGHAI = {"city": "Beijing"}, {"city": "Shanghai"}
TOKYO = {"city": "Tokyo", "unit": "celsius"}
DALLAS = {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}
DOE = {
    "name": "John Doe",
    "age": 37,
    "address": {"city": "San Francisco", "state": "CA"},
    "role": None,
    "passed_test": True,
    "aliases": ["John", "Johnny"],
}
# Outputs that vendors and servers publish: syntax, where from, text, calls, what is said besides.
RECORDED: list[tuple[str, str, str, list[tuple[str, dict[str, Any]]], str]] = [
    (
        "hermes",
        "Qwen's documentation, function calling",
        '<tool_call>\n{"name": "get_current_temperature", "arguments": {"location": '
        '"San Francisco, CA, USA"}}\n</tool_call>\n<tool_call>\n{"name": "get_temperature_date", '
        '"arguments": {"location": "San Francisco, CA, USA", "date": "2024-10-01"}}\n</tool_call>',
        [
            ("get_current_temperature", {"location": "San Francisco, CA, USA"}),
            ("get_temperature_date", {"location": "San Francisco, CA, USA", "date": "2024-10-01"}),
        ],
        "",
    ),
    (
        "hermes",
        VLLM.format("hermes"),
        '<tool_call>\n{"name": "final_answer", "arguments": {"trigger": true}}\n</tool_call>',
        [("final_answer", {"trigger": True})],
        "",
    ),
    (
        "llama3_json",
        VLLM.format("llama3_json"),
        '{"name": "searchTool", "parameters": {"query": "test1"}}; '
        '{"name": "getOpenIncidentsTool", "parameters": {}}; '
        '{"name": "searchTool", "parameters": {"query": "test2"}}',
        [
            ("searchTool", {"query": "test1"}),
            ("getOpenIncidentsTool", {}),
            ("searchTool", {"query": "test2"}),
        ],
        "",
    ),
    (
        "llama3_json",
        "Llama 3.1's model card, built-in tools",
        '<|python_tag|>brave_search.call(query="Menlo Park California weather")',
        [("brave_search", {"query": "Menlo Park California weather"})],
        "",
    ),
    (
        "pythonic",
        VLLM.format("pythonic"),
        "[get_weather(city='San Francisco', metric='celsius'), register_user(name='John Doe', "
        "age=37, address={'city': 'San Francisco', 'state': 'CA'}, role=None, passed_test=True, "
        "aliases=['John', 'Johnny'])]",
        [
            ("get_weather", {"city": "San Francisco", "metric": "celsius"}),
            ("register_user", DOE),
        ],
        "",
    ),
    (
        "mistral",
        VLLM.format("mistral"),
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 3.5, "b": 4}}, {"name": '
        '"get_current_weather", "arguments":{"city": "Dallas", "state": "TX", "unit": '
        '"fahrenheit"}}]',
        [("add", {"a": 3.5, "b": 4}), ("get_current_weather", DALLAS)],
        "",
    ),
    (
        "mistral",
        VLLM.format("mistral"),
        '[TOOL_CALLS]add{"a": 3.5, "b": 4}[TOOL_CALLS]multiply{"a": 3, "b": 6}',
        [("add", {"a": 3.5, "b": 4}), ("multiply", {"a": 3, "b": 6})],
        "",
    ),
    (
        "mistral",
        VLLM.format("mistral"),
        'hi{hi[TOOL_CALLS]bash{"command": "print(\\"hello world!\\")\\nre.compile(r\'{}\')"}',
        [("bash", {"command": "print(\"hello world!\")\nre.compile(r'{}')"})],
        "hi{hi",
    ),
    (
        "harmony",
        "OpenAI's harmony guide",
        "<|channel|>analysis<|message|>Need to use function get_current_weather.<|end|><|start|>"
        "assistant<|channel|>commentary to=functions.get_current_weather <|constrain|>json"
        '<|message|>{"location":"San Francisco"}',
        [("get_current_weather", {"location": "San Francisco"})],
        "",
    ),
    (
        "deepseek",
        VLLM.format("deepseekv3"),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Tokyo", "unit": "celsius"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [("get_weather", TOKYO)],
        "",
    ),
    (
        "deepseek",
        VLLM.format("deepseekv31"),
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>foo<｜tool▁sep｜>{"x":1}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>bar<｜tool▁sep｜>{"y":2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [("foo", {"x": 1}), ("bar", {"y": 2})],
        "",
    ),
    (
        "kimi",
        VLLM.format("kimi_k2"),
        "I'll help you check the weather. <|tool_calls_section_begin|> <|tool_call_begin|>\n"
        'functions.get_weather:0 <|tool_call_argument_begin|> {"city": "Beijing"} '
        "<|tool_call_end|> <|tool_call_begin|>\nfunctions.get_weather:1 "
        '<|tool_call_argument_begin|> {"city": "Shanghai"} <|tool_call_end|> '
        "<|tool_calls_section_end|>",
        [("get_weather", BEIJING), ("get_weather", SHANGHAI)],
        "I'll help you check the weather.",
    ),
    (
        "glm",
        VLLM.format("glm4_moe"),
        "I'll help you check the weather. <tool_call>get_current_weather\n    "
        "<arg_key>city</arg_key>\n    <arg_value>Dallas</arg_value>\n    "
        "<arg_key>state</arg_key>\n    <arg_value>TX</arg_value>\n    <arg_key>unit</arg_key>\n    "
        "<arg_value>fahrenheit</arg_value>\n    </tool_call>",
        [("get_current_weather", DALLAS)],
        "I'll help you check the weather.",
    ),
    (
        "seed_oss",
        VLLM.format("seed_oss"),
        "<seed:tool_call>\n<function=get_weather>\n<parameter=location>Barcelona, Spain"
        "</parameter>\n</function>\n</seed:tool_call>",
        [("get_weather", {"location": "Barcelona, Spain"})],
        "",
    ),
    (
        "minimax",
        VLLM.format("minimax_m2"),
        'Let me check. <minimax:tool_call><invoke name="get_weather"><parameter name="city">'
        "Seattle</parameter></invoke></minimax:tool_call>",
        [("get_weather", {"city": "Seattle"})],
        "Let me check.",
    ),
    (
        "granite",
        VLLM.format("granite"),
        '<|tool_call|> [\n  {"name": "get_weather", "arguments": {"city": "Tokyo"}},\n  '
        '{"name": "get_time", "arguments": {"timezone": "Asia/Tokyo"}}\n]',
        [("get_weather", {"city": "Tokyo"}), ("get_time", {"timezone": "Asia/Tokyo"})],
        "",
    ),
    (
        "cohere",
        "Command R7B's chat template, its example",
        '<|START_THINKING|>plan<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", '
        '"tool_name": "direct-injected-document", "parameters": {}}\n]<|END_ACTION|>',
        [("direct-injected-document", {})],
        "",
    ),
    (
        "lfm2",
        "LFM2's model card",
        '<|tool_call_start|>[get_candidate_status(candidate_id="12345")]<|tool_call_end|>'
        "Checking the current status of candidate ID 12345.",
        [("get_candidate_status", {"candidate_id": "12345"})],
        "Checking the current status of candidate ID 12345.",
    ),
    (
        "qwen3_coder",
        VLLM.format("qwen3coder"),
        "Sure! Let me check the weather for you.<tool_call>\n<function=get_current_weather>\n"
        "<parameter=city>\nDallas\n</parameter>\n<parameter=state>\nTX\n</parameter>\n"
        "<parameter=unit>\nfahrenheit\n</parameter>\n</function>\n</tool_call>",
        [("get_current_weather", DALLAS)],
        "Sure! Let me check the weather for you.",
    ),
    (
        "qwen3_coder",
        VLLM.format("qwen3coder"),
        "<tool_call>\n<function=calculate_area>\n<parameter=shape>\nrectangle\n</parameter>\n"
        '<parameter=dimensions>\n{"width": 10, \n "height": 20}\n</parameter>\n'
        "<parameter=precision>\n2\n</parameter>\n</function>\n</tool_call>",
        [
            (
                "calculate_area",
                {"shape": "rectangle", "dimensions": {"width": 10, "height": 20}, "precision": 2},
            )
        ],
        "",
    ),
]
