"""A few transcripts of a run as plain text, whatever an adapter or a model put in them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentbench_kv.results.reader import RunReader
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.site.text import visible
from agentbench_kv.results.transcripts import Segment, segments

MOST_MESSAGES = 60
MOST_CHARACTERS = 12_000
_PER_PART = 1500
_NAMES = {"think": "thinks", "act": "calls", "tool": "", "others": ""}


@dataclass(frozen=True)
class Message:
    """One message: who speaks, and (what it is, text) for each of its parts."""

    role: str
    parts: list[tuple[str, str]]


@dataclass(frozen=True)
class Transcript:
    """A trial's messages as far as they are shown, or the problem why there are none."""

    record: TrialRecord
    messages: list[Message]
    left_out: int = 0
    problem: str | None = None


def transcripts(path: Path, trials: Sequence[TrialRecord], most: int = 2) -> list[Transcript]:
    """Read the transcripts of the trials worth looking at: failed ones first, then low scores."""
    having = [record for record in trials if record.transcript is not None]
    chosen = sorted(having, key=lambda r: (r.score is not None, r.score or 0.0))[:most]
    return [_read(RunReader(path), record) for record in chosen]


def _read(run: RunReader, record: TrialRecord) -> Transcript:
    try:
        data = run.transcript(record)
    except (ValueError, OSError, RecursionError) as error:
        return Transcript(record, [], problem=f"not readable: {visible(error)}")
    if data is None:
        return Transcript(record, [], problem="the file is gone")
    listed = data.get("transcript") if isinstance(data, dict) else data
    messages = listed if isinstance(listed, list) else [data]
    shown = list(_within_limits(messages))
    return Transcript(record, shown, left_out=len(messages) - len(shown))


def _within_limits(messages: Sequence[Any]) -> Iterator[Message]:
    left = MOST_CHARACTERS
    for data in messages[:MOST_MESSAGES]:
        message = _message(data)
        left -= sum(len(text) for _, text in message.parts)
        yield message
        if left <= 0:
            return


def _message(data: Any) -> Message:
    role = data.get("role", "data") if isinstance(data, dict) else "data"
    found = segments(data) or [Segment("others", json.dumps(data, ensure_ascii=False))]
    parts = [(_NAMES[phase], visible(text, _PER_PART)) for phase, text in found]
    return Message(visible(role, 40), parts)
