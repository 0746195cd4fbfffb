"""One answer as the client saw it arrive."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

__all__ = ["Answer", "Turn", "events"]

_DATA = b"data:"
_DONE = b"[DONE]"


class Turn(msgspec.Struct, frozen=True):
    """One request, answered or failed. Seconds; in an `Outcome`, `start` counts from its clock.

    Attributes
    ----------
    new_tokens, prompt_tokens : int
        What this request added to the session, and all it stands on.
    output_tokens : int
        Generated, as the server counts.
    ttft_s : float
        Until the first token; 0 if none came.
    latency_s : float
        Until the last one.
    itls_s : list of float
        Gaps between tokens; those that arrive together share the gap before them equally.
    error : str or None
        Why it counts as failed.
    kv : dict or None
        `usage.kvbench`, where the server sends it.
    """

    session: int
    turn: int
    start: float
    new_tokens: int
    prompt_tokens: int
    output_tokens: int = 0
    ttft_s: float = 0.0
    latency_s: float = 0.0
    itls_s: list[float] = []
    error: str | None = None
    kv: dict[str, Any] | None = None

    @property
    def end(self) -> float:
        """When the last token arrived."""
        return self.start + self.latency_s


@dataclass
class Answer:
    """What has arrived of an answer; times are the client's clock in seconds.

    Attributes
    ----------
    arrivals : list of (float, int)
        When tokens came, and how many at once; 1 where the server does not say.
    tokens : int
        Generated so far, as the server counts.
    ids : list of int
        The generated ids, where they were asked for.
    end : float
        When the generation was over.
    """

    started: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int | None = None
    ids: list[int] = field(default_factory=list)
    end: float = 0.0
    kv: dict[str, Any] | None = None
    error: str | None = None

    def arrive(self, at: float, count: int = 1) -> None:
        """Note that tokens came."""
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
        """Gaps between tokens."""
        gaps: list[float] = []
        for (before, _), (now, count) in zip(self.arrivals, self.arrivals[1:], strict=False):
            gaps += [(now - before) / count] * count
        return gaps


async def events(parts: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON objects of a server-sent event stream, however it is cut into parts.

    Raises
    ------
    ValueError
        If an event holds anything else.
    """
    rest = b""
    async for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            data = line[len(_DATA) :].strip() if line.startswith(_DATA) else b""
            if data and data != _DONE:
                yield msgspec.json.decode(data, type=dict[str, Any])
