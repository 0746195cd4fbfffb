"""What an answer must look like, JSON or a tool call, as a grammar over the model's tokens.

llguidance compiles the grammar and says which tokens may come next; they are drawn one by one as
any others are. A think block before the answer is free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from agentbench_kv.engines.core.grammar import GrammarConstraint, GrammarVocabulary
from agentbench_kv.errors import UsageError
from agentbench_kv.phases.syntax import ToolSyntax
from agentbench_kv.phases.tokens import TokenCodec

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ToolChoice:
    """Whether an answer must, may or must not call tools, which one, and how many."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str = ""  # of the only tool it may call; with `required`
    parallel: bool = True  # False ends the answer with its first call


@dataclass(frozen=True)
class JsonFormat:
    """An answer that is JSON; what cannot be enforced is refused if `strict`, else left out."""

    schema: Mapping[str, Any] | None = None  # None: any object
    name: str = ""
    strict: bool = False


class GrammarCompiler:
    """Makes the constraints of one vocabulary and one syntax of calls. Thread-safe."""

    def __init__(self, codec: TokenCodec, syntax: ToolSyntax, eos: Sequence[int]) -> None:
        self._codec = codec
        self._syntax = syntax
        self._eos = list(eos)

    def constraint(
        self, choice: ToolChoice, answer: JsonFormat | None, tools: Tools | None, *, thinking: bool
    ) -> GrammarConstraint | None:
        """Return what holds an answer to what was asked; None if it is free.

        With `thinking` the prompt has opened the think block. Raises UsageError for a schema that
        cannot be enforced, an unknown tool, or a syntax without calls.
        """
        forced = choice.mode == "required"
        if not forced and answer is None:
            return None
        functions = [_function(tool) for tool in tools or ()]
        called = _chosen(choice, functions) if forced else functions
        if choice.mode == "none":
            called = []
        rules = Rules(self._codec, self._syntax, self._eos, thinking=thinking)
        if called:
            rules.add_calls(called, several=choice.parallel)
        if answer is not None and not forced:
            rules.add_answer(answer)
        for title, schema in rules.schemas.items():
            # By itself first: behind a think block nobody would notice before it is reached.
            self._compiled(f"start: {schema}", title)
        return self._compiled(rules.text(), "the request")

    def _compiled(self, grammar: str, title: str) -> GrammarConstraint:
        """Return a grammar's beginning; UsageError where it leads nowhere."""
        constraint = self._vocabulary.constraint(grammar)
        constraint.allowed()
        if constraint.problem:
            reason = constraint.problem.rpartition("JSON schema: ")[2]
            raise UsageError(f"the schema of {title} cannot be enforced: {reason}")
        return constraint

    @cached_property
    def _vocabulary(self) -> GrammarVocabulary:
        fast = getattr(self._codec.tokenizer, "backend_tokenizer", None)
        if fast is None:
            raise UsageError("response_format and a forced tool_choice need a fast tokenizer")
        return GrammarVocabulary(fast.to_str(), self._eos)


# Tool syntaxes whose calls are JSON between markers, with what they call the arguments.
_ARGUMENTS = {"hermes": "arguments", "llama3_json": "parameters", "json": "arguments"}
_WHITE = r" |\n[ \t]{0,40}"  # a model could go on with more for ever


class Rules:
    """The grammar of one answer, in llguidance's Lark."""

    def __init__(
        self, codec: TokenCodec, syntax: ToolSyntax, eos: Sequence[int], *, thinking: bool
    ) -> None:
        self._codec = codec
        # A backend may know one end, and not the model's; as tokens of the grammar all may come.
        ends = " | ".join(f"<[{token}]>" for token in eos)
        self._end = f" ({ends})?" if eos else ""
        self._syntax = syntax
        self.schemas: dict[str, str] = {}  # as terms of a rule, by what they belong to
        self._ways: list[str] = []
        self._lines = ["GAP: /[ \\n]{1,3}/", *self._thought(opened=thinking)]
        self._start = "thought" if thinking else "thought?"

    def text(self) -> str:
        return "\n".join(
            [f"start: {self._start} ({' | '.join(self._ways)}){self._end}", *self._lines]
        )

    def add_calls(self, functions: Tools, *, several: bool) -> None:
        syntax = self._syntax
        if syntax.name not in _ARGUMENTS:
            known = ", ".join(_ARGUMENTS)
            raise UsageError(f"no grammar for calls in {syntax.name!r} syntax, only for {known}")
        payloads = []
        for number, function in enumerate(functions):
            name = json.dumps(function["name"])
            head = json.dumps(f'{{"name": {name}, "{_ARGUMENTS[syntax.name]}": ')
            payloads.append(f'{head} arguments_{number} "}}"')
            self._add(f"arguments_{number}", _arguments(function), f"tool {function['name']!r}")
        ((opens, closes), *_) = syntax.spans
        # Without a closing marker the opening one may be missing, too, and nothing says where a
        # second call begins.
        opening = f"{self._marker(opens)}{'' if closes else '?'} GAP?"
        closing = f" GAP? {self._marker(closes)}" if closes else ""
        self._lines.append(f"call: {opening} ({' | '.join(payloads)}){closing}")
        self._ways.append("call (GAP? call)*" if several and closes else "call")

    def add_answer(self, answer: JsonFormat) -> None:
        schema = {"type": "object"} if answer.schema is None else answer.schema
        self._add("answer", _enforced(schema, strict=answer.strict), "the answer")
        self._ways.append("answer")

    def _add(self, rule: str, schema: dict[str, Any], title: str) -> None:
        term = self.schemas[title] = f"%json {json.dumps(schema)}"
        self._lines.append(f"{rule}: {term}")

    def _thought(self, *, opened: bool) -> list[str]:
        opens, closes = self._syntax.think
        if not opens:
            raise UsageError(f"no grammar for answers of models with {self._syntax.name!r} syntax")
        start = "" if opened else self._marker(opens)
        if closes in self._codec.added:
            end = f"TEXT? {self._marker(closes)}"
            return [f"thought: {start} {end} GAP?", "TEXT: /(.|\\n)+/"]
        inner = f"inner[suffix={json.dumps(closes)}]: /(.|\\n)*/"
        return [f"thought: {start} inner GAP?", inner]

    def _marker(self, text: str) -> str:
        """Return a marker as its token, or as text where the vocabulary has none."""
        return f"<[{self._codec.added[text]}]>" if text in self._codec.added else json.dumps(text)


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError("every tool needs a function with a name")
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise UsageError(f"the parameters of tool {function['name']!r} are no JSON schema")
    return function


def _chosen(choice: ToolChoice, functions: Tools) -> Tools:
    if not functions:
        raise UsageError("tool_choice asks for a call, and there are no tools")
    found = [each for each in functions if choice.name in ("", each["name"])]
    if not found:
        known = ", ".join(each["name"] for each in functions)
        raise UsageError(f"tool_choice names {choice.name!r}; the tools are {known}")
    return found


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a call's arguments: an object with no others than those it names."""
    schema = {"type": "object", **(function.get("parameters") or {})}
    if schema["type"] != "object":
        raise UsageError(f"the parameters of tool {function['name']!r} are no object's schema")
    if "properties" in schema:
        schema = {"additionalProperties": False, **schema}
    return _enforced(schema, strict=bool(function.get("strict")))


def _enforced(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    return {**schema, "x-guidance": {"lenient": not strict, "whitespace_pattern": _WHITE}}
