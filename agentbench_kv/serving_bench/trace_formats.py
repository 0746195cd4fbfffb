"""Traces of others as sessions: what their columns mean here, and what is taken for granted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from agentbench_kv.errors import UsageError
from agentbench_kv.serving_bench.jobs import TraceCall, TraceSession

BLOCK = 512  # tokens of one of Mooncake's hash ids

_Tokens = Annotated[int, Meta(ge=1, le=10_000_000)]
_Time = Annotated[float, Meta(ge=0, le=1e12)]
Found = tuple[list[TraceSession], tuple[str, ...]]


class MooncakeRow(msgspec.Struct, frozen=True):
    """A request, in milliseconds; the last two fields are AIPerf's, for sessions."""

    input_length: _Tokens  # of the whole prompt; in a row with a `session_id`, of its new tokens
    output_length: _Tokens
    timestamp: _Time | None = None
    hash_ids: list[int] = []  # each stands for 512 tokens and all that come before them
    session_id: str | int | None = None
    delay: _Time = 0.0  # since the answer before


class BurstRow(msgspec.Struct, frozen=True):
    """A request of BurstGPT, in seconds."""

    at_s: _Time
    prompt: _Tokens
    output: _Tokens
    session: str | None = None
    elapsed_s: _Time = 0.0  # until the answer's end


def mooncake_sessions(path: Path, rows: Sequence[MooncakeRow]) -> Found:
    """Return Mooncake's requests as sessions.

    By `session_id` where rows have one. Else a request goes on with an earlier one if its prompt
    begins with all whole blocks of that, the last of which nobody had before, and has room for the
    answer; other requests are sessions of one call.
    """
    if any(row.session_id is not None for row in rows):
        return _by_session_id(path, rows), ()
    if any(row.timestamp is None for row in rows):
        raise UsageError(f"{path}: a request has neither timestamp nor session_id")
    joined = _joined(sorted(rows, key=lambda row: row.timestamp or 0.0))
    note = f"{len(joined)} sessions, joined from {len(rows)} requests by their blocks of {BLOCK}"
    return joined, (note, "between their calls: the time from request to request")


def _by_session_id(path: Path, rows: Sequence[MooncakeRow]) -> list[TraceSession]:
    sessions: dict[str, list[MooncakeRow]] = {}
    for number, row in enumerate(rows):
        name = f"request {number}" if row.session_id is None else str(row.session_id)
        sessions.setdefault(name, []).append(row)
    sessions = {name: _in_time(path, name, group) for name, group in sessions.items()}
    starts = [group[0].timestamp for group in sessions.values()]
    if any(start is None for start in starts) and not all(start is None for start in starts):
        raise UsageError(f"{path}: some sessions have a timestamp and others none")
    return [
        TraceSession(
            name,
            [
                TraceCall(
                    row.input_length, row.output_length, row.delay / 1e3,
                    None if row.timestamp is None else row.timestamp / 1e3,
                )
                for row in group
            ],
            None if group[0].timestamp is None else group[0].timestamp / 1e3,
            _pieces(group[0]),
        )
        for name, group in sessions.items()
    ]  # fmt: skip


def _in_time(path: Path, name: str, rows: Sequence[MooncakeRow]) -> list[MooncakeRow]:
    """Return a session's rows by time; in the file's order where some have a delay only."""
    times = [row.timestamp for row in rows if row.timestamp is not None]
    if len(times) == len(rows):
        return sorted(rows, key=lambda row: row.timestamp or 0.0)
    if times != sorted(times):
        raise UsageError(
            f"{path}: session {name!r} goes back in time, and not all of its rows have a timestamp "
            "to sort them by"
        )
    return list(rows)


def _pieces(row: MooncakeRow) -> list[tuple[str, int]]:
    """Return the blocks of a prompt; a shorter one, at its end, has a name with its size."""
    blocks = enumerate(row.hash_ids)
    sizes = [(name, min(row.input_length - at * BLOCK, BLOCK)) for at, name in blocks]
    return [(f"{n}/{size}" if size < BLOCK else str(n), size) for n, size in sizes if size > 0]


class _Open(msgspec.Struct):
    """A session that may go on."""

    last: MooncakeRow
    calls: list[TraceCall]
    shared: list[tuple[str, int]]
    length: int


def _joined(rows: Sequence[MooncakeRow]) -> list[TraceSession]:
    sessions: list[_Open] = []
    introduced: dict[int, int] = {}  # block -> the session that had it first
    for row in rows:
        deepest = next((each for each in reversed(row.hash_ids) if each in introduced), None)
        number = None if deepest is None else introduced[deepest]
        at = (row.timestamp or 0.0) / 1e3
        if number is None or not _goes_on(row, sessions[number], introduced, number):
            number = len(sessions)
            first = TraceCall(row.input_length, row.output_length, at_s=at)
            length = row.input_length + row.output_length
            sessions.append(_Open(row, [first], _pieces(row), length))
        else:
            state = sessions[number]
            gap = at - (state.last.timestamp or 0.0) / 1e3
            new = row.input_length - state.length
            state.calls.append(TraceCall(new, row.output_length, gap, at))
            state.length = row.input_length + row.output_length
            state.last = row
        for each in row.hash_ids:
            introduced.setdefault(each, number)
    return [
        TraceSession(str(number), each.calls, each.calls[0].at_s, each.shared)
        for number, each in enumerate(sessions)
    ]


def _goes_on(row: MooncakeRow, session: _Open, introduced: dict[int, int], number: int) -> bool:
    whole = session.last.hash_ids[: session.last.input_length // BLOCK]
    return (
        bool(whole)
        and introduced[whole[-1]] == number
        and row.hash_ids[: len(whole)] == whole
        and row.input_length > session.length
    )


def burst_sessions(path: Path, rows: Sequence[BurstRow]) -> Found:
    """Return BurstGPT's requests as sessions: by Session ID where there is one, else one each.

    A request's tokens are taken for new ones; failed requests were left out.
    """
    if not rows:
        raise UsageError(f"{path} has no request that was answered")
    sessions: dict[str, list[BurstRow]] = {}
    for number, row in enumerate(sorted(rows, key=lambda row: row.at_s)):
        sessions.setdefault(row.session or f"request {number}", []).append(row)
    found = []
    for name, group in sessions.items():
        calls = []
        for at, row in enumerate(group):
            before = group[at - 1]
            gap = max(row.at_s - before.at_s - before.elapsed_s, 0.0) if at else 0.0
            calls.append(TraceCall(row.prompt, row.output, gap, row.at_s))
        found.append(TraceSession(name, calls, group[0].at_s))
    return found, ("tokens of a request are taken for new ones; requests that failed are left out",)
