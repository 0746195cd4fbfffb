"""What to send: shapes, sessions, loads. Plain data that travels to the client's process."""

from __future__ import annotations

import re
from typing import Self

import msgspec

from agentbench_kv.errors import UsageError

K = 1024  # tokens in the `k` of a shape, as in the papers' `16k/1k`
_SHAPE = re.compile(r"(\d+)(k?)/(\d+)(k?)", re.IGNORECASE)


class SessionShape(msgspec.Struct, frozen=True):
    """Tokens of a session's first prompt, and tokens generated in every turn."""

    prompt: int
    output: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `16k/1k` (16,384 and 1,024) or `2000/128`."""
        if match := _SHAPE.fullmatch(text.strip()):
            sides = match.group(1, 2), match.group(3, 4)
            shape = cls(*(int(size) * (K if unit else 1) for size, unit in sides))
            if shape.prompt and shape.output:
                return shape
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

    shape: SessionShape
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
    wire: str  # what it understands: a name in `endpoints.ENDPOINTS`
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


class LoadJob(msgspec.Struct, frozen=True):
    """One measurement."""

    target: Target
    workload: Workload
    load: Load
    vocabulary: Vocabulary
    seed: int = 0  # of prompts and arrivals; the same seed sends the same to every server
    timeout_s: float = 1800.0  # longest wait for one answer, whole
