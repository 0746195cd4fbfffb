"""JSON as kvbench writes it, and nothing else that a parser might let through.

A submission is somebody else's text. Numbers beyond 64 bits, NaN, the same key twice, endless
nesting and half characters are what later code would stumble over, or read in two ways.
"""

from __future__ import annotations

import json
from typing import Any

_DEEPEST = 64
_MOST = 2**63 - 1


def strict_json(raw: bytes) -> Any:
    """Parse one JSON document.

    Raises
    ------
    ValueError
        With the reason, on one line.
    """
    try:
        document = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_constant,
        )
        _check(document)
    except RecursionError:
        raise ValueError("nested too deep") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos}") from None
    return document


def retyped(document: Any, record: Any, field: str = "") -> str:
    """Return the first field that a record holds as another type than its JSON; empty if none.

    A lenient reader makes a number of the text `"1"`, which no writer of ours wrote.
    """
    if not isinstance(document, dict):
        texts = isinstance(document, str) == isinstance(record, str)
        same = texts and isinstance(document, bool) == isinstance(record, bool)
        return "" if same else field
    for name, said in document.items():
        read = record.get(name) if isinstance(record, dict) else getattr(record, name, said)
        if found := retyped(said, read, f"{field}.{name}".lstrip(".")):
            return found
    return ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object with the same key twice")
    return found


def _integer(text: str) -> int:
    if len(text) > 20 or abs(int(text)) > _MOST:
        raise ValueError(f"a number of {len(text)} digits; the most are 64 bits")
    return int(text)


def _number(text: str) -> float:
    # A large one may become an integer of hundreds of digits where one is expected.
    if not abs(float(text)) <= _MOST:
        raise ValueError(f"a number out of range: {text[:20]}")
    return float(text)


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


def _check(document: Any) -> None:
    """Refuse deep nesting and half characters, without recursion."""
    level, depth = [document], 0
    while level:
        depth += 1
        if depth > _DEEPEST:
            raise ValueError(f"nested deeper than {_DEEPEST} levels")
        below: list[Any] = []
        for value in level:
            if isinstance(value, str):
                _check_text(value)
            elif isinstance(value, dict):
                below += [*value, *value.values()]
            elif isinstance(value, list):
                below += value
        level = below


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"half a character in {text[:40]!a}") from error
