"""What to send: shapes, sessions, loads; plain data that travels to the client's process.

One answer as the client saw it arrive.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

import msgspec

from agentbench_kv.errors import UsageError

K = 1024  # tokens in the `k` of a shape, as in the papers' `16k/1k`


_SHAPE = re.compile(r"(\d+)(k?)/(\d+)(k?)", re.IGNORECASE)


class Shape(msgspec.Struct, frozen=True):
    """Tokens of a session's first prompt, and tokens generated in every turn."""

    prompt: int
    output: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `16k/1k` (16,384 and 1,024) or `2000/128`."""
        match = _SHAPE.fullmatch(text.strip())
        if match:
            prompt, output = (
                int(number) * (K if unit else 1)
                for number, unit in ((match[1], match[2]), (match[3], match[4]))
            )
            if prompt and output:
                return cls(prompt, output)
        raise UsageError(
            f"--shape {text!r}: expected prompt/generated tokens, e.g. 16k/1k or 2000/128"
        )

    @property
    def label(self) -> str:
        """The shortest spelling that `parse` reads back."""
        return "/".join(
            f"{size // K}k" if size % K == 0 else str(size) for size in (self.prompt, self.output)
        )


class Workload(msgspec.Struct, frozen=True):
    """What one session does."""

    shape: Shape
    turns: int = 1  # requests of a session; each generates `shape.output` tokens
    tool_tokens: int = 256  # new tokens of every turn but the first: what the tool said
    think_time_s: float = 0.0  # between the end of an answer and the next request

    @property
    def length(self) -> int:
        """Tokens of a whole session."""
        later = self.turns - 1
        return self.shape.prompt + self.turns * self.shape.output + later * self.tool_tokens


class Load(msgspec.Struct, frozen=True):
    """How many sessions, and when they begin. One of `concurrency` and `rate` is given."""

    sessions: int  # that are measured
    concurrency: int | None = None  # closed loop: sessions at once; as one ends the next begins
    rate: float | None = None  # open loop: sessions that begin per second, on average
    warmup: int = 2  # sessions played before the clock starts

    @property
    def label(self) -> str:
        """E.g. `c8` or `2/s`."""
        return f"c{self.concurrency}" if self.concurrency else f"{self.rate:g}/s"

    @property
    def at_once(self) -> int:
        """Most sessions that can be open at the same time."""
        return min(self.concurrency or self.sessions, max(self.sessions, self.warmup))


class Target(msgspec.Struct, frozen=True):
    """A server."""

    base: str  # URL without the `/v1`
    wire: str  # what it understands: a name in `loadgen.wires.WIRES`
    model: str  # name to ask for


class Frames(msgspec.Struct, frozen=True):
    """Token ids of the markers around an agent's messages, in the model's own chat format."""

    user: list[int]  # before a user's message
    end_user: list[int]
    assistant: list[int]  # before a thought
    call: list[int]  # between a thought and its call
    tool: list[int]  # between a call and the tool's answer
    end_tool: list[int]

    @property
    def around_call(self) -> int:
        """Markers of a call and the tool's answer."""
        return len(self.call) + len(self.tool) + len(self.end_tool)


class Vocabulary(msgspec.Struct, frozen=True):
    """Ids to draw from: below `size`, without the `special` ones; `frames` of a known format."""

    size: int
    special: list[int] = []
    frames: Frames | None = None


class Job(msgspec.Struct, frozen=True):
    """One measurement."""

    target: Target
    workload: Workload
    load: Load
    vocabulary: Vocabulary
    seed: int = 0  # of prompts and arrivals; the same seed sends the same to every server
    timeout_s: float = 1800.0  # longest wait for one answer, whole


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
