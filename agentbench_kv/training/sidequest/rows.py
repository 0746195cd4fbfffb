"""Training rows, and the file that holds them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from agentbench_kv.errors import UsageError
from agentbench_kv.results.files import write_atomic

Kind = Literal["main", "auxiliary"]
HELD_OUT = 10  # one session in so many is not trained on


class SideQuestRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One sequence; `ids`, `positions` and `learnt` are of equal length.

    A `main` row is a whole trace, whose answers are learnt from the base model's distribution; an
    `auxiliary` row is a session at a moment, without what had left by then (positions keep their
    gaps), the question, and the answer that is learnt.
    """

    kind: Kind
    sample: str
    ids: list[int]
    positions: list[int]  # logical, as the engine counts
    learnt: list[bool]  # which of the ids are to be predicted
    open: list[int] = []  # cursors, of an auxiliary row
    expired: list[int] = []

    @property
    def held_out(self) -> bool:
        """Whether the row's session is one of those that are not trained on."""
        return int(hashlib.sha256(self.sample.encode()).hexdigest()[:8], 16) % HELD_OUT == 0


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
        if not len(row.ids) == len(row.positions) == len(row.learnt):
            raise UsageError(f"{path} holds a row of unequal lengths; make it anew")
    return rows


def rows_sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def count_rows(rows: Sequence[SideQuestRow]) -> dict[str, int]:
    """Return what the data card says of rows."""
    main = [row for row in rows if row.kind == "main"]
    asked = [row for row in rows if row.kind == "auxiliary"]
    return {
        "sessions": len({row.sample for row in rows}),
        "held_out_sessions": len({row.sample for row in rows if row.held_out}),
        "main_rows": len(main),
        "auxiliary_rows": len(asked),
        "open_cursors": sum(len(row.open) for row in asked),
        "expired_cursors": sum(len(row.expired) for row in asked),
        "tokens": sum(len(row.ids) for row in rows),
        "longest_row": max((len(row.ids) for row in rows), default=0),
    }
