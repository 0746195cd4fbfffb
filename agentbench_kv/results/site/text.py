"""Data as text for a page: clipped, with invisible characters made visible; Jinja escapes it."""

from __future__ import annotations

import hashlib
import re

from agentbench_kv.results.stats import Interval
from agentbench_kv.results.terminal import share

# Control, bidirectional, zero-width and surrogate characters: they change how others are read.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_UNSAFE = re.compile(r"[^A-Za-z0-9._@+-]+")
_STEM = 150
NOTHING = "–"  # noqa: RUF001  an en dash for a missing figure


def visible(value: object, limit: int = 500) -> str:
    """Return text that shows what is there: newlines and tabs stay, hidden characters are spelt.

    Of a longer text, how many characters are left out is said.
    """
    text = str(value)
    shown = _INVISIBLE.sub(lambda match: ascii(match[0])[1:-1], text[:limit])
    return shown if len(text) <= limit else f"{shown} … ({len(text) - limit:,} more characters)"


def file_stem(name: str, taken: set[str]) -> str:
    """Return a file name without ending for any name, and note it in `taken`.

    Names that are alike after cleaning, or on a file system that ignores case, stay apart.
    """
    stem = _UNSAFE.sub("_", name).strip("._-")[:_STEM] or "page"
    if stem != name or stem.lower() in taken:
        digest = hashlib.sha256(f"{name} {len(taken)}".encode("utf-8", "replace")).hexdigest()
        stem = f"{stem}-{digest[:8]}"
    taken.add(stem.lower())
    return stem


def percent(ends: Interval | None) -> str:
    """Write a share with its interval in percent; a dash for None."""
    return NOTHING if ends is None else share(ends.point, ends.low, ends.high)


def number(value: float | None) -> str:
    """Write a figure with three digits or as a whole number; a dash for None."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
