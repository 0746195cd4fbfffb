"""Which tokens of an answer are values of a call, which its template, and which free text."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Literal

from agentbench_kv.gateway.calls import read_calls
from agentbench_kv.methods.base import Phase
from agentbench_kv.phases.syntax import ToolSyntax
from agentbench_kv.phases.tokens import IncrementalDecoder, TokenCodec

Kind = Literal["value", "template", "text"]
Labelled = tuple[tuple[int, Phase], ...]
# Their calls are JSON with the name inside; the others are read, and their values looked for.
_JSON = {"hermes", "granite", "json", "llama3_json", "cohere", "harmony", "none"}


def kinds_of(codec: TokenCodec, answer: Labelled, syntax: ToolSyntax) -> tuple[Kind, ...]:
    """Say of every token of an answer whether it is a value, template, or free text.

    Values are what a call says: function names, and inside its arguments strings, numbers and
    literals, in whatever syntax it is written. The rest of a call, and special tokens, are
    template. Of harmony, where names stand in a message's header, the arguments alone are read.
    """
    decoder = IncrementalDecoder(codec)
    pieces: list[str] = [decoder.feed(token) for token, _ in answer]
    pieces[-1] += decoder.finish()
    names = {token: text for text, token in codec.added.items()}
    found: list[Kind] = []
    at = 0
    while at < len(answer):
        phase = answer[at][1]
        end = at
        while end < len(answer) and answer[end][1] is phase:
            end += 1
        marks = [names.get(token) for token, _ in answer[at:end]]
        if phase is Phase.ACT:
            values = _values(pieces[at:end], marks, syntax)
        else:
            values = [False] * (end - at)
        plain: Kind = "template" if phase is Phase.ACT else "text"
        found += [
            "template" if mark is not None else "value" if value else plain
            for mark, value in zip(marks, values, strict=True)
        ]
        at = end
    return tuple(found)


def _values(pieces: Sequence[str], marks: Sequence[str | None], syntax: ToolSyntax) -> list[bool]:
    """Say of each token of a call, or of neighbouring ones, whether it holds a part of a value."""
    if syntax.name not in _JSON:
        texts = [
            mark if mark is not None else piece for piece, mark in zip(pieces, marks, strict=True)
        ]
        text = "".join(texts)
        spans = list(_spans(text, syntax))
        if spans:
            inside = bytearray(len(text))
            for first, last in spans:
                inside[first:last] = b"\1" * (last - first)
            ends = [0]
            for each in texts:
                ends.append(ends[-1] + len(each))
            return [any(inside[first:last]) for first, last in itertools.pairwise(ends)]
    scanner = _ValueScanner()
    return [mark is None and scanner.feed(piece) for piece, mark in zip(pieces, marks, strict=True)]


def _spans(text: str, syntax: ToolSyntax) -> Iterator[tuple[int, int]]:
    """Yield where names and values stand in the calls of a text."""
    outer = [mark for span in syntax.spans for mark in span if mark]
    borders = re.finditer("|".join(map(re.escape, outer)) or "$^", text)
    begin = 0
    for first, last in [*(border.span() for border in borders), (len(text), len(text))]:
        at = begin
        for call in read_calls(syntax.name, text[begin:first]) or ():
            leaves = [(call.name, None), *_leaves(json.loads(call.arguments))]
            for value, key in leaves:
                # The key stands before its value, and may be spelled like it.
                stands = text.find(key, at, first) if key else -1
                at = stands + len(key or "") if stands >= 0 else at
                where = _find(value, text, at, first)
                if where is not None:
                    yield where
                    at = where[1]
        begin = last


def _leaves(value: object, key: str | None = None) -> Iterator[tuple[object, str | None]]:
    """Yield strings, numbers and literals in order, each with the key that leads to it."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, str(name))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _leaves(inner, key if not number else None)
    else:
        yield value, key


def _find(value: object, text: str, begin: int, end: int) -> tuple[int, int] | None:
    """Return where a value is first written in a part of a text, in any of its spellings."""
    if isinstance(value, str):
        spelled = {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
        spelled.add(repr(value)[1:-1])
    else:
        spelled = {json.dumps(value), repr(value)}
    places = [(text.find(each, begin, end), -len(each), each) for each in spelled if each]
    known = [place for place in places if place[0] >= 0]
    if not known:
        return None
    first, less, _ = min(known)
    return first, first - less


class _ValueScanner:
    """Reads JSON as it comes and says whether a piece holds a part of a value."""

    def __init__(self) -> None:
        self._string = False
        self._escaped = False
        self._is_key = True  # the next string is a key, or the one being read is
        self._containers: list[str] = []

    def feed(self, piece: str) -> bool:
        # Every character is read, whatever the first ones are.
        return sum(map(self._step, piece)) > 0

    def _step(self, char: str) -> bool:
        if self._string:
            ends = char == '"' and not self._escaped
            self._escaped = char == "\\" and not self._escaped
            self._string = not ends
            return not ends and not self._is_key
        if char == '"':
            self._string = True
        elif char in "{[":
            self._containers.append(char)
            self._is_key = char == "{"
        elif char in "}]":
            self._containers = self._containers[:-1]
        elif char == ":":
            self._is_key = False
        elif char == ",":
            self._is_key = self._containers[-1:] == ["{"]
        else:
            return not char.isspace() and bool(self._containers) and not self._is_key
        return False
