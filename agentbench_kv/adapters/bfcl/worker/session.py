"""The text of one session, and the tool calls in it.

BFCL builds a source line from a call's name and its argument names and evaluates it. Both come
from the model, so both are checked here. A refused call becomes a line that raises what an
unknown name would raise; the model reads that as the call's result and the episode goes on.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from keyword import iskeyword
from typing import Any

from ...agent_client import is_shallow, marked_call

END = "<|im_end|>"
INSTRUCTIONS = """\
You carry out the user's requests with the tools below. Go on calling tools until \
the current request is done; then answer in plain words, and the user will speak again.

Tools, one JSON description a line:
<tools>
{tools}
</tools>

To use a tool, write one JSON object between call marks:
<tool_call>
{{"name": "the tool's name", "arguments": {{"parameter": "value"}}}}
</tool_call>
Several calls may follow one another. Each result comes back between <tool_response> and \
</tool_response>."""
# What a prompt may explain, by the tool syntax that the server reads.
WAYS = {
    "hermes": INSTRUCTIONS,
    "json": INSTRUCTIONS.replace("between call marks", "in a block like this")
    .replace("\n<tool_call>\n", "\n```json\n")
    .replace("\n</tool_call>\n", "\n```\n"),
}


class PromptText:
    """One session in the chat form with `<|im_start|>` and `<|im_end|>`.

    It only ever grows, so every prompt extends the one before.
    """

    def __init__(self, tools: Iterable[Mapping[str, Any]], syntax: str = "hermes") -> None:
        lines = (json.dumps(tool, ensure_ascii=False) for tool in tools)
        self._instructions = WAYS[syntax].format(tools="\n".join(lines))
        self.text = ""

    def begin(self, system: Iterable[str]) -> None:
        """Write the system message: the benchmark's own, then the tools."""
        joined = "\n\n".join([*map(_safe, system), self._instructions])
        self.text = f"<|im_start|>system\n{joined}{END}\n"

    def add(self, role: str, content: str) -> None:
        self._end_assistant()
        self.text += f"<|im_start|>{role}\n{_safe(content)}{END}\n"

    def prompt(self) -> str:
        self._end_assistant()
        self.text += "<|im_start|>assistant\n"
        return self.text

    def add_generated(self, raw: str) -> None:
        self.text += raw

    def add_results(self, results: Iterable[str]) -> None:
        """Add the results of the calls as one user message."""
        marked = "\n".join(f"<tool_response>\n{_safe(r)}\n</tool_response>" for r in results)
        self._end_assistant()
        self.text += f"<|im_start|>user\n{marked}{END}\n"

    def _end_assistant(self) -> None:
        if self.text.endswith(END):  # a server that leaves the stop marker in the text
            self.text += "\n"
        elif not self.text.endswith(f"{END}\n"):
            self.text += f"{END}\n"


def _safe(content: str) -> str:
    # Text that a tool returns must not be able to open or close a message, and must be encodable.
    plain = content.encode("utf-8", "replace").decode("utf-8")
    return plain.replace("<|im_", "< |im_")


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class WrittenCall:
    """A tool call as the model wrote it."""

    name: str
    arguments: dict[str, Any]


def parse(text: str) -> tuple[list[WrittenCall], int]:
    """Find the calls in a text of `as_text`; count marks whose payload is none."""
    payloads = list(_payloads(text))
    calls = [call for call in map(_read, payloads) if call is not None]
    unclosed = max(0, text.count(_OPEN) - len(payloads))
    return calls, len(payloads) - len(calls) + unclosed


def _payloads(text: str) -> Iterator[str]:
    # No regular expression: over a mark and many spaces one took the cube of their number.
    start = text.find(_OPEN)
    while start >= 0 and (end := text.find(_CLOSE, start)) >= 0:
        yield text[start + len(_OPEN) : end].strip()
        start = text.find(_OPEN, end)


def to_python(call: WrittenCall, tools: Collection[str]) -> str:
    """Write a call as source; all it takes from the model are literals and known names."""
    if call.name not in tools:
        return _failure("NameError", f"name {call.name!r} is not defined")
    if not all(k.isascii() and k.isidentifier() and not iskeyword(k) for k in call.arguments):
        return _failure("SyntaxError", "invalid syntax")
    arguments = ",".join(f"{key}={value!r}" for key, value in call.arguments.items())
    return f"{call.name}({arguments})"


def tool_names(entry: Mapping[str, Any]) -> frozenset[str]:
    """Return the names that count as known.

    The official executor runs a held-out function that a model guesses, so they are among them.
    """
    return frozenset(tool["name"] for tool in all_tools(entry))


def all_tools(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools of an entry, then those that it shows only in a later turn."""
    return [*entry["function"], *chain.from_iterable(entry.get("missed_function", {}).values())]


def as_text(calls: Sequence[Mapping[str, Any]]) -> str:
    """Write calls in the OpenAI form as the text that goes through the loop, and `parse` reads."""
    functions = [call.get("function") or {} for call in calls]
    fields = [{"name": f.get("name"), "arguments": f.get("arguments")} for f in functions]
    # JSON lets a character be written as its number, so that no argument can open or close a mark.
    payloads = (json.dumps(each, ensure_ascii=False).replace("<", "\\u003c") for each in fields)
    return "\n".join(map(marked_call, payloads))


def unmarked(text: str) -> str:
    """Return text whose call marks are no marks any more: calls have a field of their own."""
    return text.replace("<tool_call>", "< tool_call>")


def _read(payload: str) -> WrittenCall | None:
    try:
        fields = json.loads(payload)
        name, arguments = fields["name"], fields["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_call = isinstance(name, str) and isinstance(arguments, dict) and is_shallow(arguments)
    return WrittenCall(name, arguments) if is_call else None


def _failure(kind: str, message: str) -> str:
    # An expression that raises: the executor turns it into the result an unknown name would get.
    return f"(_ for _ in ()).throw({kind}({message!a}))"
