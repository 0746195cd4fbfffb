"""Tool syntaxes against the parsers that SGLang serves these model families with."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.environments import python_of
from agentbench_kv.errors import KVBenchError
from agentbench_kv.gateway.parsing import MessageReader
from agentbench_kv.gateway.readers import reader_for
from agentbench_kv.phases.syntax import SYNTAXES

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
CASES = 60  # of each format, in three chunkings
TYPES: dict[str, Callable[[random.Random], Any]] = {
    "string": lambda rng: rng.choice(
        ["Zürich", "a b", 'say "hi"', "x\ny", "{}", "1", "true", "ß€"]
    ),
    "integer": lambda rng: rng.randrange(-5, 10**6),
    "number": lambda rng: rng.choice([0.5, -2.25, 1e-3]),
    "boolean": lambda rng: rng.random() < 0.5,
    "array": lambda rng: [rng.randrange(9) for _ in range(rng.randrange(1, 4))],
    "object": lambda rng: {"k": rng.choice(["v", 1, None, [True]])},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {f"{kind[0]}{i}": {"type": kind} for i, kind in enumerate(TYPES)},
            },
        },
    }
    for name in ("get_weather", "search-files", "book2")
]
Calls = list[tuple[str, dict[str, Any]]]


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def text_of(value: object) -> str:
    return value if isinstance(value, str) else dumps(value)


def hermes(calls: Calls) -> str:
    made = [dumps({"name": name, "arguments": given}) for name, given in calls]
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in made)


def llama3(calls: Calls) -> str:
    return "; ".join(dumps({"name": name, "parameters": given}) for name, given in calls)


def mistral(calls: Calls) -> str:
    return "[TOOL_CALLS] " + dumps([{"name": name, "arguments": given} for name, given in calls])


def mistral_args(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(given)}" for name, given in calls)


def deepseek(calls: Calls) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(given)}\n```<｜tool▁call▁end｜>"
        for name, given in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def deepseek31(calls: Calls) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(given)}<｜tool▁call▁end｜>"
        for name, given in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def kimi(calls: Calls) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{dumps(given)}"
        "<|tool_call_end|>"
        for i, (name, given) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def glm(calls: Calls) -> str:
    def pairs(given: dict[str, Any]) -> str:
        return "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{text_of(value)}</arg_value>\n"
            for key, value in given.items()
        )

    return "\n".join(f"<tool_call>{name}\n{pairs(given)}</tool_call>" for name, given in calls)


def qwen3_coder(calls: Calls) -> str:
    def parameters(given: dict[str, Any]) -> str:
        return "".join(
            f"<parameter={key}>\n{text_of(value)}\n</parameter>\n" for key, value in given.items()
        )

    return "\n".join(
        f"<tool_call>\n<function={name}>\n{parameters(given)}</function>\n</tool_call>"
        for name, given in calls
    )


def harmony(calls: Calls) -> str:
    (name, given), *_ = calls
    return (
        "<|channel|>analysis<|message|>I need it.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.{name} <|constrain|>json<|message|>{dumps(given)}<|call|>"
    )


FORMATS: dict[str, tuple[str, str, Callable[[Calls], str]]] = {
    "hermes": ("hermes", "hermes_detector:HermesDetector", hermes),
    "qwen25": ("hermes", "qwen25_detector:Qwen25Detector", hermes),
    "llama3": ("llama3_json", "llama32_detector:Llama32Detector", llama3),
    "mistral": ("mistral", "mistral_detector:MistralDetector", mistral),
    "mistral-args": ("mistral", "mistral_detector:MistralDetector", mistral_args),
    "deepseek-v3": ("deepseek", "deepseekv3_detector:DeepSeekV3Detector", deepseek),
    "deepseek-v3.1": ("deepseek", "deepseekv31_detector:DeepSeekV31Detector", deepseek31),
    "kimi": ("kimi", "kimik2_detector:KimiK2Detector", kimi),
    "glm": ("glm", "glm4_moe_detector:Glm4MoeDetector", glm),
    "qwen3-coder": ("qwen3_coder", "qwen3_coder_detector:Qwen3CoderDetector", qwen3_coder),
    "gpt-oss": ("harmony", "gpt_oss_detector:GptOssDetector", harmony),
}

ORACLE = """
import importlib, json, sys
from agentbench_kv.engines.sglang.plugin import cpu
cpu.install()
from sglang.srt.entrypoints.openai.protocol import Tool
asked = json.load(sys.stdin)
tools = [Tool(**tool) for tool in asked["tools"]]
answers = {}
for name, (path, texts) in asked["formats"].items():
    module, _, cls = path.partition(":")
    detector = getattr(importlib.import_module("sglang.srt.function_call." + module), cls)
    answers[name] = []
    for text in texts:
        found = detector().detect_and_parse(text, tools)
        answers[name].append([[call.name, json.loads(call.parameters)] for call in found.calls])
print("ANSWER" + json.dumps(answers))
"""


def random_calls(rng: random.Random) -> Calls:
    calls = []
    for _ in range(rng.randrange(1, 4)):
        function = rng.choice(TOOLS)["function"]
        known = function["parameters"]["properties"]
        chosen = rng.sample(sorted(known), rng.randrange(0, len(known) + 1))
        calls.append((function["name"], {key: TYPES[known[key]["type"]](rng) for key in chosen}))
    return calls


@pytest.fixture(scope="module")
def texts() -> dict[str, list[str]]:
    rng = random.Random(7)
    return {
        name: [made(random_calls(rng)) for _ in range(CASES)]
        for name, (_, _, made) in FORMATS.items()
    }


@pytest.fixture(scope="module")
def oracle(texts: dict[str, list[str]]) -> dict[str, list[Any]]:
    try:
        python = python_of("sglang")
    except KVBenchError as error:
        pytest.skip(str(error))
    formats = {name: (FORMATS[name][1], texts[name]) for name in FORMATS}
    asked = json.dumps({"tools": TOOLS, "formats": formats})
    done = subprocess.run(
        [str(python), "-c", ORACLE],
        input=asked,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SGLANG_USE_CPU_ENGINE": "1"},
    )
    assert "ANSWER" in done.stdout, done.stderr[-2000:]
    answers: dict[str, list[Any]] = json.loads(done.stdout.rpartition("ANSWER")[2])
    return answers


def read(syntax: str, text: str, size: int) -> MessageReader:
    numbers = itertools.count(1)
    reader = reader_for(
        SYNTAXES[syntax], lambda: f"call_{next(numbers)}", thinking=False, tools=TOOLS
    )
    for at in range(0, len(text), size):
        reader.feed(text[at : at + size])
    reader.finish()
    return reader


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_those_that_sglang_reads(
    name: str, texts: dict[str, list[str]], oracle: dict[str, list[Any]]
) -> None:
    syntax = FORMATS[name][0]
    for text, expected in zip(texts[name], oracle[name], strict=True):
        for _, given in expected:
            # SGLang 0.5.12 makes Python's True of a GLM string that says true.
            given.update({key: "true" for key, value in given.items() if value == "True"})
        text = text.removesuffix("<|call|>")  # ends the generation and is not shown
        for size in (1, 7, len(text)):
            found = [call["function"] for call in read(syntax, text, size).tool_calls]
            assert [[f["name"], json.loads(f["arguments"])] for f in found] == expected, text
