"""What stands between the markers of calls, read as calls: one function for each tool syntax."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from agentbench_kv.gateway.messages import too_deep
from agentbench_kv.phases.tokens import encodable

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Call:
    """A call as a model wrote it; `id` where the syntax has ids of its own."""

    name: str
    arguments: str  # a JSON object
    id: str | None = None


class NotACallError(ValueError):
    """The payload is not what the syntax says."""


def read_calls(syntax: str, payload: str, tools: Tools = ()) -> list[Call] | None:
    """Return the calls in a payload; None if there is none or anything in it is not one.

    `tools` are those offered, in OpenAI's form: syntaxes without types take them from there.
    """
    try:
        return list(READERS[syntax](payload, tools)) or None
    except (NotACallError, RecursionError):
        return None


def offered_names(tools: Tools) -> set[str]:
    return {str(name) for tool in tools if (name := _function(tool).get("name"))}


def is_offered(name: str, tools: Tools) -> bool:
    return name in offered_names(tools)


def _json_calls(payload: str, _: Tools) -> Iterator[Call]:
    """JSON objects with `name` and `arguments` (or `parameters`), or a list of them.

    Several are separated by white space, commas or semicolons.
    """
    for value in json_values(payload):
        yield _call_of(value)


def _told_calls(payload: str, tools: Tools) -> Iterator[Call]:
    """JSON calls where any other JSON may stand, too: of tools that were offered, or invented.

    A model was told to call by `name` and `arguments`. What has these two keys and no other is a
    call, though no such tool exists: the model has to hear that, or it would wait for a result.
    """
    for value in json_values(payload):
        call = _call_of(value)
        exact = isinstance(value, dict) and value.keys() == {"name", "arguments"}
        if tools and not exact and not is_offered(call.name, tools):
            raise NotACallError(call.name)
        yield call


def _llama3(payload: str, tools: Tools) -> Iterator[Call]:
    """JSON calls; behind the Python tag also `tool.call(key="value")`."""
    if payload.lstrip().startswith(("{", "[")):
        yield from _json_calls(payload, tools)
        return
    for name, given in _python_calls(payload):
        yield _made(name.removesuffix(".call"), given)


def _pythonic(payload: str, _: Tools) -> Iterator[Call]:
    """Read a list of Python calls with keyword arguments that are literals."""
    if not payload.strip().startswith("["):
        raise NotACallError(payload)
    for name, given in _python_calls(payload):
        yield _made(name, given)


class _JsonNames(ast.NodeTransformer):
    """Makes constants of JSON's, which models mix into Python."""

    constants: ClassVar = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(self.constants[node.id]) if node.id in self.constants else node


def _python_calls(source: str) -> Iterator[tuple[str, dict[str, object]]]:
    try:
        tree = _JsonNames().visit(ast.parse(source.strip(), mode="eval")).body
        for call in tree.elts if isinstance(tree, ast.List) else [tree]:
            if not isinstance(call, ast.Call) or call.args:
                raise NotACallError(source)
            given = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
            if None in given:
                raise NotACallError(source)
            # As JSON has it: no tuples, no sets.
            yield ast.unparse(call.func), json.loads(json.dumps(given))
    except (SyntaxError, ValueError, TypeError, MemoryError) as error:
        raise NotACallError(source) from error


def _mistral(payload: str, tools: Tools) -> Iterator[Call]:
    """Read a JSON list, or (version 11 on) `name[ARGS]{...}`, each behind its own marker.

    Where special tokens are not shown it is `name{...}`.
    """
    for part in payload.split("[TOOL_CALLS]"):
        if part.lstrip().startswith(("[", "{")) and not part.lstrip().startswith("[ARGS]"):
            yield from _mistral_list(part, tools)
            continue
        name, found, arguments = part.partition("[ARGS]")
        if not found:
            name, brace, rest = part.partition("{")
            arguments = brace + rest
        name, _, call_id = name.partition("[CALL_ID]")
        yield _made(name.strip(), _only(json_values(arguments)), call_id.strip() or None)


def _mistral_list(part: str, tools: Tools) -> Iterator[Call]:
    for value, call in zip(json_values(part), _json_calls(part, tools), strict=True):
        own = value.get("id") if isinstance(value, dict) else None
        yield Call(call.name, call.arguments, own if isinstance(own, str) else None)


_XML_FUNCTION = re.compile(r"<function=([^>]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_XML_PARAMETER = re.compile(
    r"<parameter=([^>]+)>(.*?)(?:</parameter>|(?=<parameter=)|(?=</function>)|\Z)", re.DOTALL
)


def _qwen3_coder(payload: str, tools: Tools) -> Iterator[Call]:
    """`<function=NAME><parameter=KEY>` with values between lines, typed by the tool's schema."""
    for name, body in _XML_FUNCTION.findall(payload):
        types = _types(name, tools)
        pairs = [(key.strip(), _one_line_off(text)) for key, text in _XML_PARAMETER.findall(body)]
        yield _made(name.strip(), {key: _typed(text, types.get(key)) for key, text in pairs})


_NAME = re.compile(r"[^\s<>{}\"']+")
_INVOKE = re.compile(r'<invoke name="?([^">]+)"?>(.*?)(?:</invoke>|\Z)', re.DOTALL)
_INVOKED = re.compile(r'<parameter name="?([^">]+)"?>(.*?)(?:</parameter>|\Z)', re.DOTALL)


def _minimax(payload: str, tools: Tools) -> Iterator[Call]:
    """`<invoke name="NAME"><parameter name="KEY">`, typed by the tool's schema."""
    for name, body in _INVOKE.findall(payload):
        types = _types(name, tools)
        pairs = [(key, _one_line_off(text)) for key, text in _INVOKED.findall(body)]
        yield _made(name, {key: _typed(text, types.get(key)) for key, text in pairs})


def _cohere(payload: str, _: Tools) -> Iterator[Call]:
    """JSON objects with `tool_name`, `parameters` and an id of the message's own numbering."""
    for value in json_values(payload):
        if not isinstance(value, dict) or not isinstance(value.get("tool_name"), str):
            raise NotACallError(payload)
        yield _made(value["tool_name"], value.get("parameters", {}))


_GLM_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|\Z)", re.DOTALL)


def _glm(payload: str, tools: Tools) -> Iterator[Call]:
    """Read the name, then `<arg_key>` and `<arg_value>` in pairs, typed by the tool's schema."""
    name = payload.partition("<arg_key>")[0].strip()
    if not _NAME.fullmatch(name):
        raise NotACallError(payload)
    types = _types(name, tools)
    pairs = [(key.strip(), text.strip()) for key, text in _GLM_PAIR.findall(payload)]
    yield _made(name, {key: _typed(text, types.get(key)) for key, text in pairs})


_DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)", re.DOTALL)
_FENCED = re.compile(r"\A\s*([^\n`]+)\n```json\n(.*?)\n?```\s*\Z", re.DOTALL)


def _deepseek(payload: str, _: Tools) -> Iterator[Call]:
    """`function<sep>NAME` with fenced arguments (V3, R1), or `NAME<sep>arguments` (V3.1 on)."""
    for body in _DEEPSEEK.findall(payload):
        name, _, rest = body.partition("<｜tool▁sep｜>")
        fenced = _FENCED.match(rest)
        if fenced:
            name, rest = fenced.groups()
        yield _made(name.strip(), _only(json_values(rest)))


_KIMI = re.compile(
    r"<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>(.*?)(?:<\|tool_call_end\|>|\Z)",
    re.DOTALL,
)


def _kimi(payload: str, _: Tools) -> Iterator[Call]:
    """`functions.NAME:INDEX`, which is the call's id, then the arguments."""
    for own, arguments in _KIMI.findall(payload):
        name = own.strip().rpartition(":")[0] or own.strip()
        yield _made(name.removeprefix("functions."), _only(json_values(arguments)), own.strip())


def _nothing(_: str, __: Tools) -> Iterator[Call]:
    return iter(())


READERS: Mapping[str, Callable[[str, Tools], Iterator[Call]]] = {
    "hermes": _json_calls,
    "llama3_json": _llama3,
    "pythonic": _pythonic,
    "mistral": _mistral,
    "qwen3_coder": _qwen3_coder,
    "glm": _glm,
    "deepseek": _deepseek,
    "kimi": _kimi,
    "seed_oss": _qwen3_coder,
    "minimax": _minimax,
    "cohere": _cohere,
    "lfm2": _pythonic,
    "granite": _json_calls,
    "json": _told_calls,
    "harmony": _nothing,  # the header of a message says that it is a call
    "none": _nothing,
}


def json_values(payload: str) -> list[object]:
    """Return the JSON values of a text, those in a list one by one."""
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    values: list[object] = []
    rest = payload.strip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except ValueError as error:
            raise NotACallError(payload) from error
        values.extend(value if isinstance(value, list) else [value])
        rest = rest[end:].lstrip().lstrip(",;").lstrip()
    return values


def json_object(text: str) -> str:
    """Return the one JSON object of a text as canonical JSON; NotACallError if it is not one."""
    return _made("arguments", _only(json_values(text))).arguments


def _call_of(value: object) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise NotACallError(value)
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _only(json_values(arguments))
    return _made(value["name"], arguments)


def _made(name: str, arguments: object, call_id: str | None = None) -> Call:
    # What nests too deep could not come back in the history.
    if not name or not isinstance(arguments, dict) or too_deep(arguments):
        raise NotACallError(name)
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError as error:  # a number beyond all floats
        raise NotACallError(name) from error
    # Half a character in an escape stays an escape: UTF-8 cannot carry it.
    text = text if text == encodable(text) else json.dumps(arguments)
    return Call(encodable(name), text, call_id)


def _only(values: list[object]) -> object:
    if len(values) != 1:
        raise NotACallError(values)
    return values[0]


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


def _types(name: str, tools: Tools) -> dict[str, object]:
    """Return the JSON type of each parameter of a tool, as far as its schema says one."""
    for tool in map(_function, tools):
        if tool.get("name") == name:
            parameters = tool.get("parameters")
            known = parameters.get("properties") if isinstance(parameters, Mapping) else None
            pairs = known.items() if isinstance(known, Mapping) else ()
            return {key: schema.get("type") for key, schema in pairs if isinstance(schema, Mapping)}
    return {}


def _typed(text: str, kind: object) -> object:
    """Return a value as JSON where the schema does not say that it is a string, else as text."""
    if kind == "string":
        return text
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        pass
    if text.lower() in ("true", "false") and kind in ("boolean", "bool"):
        return text.lower() == "true"
    return None if text.lower() == "none" and kind is not None else text


def _one_line_off(text: str) -> str:
    """Return a value without the line breaks that the template puts around it."""
    return text.removeprefix("\n").removesuffix("\n")
