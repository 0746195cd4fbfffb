"""Every tool syntax on a call written by hand, and templates that look the call up."""

from __future__ import annotations

import copy
import json
from typing import Any

import click
import pytest
from gateway_calls import ARGUMENTS, CALLS, GIVEN, RECORDED, TOOLS, read

from agentbench_kv.cli.run import run
from agentbench_kv.gateway.messages import ChatTemplate, tool_call
from agentbench_kv.phases.syntax import SYNTAXES


def test_the_help_names_every_syntax() -> None:
    (option,) = [each for each in run.params if each.name == "tool_syntax"]
    assert isinstance(option, click.Option)
    assert [name for name in SYNTAXES if name not in str(option.help)] == []


def test_every_syntax_with_calls_is_here() -> None:
    assert CALLS.keys() == SYNTAXES.keys() - {"none"}


def test_ids_of_mistrals_calls_have_nine_letters_or_digits() -> None:
    """Its chat template refuses a history with any others."""
    ids = [SYNTAXES["mistral"].call_ids.format(number) for number in (0, 1, 12, 99_999)]
    assert [len(each) for each in ids] == [9] * 4
    assert len({*ids}) == 4
    assert all(each.isascii() and each.isalnum() for each in ids)


@pytest.mark.parametrize("size", [1, 5, 10**6])
@pytest.mark.parametrize("syntax", CALLS)
def test_a_call_is_read_with_its_types(syntax: str, size: int) -> None:
    reader = read(syntax, CALLS[syntax], size)
    (call,) = reader.tool_calls
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", GIVEN)
    assert (reader.content, reader.unparsable) == ("", False)
    assert reader.reasoning == ("hm" if syntax == "harmony" else "")
    assert call["id"] == ("functions.f:0" if syntax == "kimi" else "call_1")


@pytest.mark.parametrize("size", [1, 7, 10**6])
@pytest.mark.parametrize("recorded", RECORDED, ids=[f"{r[0]}-{r[1][:12]}" for r in RECORDED])
def test_published_outputs_are_read(recorded: Any, size: int) -> None:
    syntax, source, text, calls, said = recorded
    reader = read(syntax, text, size)
    found = [call["function"] for call in reader.tool_calls]
    assert [(f["name"], json.loads(f["arguments"])) for f in found] == calls, source
    assert (reader.content, reader.unparsable) == (said, False)


def test_every_syntax_of_a_family_has_a_published_output() -> None:
    assert {syntax for syntax, *_ in RECORDED} == SYNTAXES.keys() - {"none", "json"}


@pytest.mark.parametrize(
    "syntax", ["cohere", "deepseek", "granite", "harmony", "hermes", "json", "kimi", "mistral"]
)
def test_what_could_not_come_back_in_the_history_is_no_call(syntax: str) -> None:
    text = CALLS[syntax].replace(ARGUMENTS, '{"x": ' + "[" * 500 + "]" * 500 + "}")
    message = read(syntax, text)
    assert message.unparsable
    assert not message.tool_calls


def test_a_model_without_harmony_has_still_said_something() -> None:
    assert read("harmony", "plain").content == "plain"
    final = read("harmony", "<|channel|>final<|message|>It is 7")
    assert (final.content, final.tool_calls) == ("It is 7", [])
    broken = read("harmony", "<|channel|>commentary to=functions.f<|message|>{oops")
    assert (broken.tool_calls, broken.unparsable) == ([], True)


def test_prompted_json_that_names_no_tool_is_an_answer() -> None:
    assert read("json", '{"name": "Bob", "parameters": {}}').tool_calls == []
    assert read("json", '{"name": "Bob", "arguments": {}, "age": 5}').tool_calls == []
    assert read("json", '{"city": "Oslo"}').content == '{"city": "Oslo"}'


def test_prompted_json_that_invents_a_tool_is_a_call_to_be_refused() -> None:
    (call,) = read("json", '```json\n{"name": "invented", "arguments": {"x": 1}}\n```').tool_calls
    assert call["function"]["name"] == "invented"


# As gpt-oss and Mistral do: a result is shown with what its call says, and refused without.
LOOKS_UP = """{%- set ns = namespace(calls=none) -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if not ns.calls -%}{{ raise_exception('no call before a result') }}{%- endif -%}
<|im_start|>tool {{ ns.calls[0].function.name }} {{ ns.calls[0].id }}: {{ m.content }}<|im_end|>
{%- else -%}
<|im_start|>{{ m.role }}
{{ m.content }}
{%- if m.tool_calls -%}{%- set ns.calls = m.tool_calls -%}
{{ m.tool_calls[0].function.arguments | tojson }}{%- endif -%}<|im_end|>
{%- endif -%}
{%- endfor -%}<|im_start|>assistant
"""


def test_results_are_rendered_behind_the_message_that_called(full_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(full_tokenizer)
    tokenizer.chat_template = LOOKS_UP
    template = ChatTemplate(tokenizer, SYNTAXES["hermes"], ("<|im_start|>", "<|im_end|>"))
    asked = {"role": "user", "content": "q"}
    said = {"role": "assistant", "content": "", "tool_calls": [tool_call("id7", "f", GIVEN)]}
    back = {"role": "tool", "tool_call_id": "id7", "content": "19 degrees"}
    delta = template.render_delta([back], None, said)
    assert delta.startswith("<|im_end|>")
    assert "f id7: 19 degrees" in delta
    assert template.render_first([asked, said, back]).endswith(delta)


def test_results_follow_a_call_without_a_function_too(full_tokenizer: Any) -> None:
    """A session went on from such a call, which is otherwise taken for the one that was made."""
    template = ChatTemplate(full_tokenizer, SYNTAXES["hermes"], ("<|im_start|>", "<|im_end|>"))
    said = {"role": "assistant", "content": ""}
    flat = {**said, "tool_calls": [{"id": "id7", "name": "f", "arguments": GIVEN}]}
    nested = {**said, "tool_calls": [tool_call("id7", "f", GIVEN)]}
    back = {"role": "tool", "tool_call_id": "id7", "content": "19 degrees"}
    assert template.render_delta([back], None, flat) == template.render_delta([back], None, nested)


def test_prompted_tools_and_results_are_words(full_tokenizer: Any) -> None:
    template = ChatTemplate(full_tokenizer, SYNTAXES["json"], ("<|im_start|>", "<|im_end|>"))
    asked = {"role": "user", "content": "q"}
    first = template.render_first([asked], TOOLS)
    assert '"name": "f"' in first
    said = {"role": "assistant", "content": "", "tool_calls": [tool_call("id7", "f", GIVEN)]}
    back = {"role": "tool", "tool_call_id": "id7", "content": "19 degrees"}
    delta = template.render_delta([back], TOOLS, said)
    assert "<tool_response>\n19 degrees\n</tool_response>" in delta
    assert template.render_first([asked, said, back], TOOLS).endswith(delta)
