"""Option types and settings that several verbs share."""

from __future__ import annotations

from collections.abc import Iterable

from agentbench_kv.errors import UsageError


def parse_settings(pairs: Iterable[str]) -> dict[str, str]:
    """Turn `key=value` texts into a dict.

    Raises
    ------
    UsageError
        If a text has no `=` or a key comes twice.
    """
    settings: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise UsageError(f"--set {pair!r}: expected key=value, e.g. --set window=16")
        if key in settings:
            raise UsageError(f"--set {key} is given twice")
        settings[key.strip()] = value.strip()
    return settings


def parse_budget(text: str) -> int:
    """Read a budget in tokens.

    Raises
    ------
    UsageError
        If it is not a whole number of at least 1.
    """
    try:
        budget = int(text)
    except ValueError:
        budget = 0
    if budget < 1:
        raise UsageError(f"budget {text!r}: expected a number of tokens >= 1, e.g. --budget 3072")
    return budget
