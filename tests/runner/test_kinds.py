"""What of an answer is a value of a call, in every syntax that calls are written in."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentbench_kv.gateway.calls import read_calls
from agentbench_kv.methods.base import Phase
from agentbench_kv.phases.syntax import SYNTAXES
from agentbench_kv.phases.tokens import TokenCodec, load_tokenizer
from agentbench_kv.run.kinds import Kind, kinds_of

XML = "<function=find>\n<parameter=key>\nParis\n</parameter>\n<parameter=many>\n5\n</parameter>"
JSON = '{"name": "find", "arguments": {"key": "Paris", "many": 5}}'
CALLS = {
    "hermes": f"<tool_call>\n{JSON}\n</tool_call>",
    "granite": f"<|tool_call|>[{JSON}]",
    "llama3_json": '{"name": "find", "parameters": {"key": "Paris", "many": 5}}',
    "qwen3_coder": f"<tool_call>\n{XML}\n</function>\n</tool_call>",
    "seed_oss": f"<seed:tool_call>\n{XML}\n</function>\n</seed:tool_call>",
    "glm": "<tool_call>find\n<arg_key>key</arg_key>\n<arg_value>Paris</arg_value>\n"
           "<arg_key>many</arg_key>\n<arg_value>5</arg_value>\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="find">\n<parameter name="key">Paris</parameter>'
               '\n<parameter name="many">5</parameter>\n</invoke>\n</minimax:tool_call>',
    "pythonic": '[find(key="Paris", many=5)]',
    "lfm2": '<|tool_call_start|>[find(key="Paris", many=5)]<|tool_call_end|>',
    "mistral": '[TOOL_CALLS]find[ARGS]{"key": "Paris", "many": 5}',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0"
            '<|tool_call_argument_begin|>{"key": "Paris", "many": 5}<|tool_call_end|>'
            "<|tool_calls_section_end|>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>"
                '{"key": "Paris", "many": 5}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
}  # fmt: skip


@pytest.fixture(scope="module")
def codec() -> TokenCodec:
    return TokenCodec(load_tokenizer(Path("agentbench_kv/models/micro").resolve()))


def told(codec: TokenCodec, text: str, syntax: str) -> tuple[str, str]:
    """Return the text of the values, a bar between those that are apart, and that of the rest."""
    ids = codec.encode(text)
    kinds = kinds_of(codec, tuple((token, Phase.ACT) for token in ids), SYNTAXES[syntax])
    found: dict[Kind, str] = {"value": "", "template": "", "text": ""}
    last: Kind = "value"
    for token, kind in zip(ids, kinds, strict=True):
        found[kind] += ("|" if kind != last else "") + codec.decode([token])
        last = kind
    assert not found["text"]
    return found["value"], found["template"]


@pytest.mark.parametrize("syntax", sorted(CALLS))
def test_names_and_arguments_are_values_in_every_syntax(codec: TokenCodec, syntax: str) -> None:
    values, rest = told(codec, CALLS[syntax], syntax)
    # Letter by letter as the micro model's tokens are; neighbours may share one with a sign.
    for word in ("find", "Paris", "5"):
        assert word in values, (values, rest)
    for word in ("key", "many", "name", "parameter", "arg", "invoke"):
        assert word not in values, (values, rest)


@pytest.mark.parametrize("syntax", sorted(CALLS.keys() - {"hermes", "granite", "llama3_json"}))
def test_the_calls_of_this_file_are_read(syntax: str) -> None:
    outer = [mark for span in SYNTAXES[syntax].spans for mark in span if mark]
    text = CALLS[syntax]
    for mark in outer:
        text = text.replace(mark, "")
    calls = read_calls(syntax, text)
    assert calls is not None
    assert [call.name for call in calls] == ["find"]


def test_a_value_that_is_spelled_like_its_key(codec: TokenCodec) -> None:
    values, rest = told(codec, '[put(key="key", other=["key", "b\'c"])]', "pythonic")
    assert values.count("key") == 2
    assert rest.count("key") == 1
    assert "other" in rest


def test_json_inside_json(codec: TokenCodec) -> None:
    said = '{"name": "find", "arguments": {"key": ["a", 5], "last": true}}'
    values, rest = told(codec, f"<tool_call>\n{said}\n</tool_call>", "hermes")
    for word in ("find", "a", "5", "true"):
        assert word in values
    for word in ("name", "arguments", "key", "last", "tool_call"):
        assert word in rest
        assert word not in values


def test_what_no_syntax_reads_is_scanned_as_json(codec: TokenCodec) -> None:
    values, _ = told(codec, '{"key": "Paris"', "qwen3_coder")
    assert "Paris" in values


def test_what_is_no_call_is_text(codec: TokenCodec) -> None:
    words = tuple((token, Phase.OTHERS) for token in codec.encode('Say "find".'))
    assert set(kinds_of(codec, words, SYNTAXES["pythonic"])) == {"text"}
