"""Files of a record a line, read whatever has happened to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from agentbench_kv.results import files
from agentbench_kv.results.records import REFUSED, checked, explained

R = TypeVar("R", bound=Struct)


@dataclass(frozen=True)
class Unreadable:
    """A line this version cannot read in full: its number (from 1) and what is odd about it."""

    line: int
    reason: str


@dataclass
class Lines(Generic[R]):
    """What a JSON-lines file holds: its records in order, the odd lines, a torn end or not."""

    records: list[R] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)
    torn: bool = False


def read_lines(path: Path, kind: type[R]) -> Lines[R]:
    """Read every record of a file; a missing one has none."""
    if not path.exists():
        return Lines()
    with path.open("rb") as file:
        return parse_lines(file, kind)


def parse_lines(lines: Iterable[bytes], kind: type[R]) -> Lines[R]:
    """Read a record from each line of an open binary file; a damaged file is never an error.

    A line that is no record of this version is left out and reported; one that only has unknown
    fields is read without them and reported. An incomplete last line is dropped.
    """
    found: Lines[R] = Lines()
    decode = msgspec.json.Decoder(kind).decode
    for number, raw in enumerate(lines, start=1):
        try:
            found.records.append(decode(raw))
        except REFUSED as error:
            if not raw.endswith(b"\n") and not files.is_json(raw):
                found.torn = True
            elif raw.strip():
                reason = _read_odd(found.records, raw, kind, error)
                found.unreadable.append(Unreadable(number, reason))
    return found


def _read_odd(records: list[R], raw: bytes, kind: type[R], error: Exception) -> str:
    """Add what can be read of a line that was refused for `error`; return what is odd about it."""
    unknown: list[str] = []
    try:
        data = msgspec.json.decode(raw)
        unknown = _prune(data, kind)
        records.append(checked(data, kind))
    except REFUSED as again:
        return explained(again if unknown else error)
    return f"unknown field {', '.join(unknown)}"


def _prune(data: Any, kind: type[Struct], place: str = "") -> list[str]:
    """Drop the fields that `kind` does not have, and return where they were."""
    if not isinstance(data, dict):
        return []
    known = {field.name: field.type for field in msgspec.structs.fields(kind)}
    unknown = [place + name for name in data if name not in known]
    for name in set(data) - set(known):
        del data[name]
    for name, inner in known.items():
        if isinstance(inner, type) and issubclass(inner, Struct):
            unknown += _prune(data.get(name), inner, f"{place}{name}.")
    return unknown
