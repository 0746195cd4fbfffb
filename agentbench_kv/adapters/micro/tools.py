"""The depot's tools as OpenAI function schemas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PARAMETERS = {
    "login": ("crew",),
    "scan": ("tag",),
    "open": ("route", "pass", "crew", "session"),
    "ship": ("plan", "gate", "port", "tag"),
    "read": ("page",),
}
"""Argument names of every tool, in the order they are written."""


def schemas(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the function schemas of the tools named."""
    found = []
    for name in names:
        properties = {argument: {"type": "string"} for argument in PARAMETERS[name]}
        parameters = {"type": "object", "properties": properties}
        found.append({"type": "function", "function": {"name": name, "parameters": parameters}})
    return found
