"""Reasoning and tool calls in generated text, whole and in pieces."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentbench_kv.errors import UsageError
from agentbench_kv.gateway.parsing import Delta, OutputParser
from agentbench_kv.phases.syntax import SYNTAXES, choose_syntax, refuse_tools_without_syntax

MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def parse(
    *chunks: str, syntax: str = "hermes", thinking: bool = False
) -> tuple[OutputParser, list[Delta]]:
    numbers = itertools.count(1)
    parser = OutputParser(SYNTAXES[syntax], lambda: f"call_{next(numbers)}", thinking=thinking)
    deltas = [delta for chunk in chunks for delta in parser.feed(chunk)]
    return parser, deltas + parser.finish()


def calls(parser: OutputParser) -> list[tuple[str, object]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in parser.tool_calls
    ]


def test_reasoning_content_and_several_calls() -> None:
    second = CALL.replace('"f"', '"g"')
    parser, _ = parse(f"<think>\nhm\n</think>\n\nI call.\n{CALL}\n{second}")
    assert (parser.reasoning, parser.content) == ("hm", "I call.")
    assert calls(parser) == [("f", {"x": 1}), ("g", {"x": 1})]
    assert [call["id"] for call in parser.tool_calls] == ["call_1", "call_2"]
    assert not parser.unparsable


def test_a_prompt_may_have_opened_the_thought() -> None:
    parser, _ = parse("hm\n</think>ok", thinking=True)
    assert (parser.reasoning, parser.content) == ("hm", "ok")


def test_an_unclosed_thought_is_all_reasoning() -> None:
    parser, _ = parse(f"<think>hm {CALL}")
    assert parser.reasoning == f"hm {CALL}"
    assert not parser.tool_calls


def test_an_unclosed_call_counts_when_its_json_is_whole() -> None:
    assert calls(parse(CALL.removesuffix("</tool_call>"))[0]) == [("f", {"x": 1})]
    parser, _ = parse(CALL[:20])
    assert parser.unparsable
    assert parser.content == CALL[:20]


@pytest.mark.parametrize(
    "payload",
    ["nope", "{}", '{"name": 1}', '{"name": "f", "arguments": [1]}', "[]", "", "[" * 5000,
     '{"name": "f", "arguments": {"x": NaN}}', '{"name": "f", "arguments": "x"}', "9" * 5000],
)  # fmt: skip
def test_what_is_not_a_call_stays_text(payload: str) -> None:
    text = f"a<tool_call>{payload}</tool_call>b"
    parser, _ = parse(text)
    assert parser.unparsable
    assert not parser.tool_calls
    assert parser.content == text


def test_arguments_may_be_json_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>'
    assert calls(parse(text)[0]) == [("f", {"x": 1})]


def test_half_a_character_in_an_escape_can_be_sent() -> None:
    text = '<tool_call>{"name": "f\\ud800", "arguments": {"x": "\\ud800"}}</tool_call>'
    call = parse(text)[0].tool_calls[0]
    json.dumps(call, ensure_ascii=False).encode()


@pytest.mark.parametrize("mark", ["", "<|python_tag|>"])
def test_llama3_json(mark: str) -> None:
    text = mark + '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}'
    parser, deltas = parse(*text, syntax="llama3_json")
    assert calls(parser) == [("f", {"x": 1}), ("g", {})]
    assert [delta.kind for delta in deltas] == ["tool_call", "tool_call"]


def test_llama3_json_that_is_no_call() -> None:
    parser, _ = parse('{"answer": 1}', syntax="llama3_json")
    assert (parser.content, parser.unparsable) == ('{"answer": 1}', False)
    parser, _ = parse('{"name": "f", "parameters": ', syntax="llama3_json")
    assert parser.unparsable
    parser, _ = parse("<|python_tag|>print(1)", syntax="llama3_json")
    assert (parser.content, parser.unparsable) == ("<|python_tag|>print(1)", True)


def test_without_a_syntax_calls_are_text() -> None:
    parser, _ = parse(CALL, syntax="none")
    assert (parser.content, parser.unparsable) == (CALL, False)


PIECES = st.lists(
    st.sampled_from([*MARKERS, "<", "tool_call>", "think>", "</", " ", "\n", "a", "é", CALL, "{}"]),
    max_size=12,
).map("".join)


@settings(max_examples=150, deadline=None)
@given(text=PIECES, cuts=st.lists(st.integers(0, 80), max_size=8))
def test_chunks_do_not_matter(text: str, cuts: list[int]) -> None:
    whole, _ = parse(text)
    edges = [0, *sorted(cuts), len(text)]
    chunks = [text[a:b] for a, b in itertools.pairwise(edges)]
    parser, deltas = parse(*chunks)
    assert (parser.content, parser.reasoning) == (whole.content, whole.reasoning)
    assert parser.tool_calls == whole.tool_calls
    assert parser.unparsable == whole.unparsable
    assert "".join(d.text for d in deltas if d.kind == "content") == parser.content
    assert "".join(d.text for d in deltas if d.kind == "reasoning") == parser.reasoning


@pytest.mark.parametrize("text", [CALL, "<think>hm</think>", f"<think>hm</think>{CALL}"])
def test_markers_never_leak(text: str) -> None:
    _, deltas = parse("a ", *text, " b")
    assert "".join(delta.text for delta in deltas if delta.kind == "content") == "a  b"


def test_a_marker_split_over_chunks_is_not_shown_by_halves() -> None:
    parser, deltas = parse("a <tool", "_call", ">{}", "</tool_call>")
    assert deltas[0] == Delta("content", "a")
    parser, deltas = parse("a <tool", " box")
    assert [delta.text for delta in deltas] == ["a", " <tool box"]
    assert parser.content == "a <tool box"


@pytest.mark.parametrize(
    ("template", "vocabulary", "name"),
    [
        ("", {"<|python_tag|>"}, "llama3_json"),
        ("", set(), "hermes"),
        ("<tool_call> {{ tools }}", set(), "hermes"),
        ("<tool_call>\n<function=x>", {"<tool_call>"}, "qwen3_coder"),
        ("<tool_call>{{ name }}<arg_key>", {"<tool_call>"}, "glm"),
        ("", {"[TOOL_CALLS]"}, "mistral"),
        ("", {"<｜tool▁calls▁begin｜>"}, "deepseek"),
        ("", {"<|tool_calls_section_begin|>"}, "kimi"),
        ("", {"<|channel|>", "<|message|>"}, "harmony"),
        ("{{ messages }}", set(), "none"),
    ],
)
def test_the_syntax_is_chosen_by_template_and_vocabulary(
    template: str, vocabulary: set[str], name: str
) -> None:
    assert choose_syntax("auto", template, vocabulary).name == name


def test_an_unknown_syntax_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="did you mean 'hermes'"):
        choose_syntax("herms", "", set())
    with pytest.raises(UsageError, match=r"--tool-syntax: .*hermes.*json"):
        refuse_tools_without_syntax(choose_syntax("auto", "{{ messages }}", ()), "auto")
    refuse_tools_without_syntax(SYNTAXES["none"], "none")
