"""What a corpus holds, and how a page is laid out in numbered lines."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

LINE_WIDTH = 80


@dataclass(frozen=True)
class Document:
    """One page of a corpus, in plain text."""

    id: str  # name in the source (`docid`, file path); the URL if it has none
    url: str  # what `open` takes; unique in a corpus
    title: str
    text: str


def lines_of(text: str, width: int = LINE_WIDTH) -> tuple[str, ...]:
    """Break a text into lines of at most `width` characters; empty lines stay."""
    return tuple(line for part in text.splitlines() for line in textwrap.wrap(part, width) or [""])
