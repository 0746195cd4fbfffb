"""Training rows, and the file that holds them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from agentbench_kv.adapters.probe.questions import session_of
from agentbench_kv.errors import UsageError
from agentbench_kv.results.files import write_atomic

HELD_OUT = 10  # one session in so many is not trained on


class SideQuestFork(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question beside a session, and the answer that is learnt."""

    at: int  # how much of the session stands before it
    ids: list[int]  # the question's, then the answer's
    answer: int  # where the answer begins
    open: list[int]  # cursors
    expired: list[int]  # those that nothing uses from then on
    told: list[int]  # the expired ones that can be told by then: what the answer names


class SideQuestRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A right trace as the method plays it, with its questions."""

    sample: str
    ids: list[int]
    answered: list[bool]  # which of the ids the model wrote
    left: list[tuple[int, int, int]]  # begin and end of what left, and how long the session was
    forks: list[SideQuestFork]
    task: str = ""  # that the sample is of; empty in rows from before it was kept

    @property
    def held_out(self) -> bool:
        return held_out(self.sample)

    @property
    def tokens(self) -> int:
        return len(self.ids) + sum(len(fork.ids) for fork in self.forks)


def held_out(sample: str) -> bool:
    """Return whether a sample's session is one of those that are not trained on."""
    return int(hashlib.sha256(session_of(sample).encode()).hexdigest()[:8], 16) % HELD_OUT == 0


def write_rows(path: Path, rows: Iterable[SideQuestRow]) -> None:
    """Write rows, one JSON object a line, whole or not at all."""
    encoder = msgspec.json.Encoder()
    write_atomic(path, b"".join(encoder.encode(row) + b"\n" for row in rows))


def read_rows(path: Path) -> list[SideQuestRow]:
    """Read rows; UsageError for a file that holds none."""
    decoder = msgspec.json.Decoder(SideQuestRow)
    try:
        rows = [decoder.decode(line) for line in path.read_bytes().splitlines() if line]
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{path} holds no training rows: {error}; make it anew") from error
    for row in rows:
        forks = all(f.at <= len(row.ids) and 0 < f.answer < len(f.ids) for f in row.forks)
        if len(row.ids) != len(row.answered) or not forks:
            raise UsageError(f"{path} holds a row of unequal lengths; make it anew")
    return rows


def rows_sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def count_rows(rows: Sequence[SideQuestRow]) -> dict[str, int]:
    """Return what the data card says of rows."""
    asked = [fork for row in rows for fork in row.forks]
    return {
        "sessions": len(rows),
        "held_out_sessions": sum(row.held_out for row in rows),
        "questions": len(asked),
        "open_cursors": sum(len(fork.open) for fork in asked),
        "expired_cursors": sum(len(fork.expired) for fork in asked),
        "told_cursors": sum(len(fork.told) for fork in asked),
        "tokens": sum(row.tokens for row in rows),
        "longest_row": max((row.tokens for row in rows), default=0),
    }
