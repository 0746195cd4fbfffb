"""The browser as tools: OpenAI function schemas, and calls with arguments that a model wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentbench_kv.adapters.browser.browser import Browser, BrowserError, View

_INTEGER = {"type": "integer"}
_CURSOR = {**_INTEGER, "description": "Cursor of a page; -1, the default, is the current page."}


def _tool(name: str, text: str, required: list[str], properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": text, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS: list[dict[str, Any]] = [
    _tool(
        "search",
        "Search the corpus. Shows results as links [0], [1], … on a new page.",
        ["query"],
        {"query": {"type": "string"}, "topn": {**_INTEGER, "description": "Most results to show."}},
    ),
    _tool(
        "open",
        "Open link `id` of the page at `cursor`, or a URL given as `id`, from line `loc` on. "
        "Without `id`, show another part of the page at `cursor`.",
        [],
        {
            "id": {"type": ["integer", "string"], "description": "Link number, or a URL."},
            "cursor": _CURSOR,
            "loc": {**_INTEGER, "description": "First line to show."},
            "num_lines": {**_INTEGER, "description": "Most lines to show."},
        },
    ),
    _tool(
        "find",
        "Find a text in the document at `cursor`. Matches are links that `open` takes.",
        ["pattern"],
        {"pattern": {"type": "string"}, "cursor": _CURSOR},
    ),
]
_PARAMETERS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


def call_tool(browser: Browser, name: str, arguments: str | Mapping[str, Any]) -> View:
    """Answer a tool call; whatever is wrong with it comes back as text.

    `arguments` are an object or, as models write them, its JSON text.
    """
    try:
        if name not in _PARAMETERS:
            raise BrowserError(f"no tool {name!r}; there are {', '.join(_PARAMETERS)}")
        view: View = getattr(browser, name)(**_checked(name, arguments))
    except BrowserError as error:
        return View(f"Error: {error}")
    return view


def _checked(name: str, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    properties, required = _PARAMETERS[name]["properties"], _PARAMETERS[name]["required"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise BrowserError("the arguments are not JSON") from None
    if not isinstance(arguments, Mapping):
        raise BrowserError("the arguments are not a JSON object")
    if unknown := sorted(set(arguments) - set(properties)):
        takes = ", ".join(properties)
        raise BrowserError(f"{name} takes {takes}, not {', '.join(map(str, unknown))}")
    if missing := [each for each in required if arguments.get(each) is None]:
        raise BrowserError(f"{name} needs {missing[0]!r}")
    return {
        key: _value(key, value, properties[key]["type"])
        for key, value in arguments.items()
        if value is not None
    }


def _value(key: str, value: Any, kinds: str | list[str]) -> int | str:
    """Return an argument as its tool takes it; models write numbers as text and the reverse."""
    if "integer" in kinds and (number := _whole(value)) is not None:
        return number
    if "string" in kinds and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise BrowserError(f"{key} must be {'a number' if 'integer' in kinds else 'a text'}")


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        digits = value.strip().removeprefix("-")
        value = int(value) if digits.isascii() and digits.isdigit() and len(digits) < 10 else None
    if isinstance(value, float):
        value = int(value) if value.is_integer() else None
    return value if isinstance(value, int) else None
