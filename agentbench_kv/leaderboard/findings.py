"""What a check says: a finding refuses the submission, a note says what it leaves open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_LONGEST = 160


@dataclass(frozen=True)
class Finding:
    """What is wrong with a submission: the run (empty: the manifest), the field, the words."""

    run: str
    field: str
    text: str

    def __str__(self) -> str:
        """Return one line."""
        return ": ".join(part for part in (self.run, self.field, self.text) if part)


@dataclass(frozen=True)
class Wrong:
    """A finding before the run's name is put in front."""

    field: str
    text: str


@dataclass(frozen=True)
class Note:
    """Something that could not be checked, and why."""

    text: str


class Stop(Note):
    """A note for which a run cannot be called re-scored."""


Checks = Iterator[Wrong | Note]


def differs(field: str, said: Any, derived: Any) -> Wrong:
    """Return the finding for a value that another one contradicts."""
    return Wrong(field, f"is {shown(said)}, expected {shown(derived)}")


def shown(value: Any) -> str:
    """Return a value on one short line, whatever it holds."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__} too large to show"
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
