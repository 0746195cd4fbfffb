"""Reasoning and tool calls in generated text: one incremental parser, syntaxes as a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from agentbench_kv.errors import UsageError, unknown_name
from agentbench_kv.gateway.messages import tool_call
from agentbench_kv.phases.tokens import encodable

_Mode = Literal["content", "reasoning", "call"]
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_MODES: dict[str, _Mode] = {THINK_OPEN: "reasoning", THINK_CLOSE: "content"}


@dataclass(frozen=True)
class ToolSyntax:
    """How a model writes calls: the markers around the JSON payload."""

    name: str  # for `--parser`
    open: str | None  # None: the text has no calls
    close: str | None
    bare: bool = False  # a text that starts with `{` is a call without markers
    arguments: str = "arguments"  # key of the payload, as the model writes it


PARSERS: Mapping[str, ToolSyntax] = {
    syntax.name: syntax
    for syntax in (
        ToolSyntax("hermes", "<tool_call>", "</tool_call>"),
        ToolSyntax("llama3_json", "<|python_tag|>", None, bare=True, arguments="parameters"),
        ToolSyntax("none", None, None),
    )
}


Logprob = dict[str, Any]  # of one token, in the form of a chat response


@dataclass(frozen=True)
class Delta:
    """A piece of an assistant message as it becomes certain."""

    kind: Literal["content", "reasoning", "tool_call"]
    text: str = ""
    call: dict[str, Any] | None = None
    logprobs: tuple[Logprob, ...] = ()  # of the tokens drawn since the last piece, if asked for


def choose_parser(name: str, vocabulary: Container[str]) -> ToolSyntax:
    """Return the syntax called `name`; `auto` picks it from the model's added tokens."""
    if name == "auto":
        if "<|channel|>" in vocabulary:
            raise UsageError(
                "this model writes harmony channels, for which there is no parser yet; "
                "--parser none leaves calls and thoughts in the text"
            )
        return PARSERS["llama3_json" if "<|python_tag|>" in vocabulary else "hermes"]
    if name not in PARSERS:
        raise unknown_name("parser", name, [*PARSERS, "auto"])
    return PARSERS[name]


class Reader:
    """Makes a message of generated text while it arrives. This one takes it for plain content."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.tool_calls: list[dict[str, Any]] = []
        self.unparsable = False

    def feed(self, text: str) -> list[Delta]:
        """Take more text, return what is certain now."""
        self.content += text
        return [Delta("content", text)] if text else []

    def finish(self) -> list[Delta]:
        """Take the end of the text, return the rest of the message."""
        return []


class OutputParser(Reader):
    """Splits generated text into reasoning, content and tool calls while it arrives.

    Text that may still turn out to be the beginning of a marker, and white space that may turn out
    to be trailing, is held back, so the pieces joined are the final message whatever the chunks.
    `next_id` names each new call; with `thinking` the prompt already opened the think block.
    """

    def __init__(
        self, syntax: ToolSyntax, next_id: Callable[[], str], *, thinking: bool = False
    ) -> None:
        super().__init__()
        self._syntax = syntax
        self._next_id = next_id
        self._mode: _Mode = "reasoning" if thinking else "content"
        self._buffer = ""
        self._deltas: list[Delta] = []  # not returned yet
        self._spaces = {"content": "", "reasoning": ""}

    def feed(self, text: str) -> list[Delta]:
        self._buffer += text
        while self._step():
            pass
        return self._take_deltas()

    def finish(self) -> list[Delta]:
        if self._mode == "call":
            self._end_call(self._buffer, closed=False)
        else:
            self._emit(self._buffer)
        self._buffer = ""
        return self._take_deltas()

    def _take_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _step(self) -> bool:
        """Advance over the next marker; False when more text is needed."""
        if self._mode == "call":
            return self._step_call()
        if self._starts_bare():
            self._mode = "call"
            return False
        markers = self._markers()
        found = [(at, mark) for mark in markers if (at := self._buffer.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            self._emit(self._buffer[:at])
            self._buffer = self._buffer[at + len(mark) :]
            self._mode = _MODES.get(mark, "call")
            return True
        certain = len(self._buffer) - beginning_of(markers, self._buffer)
        self._emit(self._buffer[:certain])
        self._buffer = self._buffer[certain:]
        return False

    def _step_call(self) -> bool:
        close = self._syntax.close
        if close is None or close not in self._buffer:
            return False
        payload, _, self._buffer = self._buffer.partition(close)
        self._mode = "content"
        self._end_call(payload, closed=True)
        return True

    def _markers(self) -> tuple[str, ...]:
        if self._mode == "reasoning":
            return (THINK_CLOSE,)
        return (THINK_OPEN, self._syntax.open) if self._syntax.open else (THINK_OPEN,)

    def _starts_bare(self) -> bool:
        bare = self._syntax.bare and self._mode == "content" and not self.content
        return bare and self._buffer.lstrip().startswith("{")

    def _emit(self, text: str) -> None:
        kind: Literal["content", "reasoning"]
        kind = "reasoning" if self._mode == "reasoning" else "content"
        so_far: str = getattr(self, kind)
        text = self._spaces[kind] + text if so_far else text.lstrip()
        body = text.rstrip()
        self._spaces[kind] = text[len(body) :]
        if body:
            setattr(self, kind, so_far + body)
            self._deltas.append(Delta(kind, body))

    def _end_call(self, payload: str, *, closed: bool) -> None:
        """Take a payload as calls; what is none stays in the content as it was written."""
        calls = parse_calls(payload)
        if calls is not None:
            made = [tool_call(self._next_id(), *call) for call in calls]
            self.tool_calls += made
            self._deltas += [Delta("tool_call", call=call) for call in made]
            return
        bare = payload.lstrip().startswith("{") and self._syntax.bare
        looks_like_call = not bare or payload.lstrip()[1:].lstrip().startswith('"name"')
        self.unparsable = self.unparsable or looks_like_call
        self._mode = "content"
        opened = "" if bare else self._syntax.open or ""
        close = (self._syntax.close or "") if closed else ""
        self._emit(opened + payload + close)


def parse_calls(payload: str) -> list[tuple[str, str]] | None:
    """Return (name, arguments as JSON text) of each call in a payload, None if it is not calls.

    A payload is one or several JSON objects with a `name` and `arguments` (or `parameters`),
    separated by white space, commas or semicolons, or one JSON list of them.
    """
    values = _json_values(payload)
    if not values:
        return None
    calls = [_call_of(value) for value in values]
    known = [call for call in calls if call is not None]
    return known if len(known) == len(calls) else None


def _json_values(payload: str) -> list[object] | None:
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    values: list[object] = []
    rest = payload.strip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        values.extend(value if isinstance(value, list) else [value])
        rest = rest[end:].lstrip().lstrip(",;").lstrip()
    return values


def _call_of(value: object) -> tuple[str, str] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        inner = _json_values(arguments)
        arguments = inner[0] if inner and len(inner) == 1 else None
    if not isinstance(arguments, dict):
        return None
    text = json.dumps(arguments, ensure_ascii=False)
    return encodable(value["name"]), text if text == encodable(text) else json.dumps(arguments)


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def beginning_of(markers: Iterable[str], text: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of a marker."""
    longest = 0
    for marker in markers:
        sizes = range(min(len(marker) - 1, len(text)), 0, -1)
        longest = max(longest, next((n for n in sizes if text.endswith(marker[:n])), 0))
    return longest
