"""Traces: sessions with their calls, a JSON object a line, and the files of others read as such.

A file's first line says what it is: this project's own form, Mooncake's requests, a table like
BurstGPT's, or recorded chat messages.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from agentbench_kv.errors import UsageError
from agentbench_kv.results.files import write_atomic, writing
from agentbench_kv.serving_bench.jobs import TraceCall, TraceSession, prefix_hits
from agentbench_kv.serving_bench.trace_formats import (
    BurstRow,
    MooncakeRow,
    burst_sessions,
    mooncake_sessions,
)

Line = TypeVar("Line")

_RECORDED = "messages: the recorded prompts; answers of their lengths are the server's own"
RESIZED = (
    "messages: the lengths of the recorded prompts, scaled; what they said is dropped, and random "
    "tokens are sent"
)
_BURST = {"Timestamp", "Request tokens", "Response tokens"}
_OWN, _MOONCAKE, _MESSAGES = "calls", "input_length", "messages"  # a field that each form has
_FORMS = (
    "one session (calls), one request as Mooncake has them (input_length, output_length), "
    "recorded messages, or a table's heading like BurstGPT's (Timestamp, Request tokens, …)"
)


class ReadMessages(Protocol):
    """Reads recorded messages as sessions, in the tokens of some model."""

    def __call__(self, path: Path, /) -> list[TraceSession]: ...


@dataclass(frozen=True)
class LoadTrace:
    """Sessions in the order in which they begin."""

    label: str
    form: str  # whose form the file has
    sha256: str
    sessions: tuple[TraceSession, ...]
    notes: tuple[str, ...] = ()  # what reading it took for granted

    @property
    def calls(self) -> int:
        return sum(len(session.calls) for session in self.sessions)

    @property
    def prompt_tokens(self) -> int:
        """As an API would bill: the history again in every call."""
        return sum(sum(session.prompts) for session in self.sessions)

    @property
    def output_tokens(self) -> int:
        return sum(call.output_tokens for session in self.sessions for call in session.calls)

    @property
    def prefix_hits(self) -> float:
        """Share of prompt tokens that an endless prefix cache would hold."""
        return prefix_hits(self.sessions) / self.prompt_tokens

    @property
    def timed(self) -> bool:
        """Whether it says when sessions begin."""
        return all(session.start_s is not None for session in self.sessions)

    def first(self, count: int | None) -> LoadTrace:
        """Return the first sessions; a UsageError if there are not so many."""
        if count is None or count == len(self.sessions):
            return self
        if count > len(self.sessions):
            raise UsageError(f"{self.label} has {len(self.sessions)} sessions, not {count}")
        return replace(self, sessions=self.sessions[:count])


def read_trace(path: Path, messages: ReadMessages | None = None) -> LoadTrace:
    """Read a trace in any form that is known.

    UsageError with the line's number for what is none, or cannot be read; recorded messages need
    `messages`, which reads them in a model's tokens.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    lines = _lines(path, data)
    first = next(lines, None)
    if first is None:
        raise UsageError(f"{path} is empty; expected {_FORMS}")
    form, sessions, notes = _read(path, first, lines, messages)
    timed = sorted(sessions, key=lambda session: session.start_s or 0.0)
    return LoadTrace(path.name, form, hashlib.sha256(data).hexdigest(), tuple(timed), notes)


def _refuse_two_sizes(path: Path, sessions: Sequence[TraceSession]) -> None:
    """Refuse one name for shared pieces of two sizes, of which nobody knows what they share."""
    sizes: dict[str, int] = {}
    for session in sessions:
        for name, tokens in session.shared:
            if sizes.setdefault(name, tokens) != tokens:
                raise UsageError(
                    f"{path}: shared {name!r} has {sizes[name]} tokens and, in session "
                    f"{session.id!r}, {tokens}; give each size a name of its own"
                )


def write_trace(path: Path, sessions: Sequence[TraceSession]) -> None:
    """Write sessions in this project's own form, one a line."""
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, b"".join(msgspec.json.encode(session) + b"\n" for session in sessions))


def scaled(session: TraceSession, tokens: float, times: float = 1.0) -> TraceSession:
    """Return a session of so many times the tokens (at least one each), and the time."""

    def size(count: int) -> int:
        return max(round(count * tokens), 1)

    def time(seconds: float | None) -> float | None:
        return None if seconds is None else seconds * times

    shared = [(name, size(count)) for name, count in session.shared]
    calls = [
        TraceCall(
            size(call.new_tokens), size(call.output_tokens), call.gap_s * times, time(call.at_s),
            call.fresh,
        )
        for call in session.calls
    ]  # fmt: skip
    # Rounding up may leave the pieces longer than the prompt that begins with them.
    least = sum(count for _, count in shared)
    calls[0] = msgspec.structs.replace(calls[0], new_tokens=max(calls[0].new_tokens, least))
    return TraceSession(session.id, calls, time(session.start_s), shared)


def _read(
    path: Path,
    first: tuple[int, bytes],
    lines: Iterator[tuple[int, bytes]],
    messages: ReadMessages | None,
) -> tuple[str, list[TraceSession], tuple[str, ...]]:
    number, line = first
    heading = _cells(line)
    if set(heading) >= _BURST:
        found = [_burst_row(path, at, text, heading) for at, text in lines]
        return "BurstGPT", *burst_sessions(path, [row for row in found if row is not None])
    fields = _fields(path, number, line)
    if _OWN in fields:
        return "kvbench", _own(path, [first, *lines]), ()
    if _MOONCAKE in fields:
        rows = [_decoded(path, at, text, MooncakeRow) for at, text in [first, *lines]]
        return "Mooncake", *mooncake_sessions(path, rows)
    if _MESSAGES in fields:
        if messages is None:
            raise UsageError(f"{path} holds messages: name the model whose tokens they become")
        return "messages", messages(path), (_RECORDED,)
    raise UsageError(f"{path} line {number}: expected {_FORMS}")


def _own(path: Path, lines: Sequence[tuple[int, bytes]]) -> list[TraceSession]:
    found: dict[str, TraceSession] = {}
    for number, line in lines:
        session = _decoded(path, number, line, TraceSession)
        if any(call.keep is not None for call in session.calls):
            raise UsageError(f"{path} line {number}: keep is a method's; a trace has none")
        if session.id in found:
            raise UsageError(f"{path} line {number}: there is a session {session.id!r} before it")
        found[session.id] = session
    timed = [session.start_s is not None for session in found.values()]
    if any(timed) and not all(timed):
        raise UsageError(f"{path}: some sessions have a start_s and others none")
    _refuse_two_sizes(path, list(found.values()))
    return list(found.values())


def _lines(path: Path, data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers."""
    if b"\0" in data:
        raise UsageError(f"{path} is no text")
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            yield number, line.strip()


def _fields(path: Path, number: int, line: bytes) -> set[str]:
    try:
        document = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} line {number}: expected {_FORMS}; {error}") from error
    return set(document)


def _decoded(path: Path, number: int, line: bytes, kind: type[Line]) -> Line:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} line {number}: {error}") from error


def _cells(line: bytes) -> list[str]:
    """Return a table's cells; none of a line that belongs to no table, as of one with a lone CR."""
    try:
        return next(csv.reader([line.decode("utf-8", "replace")]), [])
    except csv.Error:
        return []


def _burst_row(path: Path, number: int, line: bytes, heading: Sequence[str]) -> BurstRow | None:
    """Read a row; None of a request that failed, which is one without an answer."""
    values = _cells(line)
    if len(values) != len(heading):
        raise UsageError(f"{path} line {number}: {len(values)} values for {len(heading)} columns")
    named = dict(zip(heading, values, strict=True))
    if named["Response tokens"] == "0":
        return None
    known: dict[str, Callable[[dict[str, str]], Any]] = {
        "session": lambda row: row.get("Session ID") or None,
        "at_s": lambda row: row["Timestamp"],
        "elapsed_s": lambda row: row.get("Elapsed time") or 0.0,
        "prompt": lambda row: row["Request tokens"],
        "output": lambda row: row["Response tokens"],
    }
    plain = {name: read(named) for name, read in known.items()}
    try:
        return msgspec.convert(plain, BurstRow, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path} line {number}: {error}") from error
