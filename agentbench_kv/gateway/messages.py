"""OpenAI messages in one canonical form, and as a chat template of the model renders them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.phases.syntax import ToolSyntax

Message = Mapping[str, Any]
Canonical = tuple[str, str, str]  # role, content, calls as JSON

# What a client may call a role, and what templates call it.
_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
# Objects and lists inside one another. Python's own limit is a thousand, and shared by all callers.
_MOST_LEVELS = 100


def text_of(content: object) -> str:
    """Return the text of a message's content: a string, None, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(_part_text(part) for part in content)
    raise UsageError(f"message content must be text, not {type(content).__name__}")


def canonical(message: Message) -> Canonical:
    """Return what makes a message the same message: role, content, calls.

    Reasoning, ids, white space around an assistant's content and the spelling of JSON arguments
    do not count: clients drop or rewrite them.
    """
    role = _role(message)
    content = text_of(message.get("content"))
    calls = [name_and_arguments(call) for call in _calls_of(message)]
    if role == "assistant":
        content = content.strip()
    return role, content, json.dumps(calls, sort_keys=True) if calls else ""


def for_template(message: Message) -> dict[str, Any]:
    """Return the message as chat templates expect it: text content, arguments as objects."""
    plain = {key: value for key, value in message.items() if value is not None}
    plain["role"] = _role(message)
    plain["content"] = text_of(message.get("content"))
    plain.pop("tool_calls", None)
    calls = []
    for call in _calls_of(message):
        name, arguments = name_and_arguments(call)
        calls.append(tool_call(call.get("id", ""), name, {} if arguments is None else arguments))
    return {**plain, "tool_calls": calls} if calls else plain


def tool_call(call_id: str, name: str, arguments: object) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def count_calls(messages: Sequence[Message]) -> int:
    return sum(len(message.get("tool_calls") or ()) for message in messages)


def tools_key(tools: Sequence[Mapping[str, Any]] | None) -> str:
    """Return a string equal for equal tool lists."""
    return json.dumps(list(tools), sort_keys=True) if tools else ""


def check_levels(value: object, what: str) -> None:
    """Refuse parsed JSON that nests deeper than a template or an encoder can follow."""
    if too_deep(value):
        raise UsageError(f"{what} nest deeper than {_MOST_LEVELS} levels")


def too_deep(value: object) -> bool:
    level = [value]
    for _ in range(_MOST_LEVELS):
        children = (child for item in level for child in _children(item))
        level = [child for child in children if isinstance(child, (dict, list))]
        if not level:
            return False
    return True


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _role(message: Message) -> str:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UsageError("every message needs a role")
    if role not in _ROLES:
        raise UsageError(f"no role {role[:40]!r}; a message is of {', '.join(_ROLES)}")
    return _ROLES[role]


def _calls_of(message: Message) -> list[Any]:
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise UsageError(f"tool_calls must be a list, not {type(calls).__name__}")
    return calls or []


def _part_text(part: object) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise UsageError(f"message content part {kind!r} is not text; this server takes text only")


def name_and_arguments(call: object) -> tuple[str, object]:
    """Return a call's function name and its arguments, parsed where they are JSON text."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError("every tool call needs a function with a name")
    name, arguments = function["name"], function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"the arguments of the call of {name[:40]!r}")
    elif arguments is not None and not isinstance(arguments, Mapping):
        kind = type(arguments).__name__
        raise UsageError(f"a call's arguments must be an object or its JSON text, not {kind}")
    return name, arguments


def _parsed(text: str, what: str) -> object:
    """Return what JSON text says; what is no JSON, as models write it too, is its own text."""
    try:
        value: object = json.loads(text)
    except ValueError:
        return text
    except RecursionError:
        raise UsageError(f"{what} nest deeper than {_MOST_LEVELS} levels") from None
    check_levels(value, what)
    return value


# Text that no template rewrites, in JSON neither, and no message holds.
_SENTINEL = "kvbench-7c1e-sentinel-9b52-kvbench"
_ASKED = {"role": "user", "content": "."}
_SAID = {"role": "assistant", "content": _SENTINEL}
Tools = Sequence[Mapping[str, Any]] | None


_EXPLANATION = """You can call these functions, each given as a JSON schema:

{tools}

To call functions, answer with nothing but one JSON object for each call, in a block like this:

```json
{{"name": "<function>", "arguments": {{"<parameter>": <value>}}}}
```

You will be given the results. If no call is needed, answer in words."""


def explanation(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return what tells any model which functions there are and how to call them."""
    listed = "\n".join(json.dumps(tool.get("function", tool)) for tool in tools)
    return _EXPLANATION.format(tools=listed)


def with_system(messages: Sequence[Message], text: str) -> list[Message]:
    """Return messages whose system prompt ends in a text."""
    if messages[0].get("role") not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    first = {**messages[0], "content": f"{text_of(messages[0].get('content'))}\n\n{text}"}
    return [first, *messages[1:]]


def all_in_words(messages: Sequence[Message]) -> list[Message]:
    """Return messages without calls and results; what users say in a row becomes one message."""
    said: list[Message] = []
    for message in map(_in_words, messages):
        if said and message.get("role") == said[-1].get("role") == "user":
            texts = [text_of(each.get("content")) for each in (said[-1], message)]
            said[-1] = {"role": "user", "content": "\n".join(texts)}
        else:
            said.append(message)
    return said


def _in_words(message: Message) -> Message:
    """Return a message as a model sees it whose template knows neither calls nor their results."""
    if message.get("role") == "tool":
        result = text_of(message.get("content"))
        return {"role": "user", "content": f"<tool_response>\n{result}\n</tool_response>"}
    calls = [name_and_arguments(call) for call in message.get("tool_calls") or ()]
    if not calls:
        return message
    said = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
    blocks = [f"```json\n{call}\n```" for call in said]
    words = text_of(message.get("content"))
    return {"role": message["role"], "content": "\n".join([words, *blocks] if words else blocks)}


def spoken(message: Message) -> dict[str, str]:
    """Return a message as text: thoughts and calls in its words, a tool's result as a user's."""
    said = _in_words(message)
    text = text_of(said.get("content"))
    thoughts = str(message.get("reasoning_content") or "").strip()
    if thoughts:
        text = f"<think>\n{thoughts}\n</think>\n{text}"
    return {"role": _role(said), "content": text}


class ChatTemplate:
    """Renders whole prompts, and what a later turn adds to a prompt."""

    def __init__(self, tokenizer: Any, syntax: ToolSyntax, markers: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._prompted = syntax.prompted
        self._markers = markers  # of messages: where one ends or the next begins

    def render_first(self, messages: Sequence[Message], tools: Tools = None) -> str:
        """Return the whole prompt, generation prompt included."""
        if not messages:
            raise UsageError("a chat request needs at least one message")
        if not self._prompted or not tools:
            return self._render(messages, tools)
        text = explanation(tools)
        try:
            return self._render(with_system(messages, text), None)
        except UsageError:  # Gemma's knows no system prompt
            return self._render([{"role": "user", "content": text}, *messages], None)

    def render_whole(self, messages: Sequence[Message]) -> str:
        """Return the text of messages that nobody is to answer."""
        return self._render(messages, prompt=False)

    def render_delta(
        self, messages: Sequence[Message], tools: Tools = None, last: Message | None = None
    ) -> str:
        """Return the text between an assistant's last content and its next turn.

        The turn end marker comes first. The new messages are rendered behind a stand-in assistant
        message, so that a template which drops the thoughts of earlier turns (Qwen3) still gives
        text that extends what the session holds. Results of tools are rendered behind the `last`
        message with its calls: templates look up their names and ids, or refuse without them.
        """
        if self._prompted:
            tools = None
        elif last is not None and (delta := self._after_calls(messages, tools, last)):
            return delta
        _, found, delta = self._render([_ASKED, _SAID, *messages], tools).rpartition(_SENTINEL)
        if not found:
            raise UsageError("the model's chat template does not show the assistant's content")
        return delta

    def render_said(self, message: Message) -> str:
        """Return an assistant's message as the model writes it, from its prompt to the turn end.

        Thoughts stand in `reasoning_content`; a template that leaves them out gets them in front.
        """
        begin, whole = self._render([_ASKED]), self._render([_ASKED, message], prompt=False)
        thinking = begin.rstrip().endswith("<think>")
        head = begin.rstrip().removesuffix("<think>") if thinking else begin
        if not whole.startswith(head):
            raise UsageError("the model's chat template does not show how an answer begins")
        said = whole[len(head) :]
        ends = [at + len(marker) for marker in self._markers if (at := said.rfind(marker)) >= 0]
        said = said[: max(ends)] if ends else said.rstrip()
        thoughts = str(message.get("reasoning_content") or "").strip()
        if thoughts and thoughts not in said:
            said = f"<think>\n{thoughts}\n</think>\n\n{said.lstrip()}"
        if not thinking:
            return said
        opened = said.lstrip().removeprefix("<think>")
        return opened if opened != said.lstrip() else f"\n</think>\n\n{said}"

    def _after_calls(self, messages: Sequence[Message], tools: Tools, last: Message) -> str:
        """Return the text behind a message with calls, from its end marker on; empty if unknown."""
        calls = [dict(call) for call in last.get("tool_calls") or ()]
        if not calls or not messages or messages[0].get("role") != "tool":
            return ""
        name, _ = name_and_arguments(calls[-1])
        calls[-1] = tool_call(str(calls[-1].get("id", "")), name, {"_": _SENTINEL})
        said = {"role": "assistant", "content": "", "tool_calls": calls}
        try:
            _, found, rest = self._render([_ASKED, said, *messages], tools).rpartition(_SENTINEL)
        except UsageError:
            return ""  # some take one call at a time only
        ends = [at for marker in self._markers if (at := rest.find(marker)) >= 0]
        return rest[min(ends) :] if found and ends else ""

    def _render(
        self, messages: Sequence[Message], tools: Tools = None, *, prompt: bool = True
    ) -> str:
        if self._prompted:
            messages = all_in_words(messages)
        try:
            plain, listed = [*map(for_template, messages)], [*map(dict, tools)] if tools else None
            text = self._tokenizer.apply_chat_template(
                plain, tools=listed, add_generation_prompt=prompt, tokenize=False
            )
        except KVBenchError:
            raise
        except Exception as error:
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UsageError(f"the model's chat template refuses these messages: {line}") from error
        return str(text)
