"""One answer as the client saw it arrive."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

_DATA = b"data:"
_DONE = b"[DONE]"


class Turn(msgspec.Struct, frozen=True):
    """One request, answered or failed. Times are in seconds."""

    session: int
    turn: int
    start: float  # in an `Outcome` it counts from the first session's beginning
    new_tokens: int  # what this request added to the session
    prompt_tokens: int  # with all that came before
    output_tokens: int = 0  # generated, as the server counts
    ttft_s: float = 0.0  # until the first token; 0 if none came
    latency_s: float = 0.0  # until the last one
    itls_s: list[float] = []  # gaps between tokens, see `Answer.itls_s`
    error: str | None = None  # why it counts as failed
    kv: dict[str, Any] | None = None  # `usage.kvbench`, where the server sends it

    @property
    def end(self) -> float:
        """When the last token arrived."""
        return self.start + self.latency_s


@dataclass
class Answer:
    """What has arrived of an answer; times are the client's clock in seconds."""

    started: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # when, and how many tokens
    tokens: int = 0  # generated so far, as the server counts
    prompt_tokens: int | None = None
    ids: list[int] = field(default_factory=list)  # generated, where they were asked for
    end: float = 0.0  # when the generation was over
    kv: dict[str, Any] | None = None
    error: str | None = None

    def arrive(self, at: float, count: int = 1) -> None:
        """Note that tokens came; one where the server does not say how many."""
        self.arrivals.append((at, count))
        self.end = at

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token; where none had a text, to the end."""
        first = self.arrivals[0][0] if self.arrivals else self.end
        return max(first - self.started, 0.0)

    @property
    def latency_s(self) -> float:
        """Seconds to the last token."""
        return max(self.end - self.started, 0.0)

    @property
    def itls_s(self) -> list[float]:
        """Gaps between tokens; those that arrive together share the gap before them equally."""
        gaps: list[float] = []
        for (before, _), (now, count) in pairwise(self.arrivals):
            gaps += [(now - before) / count] * count
        return gaps


async def events(parts: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON objects of a server-sent event stream, however it is cut into parts.

    An event that holds anything else is a `ValueError`.
    """
    rest = b""
    async for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            data = line[len(_DATA) :].strip() if line.startswith(_DATA) else b""
            if data and data != _DONE:
                yield msgspec.json.decode(data, type=dict[str, Any])
