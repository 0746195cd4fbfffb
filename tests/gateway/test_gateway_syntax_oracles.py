"""Tool syntaxes against the parsers that SGLang and vLLM serve these model families with."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gateway_calls import read

from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.environments import python_of
from agentbench_kv.errors import KVBenchError
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


def pythonic(calls: Calls) -> str:
    def written(name: str, given: dict[str, Any]) -> str:
        values = ", ".join(f"{key}={value!r}" for key, value in given.items())
        return f"{name.replace('-', '_')}({values})"

    return "[" + ", ".join(written(name, given) for name, given in calls) + "]"


def seed_oss(calls: Calls) -> str:
    marked = qwen3_coder(calls).replace("<tool_call>", "<seed:tool_call>")
    return marked.replace("</tool_call>", "</seed:tool_call>")


def minimax(calls: Calls) -> str:
    def parameters(given: dict[str, Any]) -> str:
        return "".join(
            f'<parameter name="{key}">{text_of(value)}</parameter>\n'
            for key, value in given.items()
        )

    made = [f'<invoke name="{name}">\n{parameters(given)}</invoke>\n' for name, given in calls]
    return f"<minimax:tool_call>\n{''.join(made)}</minimax:tool_call>"


def lfm2(calls: Calls) -> str:
    return f"<|tool_call_start|>{pythonic(calls)}<|tool_call_end|>"


def granite(calls: Calls) -> str:
    return "<|tool_call|>" + dumps([{"name": name, "arguments": given} for name, given in calls])


# Syntax, SGLang's detector, vLLM's parser, and what writes calls.
FORMATS: dict[str, tuple[str, str, str, Callable[[Calls], str]]] = {
    "hermes": ("hermes", "hermes_detector:HermesDetector", "hermes", hermes),
    "qwen25": ("hermes", "qwen25_detector:Qwen25Detector", "", hermes),
    "llama3": ("llama3_json", "llama32_detector:Llama32Detector", "llama3_json", llama3),
    # SGLang 0.5.12 takes a pythonic call with a negative number for none.
    "pythonic": ("pythonic", "", "pythonic", pythonic),
    "llama4-pythonic": ("pythonic", "", "llama4_pythonic", pythonic),
    # vLLM 0.32 reads the lists of before version 11 no more.
    "mistral": ("mistral", "mistral_detector:MistralDetector", "", mistral),
    "mistral-args": ("mistral", "mistral_detector:MistralDetector", "mistral", mistral_args),
    "deepseek-v3": ("deepseek", "deepseekv3_detector:DeepSeekV3Detector", "deepseek_v3", deepseek),
    "deepseek-v3.1": (
        *("deepseek", "deepseekv31_detector:DeepSeekV31Detector", "deepseek_v31"),
        deepseek31,
    ),
    "kimi": ("kimi", "kimik2_detector:KimiK2Detector", "kimi_k2", kimi),
    "glm": ("glm", "glm4_moe_detector:Glm4MoeDetector", "glm45", glm),
    "qwen3-coder": (
        *("qwen3_coder", "qwen3_coder_detector:Qwen3CoderDetector", "qwen3_coder"),
        qwen3_coder,
    ),
    # vLLM reads harmony from ids of its own vocabulary, which it downloads.
    "seed-oss": ("seed_oss", "", "seed_oss", seed_oss),
    "minimax": ("minimax", "minimax_m2:MinimaxM2Detector", "minimax_m2", minimax),
    "lfm2": ("lfm2", "", "lfm2", lfm2),
    "granite": ("granite", "", "granite", granite),
    "gpt-oss": ("harmony", "gpt_oss_detector:GptOssDetector", "", harmony),
}

# What every oracle does: read each of `asked` at once and in three streams, and print.
FRAME = """
import importlib, json, re, sys
from pathlib import Path
{imports}
asked = json.load(sys.stdin)
tools = [Tool(**tool) for tool in asked["tools"]]
marker = re.compile("|".join(map(re.escape, sorted(asked["markers"], key=len, reverse=True))))
def pieces(text, size):  # text before and with each piece of so many markers and letters
    ends = [each.end() for each in re.finditer(f"{{marker.pattern}}|.", text, re.DOTALL)]
    past = 0
    for end in [*ends[size - 1 :: size], len(text)]:
        if end > past:
            yield text[:past], text[:end]
        past = end
{read}
def found(how, text, size):
    try:
        return [[name, json.loads(given or "{{}}")] for name, given in read(how, text, size)]
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"
answers = {{
    name: [[found(how, text, size) for size in asked["sizes"]] for text in texts]
    for name, (how, texts) in asked["formats"].items()
}}
print("ANSWER" + json.dumps(answers))
"""
BARE = """
sys.path.insert(0, {here!r})
from bare_package import prepare
prepare({server!r}, Path({folder!r}))
"""
SGLANG = """
from sglang.srt.entrypoints.openai.protocol import Tool
"""
READ_SGLANG = """
def read(how, text, size):
    module, _, cls = how.partition(":")
    detector = getattr(importlib.import_module("sglang.srt.function_call." + module), cls)()
    if size is None:
        found = detector.detect_and_parse(text, tools).calls
        return [(each.name, each.parameters) for each in found]
    calls = {}
    for past, seen in pieces(text, size):
        result = detector.parse_streaming_increment(seen[len(past) :], tools)
        for each in result.calls:
            call = calls.setdefault(each.tool_index, ["", ""])
            call[0] += each.name or ""
            call[1] += each.parameters or ""
    if calls and detector.prev_tool_call_arr:  # what its server sends behind the last piece
        whole = json.dumps(detector.prev_tool_call_arr[-1].get("arguments", {}), ensure_ascii=False)
        last = calls[max(calls)]
        last[1] += whole.replace(last[1], "", 1) if last[1] in whole else ""
    return [calls[index] for index in sorted(calls)]
"""
VLLM = """
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam as Tool
from vllm.tool_parsers import ToolParserManager
"""
READ_VLLM = """
tokenizer = AutoTokenizer.from_pretrained(asked["tokenizer"])
tokenizer.add_tokens(asked["markers"], special_tokens=True)
request = ChatCompletionRequest(model="m", messages=[], tools=tools)
def read(how, text, size):
    parser = ToolParserManager.get_tool_parser(how)(tokenizer, tools)
    if size is None:
        found = parser.extract_tool_calls(text, request).tool_calls
        return [(each.function.name, each.function.arguments) for each in found]
    calls, ids = {}, []
    def take(delta):
        for each in (delta and delta.tool_calls) or ():
            call = calls.setdefault(each.index, ["", ""])
            call[0] += each.function.name or ""
            call[1] += each.function.arguments or ""
    for past, seen in pieces(text, size):
        new = tokenizer.encode(seen[len(past) :], add_special_tokens=False)
        take(parser.extract_tool_calls_streaming(
            past, seen, seen[len(past) :], ids, ids + new, new, request
        ))
        ids = ids + new
    # What its server sends behind the last piece.
    if hasattr(parser, "finish_streaming"):
        take(parser.finish_streaming())
    if calls:
        calls[max(calls)][1] += parser.get_remaining_unstreamed_args()
    return [calls[index] for index in sorted(calls)]
"""
MANAGED = {
    "sglang": "from agentbench_kv.engines.sglang.plugin import cpu\ncpu.install()",
    "vllm": "",
}
# Where a format names its parser, and what reads.
ORACLES = {"sglang": (1, SGLANG, READ_SGLANG), "vllm": (2, VLLM, READ_VLLM)}
# What an unpacked wheel's parsers import and no stand-in can be.
NEEDED = {"sglang": ("orjson", "partial_json_parser"), "vllm": ("partial_json_parser",)}
UNPACKED = "KVBENCH_PARSERS"  # environment variable: folder with unpacked wheels
SIZES = (None, 1, 3, 7)  # tokens of a piece; None: not streamed
# Whose streams are not what it reads at once; docs/models.md says why each is its mistake.
OTHER_STREAMS = {
    ("sglang", "mistral"),
    ("sglang", "deepseek-v3"),
    ("sglang", "deepseek-v3.1"),
    ("sglang", "glm"),
    ("vllm", "deepseek-v3"),
    ("vllm", "deepseek-v3.1"),
}
MENDED_STREAMS = {("sglang", "glm")}  # in SGLang 0.5.23
MARKERS = sorted({text for syntax in SYNTAXES.values() for text in syntax.markers if text})
MARKERS += ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]


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
        for name, (*_, made) in FORMATS.items()
    }


def oracle(server: str) -> tuple[Path, str]:
    """Return an interpreter and its program; skips with the reason if there is none."""
    _, imports, read_calls = ORACLES[server]
    try:
        python, before = python_of(server), MANAGED[server]
    except KVBenchError as error:
        folder = Path(os.environ.get(UNPACKED, "")) / server
        if UNPACKED not in os.environ or not (folder / server).is_dir():
            pytest.skip(f"{error}; or unpack its wheel into {UNPACKED}/{server}")
        if lacking := [name for name in NEEDED[server] if find_spec(name) is None]:
            pytest.skip(f"{server}'s parsers need {' and '.join(lacking)} (pip install)")
        python = Path(sys.executable)
        before = BARE.format(here=str(Path(__file__).parent), server=server, folder=str(folder))
    return python, FRAME.format(imports=f"{before}\n{imports}", read=read_calls)


@pytest.fixture(scope="module")
def oracles(texts: dict[str, list[str]]) -> Callable[[str], dict[str, list[Any]]]:
    """Return a function: what a server reads in the texts of each format, at once and streamed."""

    @cache
    def ask(server: str) -> dict[str, list[Any]]:
        place, python, program = ORACLES[server][0], *oracle(server)
        formats = {name: (how[place], texts[name]) for name, how in FORMATS.items() if how[place]}
        asked = {"tools": TOOLS, "formats": formats, "markers": MARKERS, "sizes": SIZES}
        done = subprocess.run(
            [str(python), "-c", program],
            input=json.dumps({**asked, "tokenizer": str(model_path("micro"))}),
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT), "SGLANG_USE_CPU_ENGINE": "1"},
        )
        assert "ANSWER" in done.stdout, done.stderr[-2000:]
        answers: dict[str, list[Any]] = json.loads(done.stdout.rpartition("ANSWER")[2])
        return answers

    return ask


READ = [
    (server, name)
    for server, (place, *_) in ORACLES.items()
    for name, how in FORMATS.items()
    if how[place]
]


@pytest.mark.parametrize(("server", "name"), READ)
def test_calls_are_those_that_a_server_reads(
    server: str, name: str, texts: dict[str, list[str]], oracles: Callable[..., Any]
) -> None:
    answers, syntax = oracles(server)[name], FORMATS[name][0]
    for text, (expected, *_) in zip(texts[name], answers, strict=True):
        for _, given in expected:
            # SGLang 0.5.12 makes Python's True of a GLM string that says true.
            given.update({key: "true" for key, value in given.items() if value == "True"})
        text = text.removesuffix("<|call|>")  # ends the generation and is not shown
        for size in (1, 7, len(text)):
            found = [call["function"] for call in read(syntax, text, size, TOOLS).tool_calls]
            assert [[f["name"], json.loads(f["arguments"])] for f in found] == expected, text


@pytest.mark.parametrize(("server", "name"), READ)
def test_streams_of_a_server_are_what_it_reads_at_once(
    server: str, name: str, oracles: Callable[..., Any]
) -> None:
    """Pieces of one, three and seven tokens: all that we read in streams is what it reads, too."""
    answers = oracles(server)[name]
    differ = [found for once, *streams in answers for found in streams if found != once]
    if differ or (server, name) not in MENDED_STREAMS:
        assert bool(differ) == ((server, name) in OTHER_STREAMS), differ[:3]
