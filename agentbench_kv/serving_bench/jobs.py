"""What to send: shapes, sessions, loads. Plain data that travels to the client's process."""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import takewhile
from typing import Annotated, Self

import msgspec
from msgspec import Meta

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


_Count = Annotated[int, Meta(ge=1, le=10_000_000)]
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]
# A named piece of text with its tokens: pieces of one name are the same tokens everywhere.
Piece = tuple[str, _Count]


class TraceCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request of a session. Times are in seconds."""

    new_tokens: _Count  # of the prompt, beyond what the session holds
    output_tokens: _Count
    gap_s: _Seconds = 0.0  # tool time: from the end of the answer before until this is sent
    at_s: _Seconds | None = None  # when it was sent, on the trace's clock, where that is known
    # The history comes in other words (summarised, cleared, another server): nothing of it but the
    # session's shared pieces can be in a prefix cache.
    fresh: bool = False
    ids: list[int] = []  # the new tokens themselves, where they are known
    # A method dropped messages before this call: so many tokens of the history stay, and what is
    # left behind them is read `again`. The ids are of those, too.
    keep: Annotated[int, Meta(ge=0)] | None = None
    again: Annotated[int, Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        if self.ids and len(self.ids) != self.again + self.new_tokens:
            raise ValueError(f"{len(self.ids)} ids for {self.again + self.new_tokens} new tokens")
        if self.ids and self.fresh:
            raise ValueError("a fresh call has no ids of its own")
        if (self.keep is not None or self.again) and not self.ids:
            raise ValueError("what is read again of a history that was shortened needs ids")
        if self.again and self.keep is None:
            raise ValueError("nothing is read again where the whole history stays")


class TraceSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One session: its calls, one after the other. A line of a trace file."""

    id: str
    calls: Annotated[list[TraceCall], Meta(min_length=1)]
    start_s: _Seconds | None = None  # when it begins, on the trace's clock, where that is known
    shared: list[Piece] = []  # what its first prompt begins with

    def __post_init__(self) -> None:
        if self.calls[0].fresh:
            raise ValueError("the first call of a session is always fresh, and not called so")
        if self.shared_tokens > self.calls[0].new_tokens:
            raise ValueError("shared pieces are longer than the first prompt")
        if self.shared and self.calls[0].ids:
            raise ValueError("a first prompt has shared pieces or ids, not both")
        times = [call.at_s for call in self.calls if call.at_s is not None]
        if times != sorted(times):
            raise ValueError("at_s of a call is before that of one before it")

    @property
    def shared_tokens(self) -> int:
        return sum(tokens for _, tokens in self.shared)

    @property
    def length(self) -> int:
        """Most tokens that the session has at once."""
        ends = zip(self.prompts, self.calls, strict=True)
        return max(prompt + call.output_tokens for prompt, call in ends)

    @property
    def prompts(self) -> list[int]:
        """Tokens of every call's prompt, history included."""
        held, found = 0, []
        for call in self.calls:
            held = held if call.keep is None else call.keep
            found.append(held + call.again + call.new_tokens)
            held = found[-1] + call.output_tokens
        return found


def prefix_hits(sessions: Sequence[TraceSession]) -> int:
    """Return the prompt tokens that an endless prefix cache would hold: an upper bound.

    A call finds its session's history, and a session what it has in common with one before it:
    shared pieces or the beginning of its recorded prompts, later ones as if the answers before
    them were alike, too.
    """
    known: list[list[Piece]] = []
    hits = 0
    for session in sessions:
        pieces = session.shared or _recorded(session)
        at = bisect_left(known, pieces)
        # In sorted order, nobody has more in common with it than a neighbour.
        hits += max((_common(pieces, other) for other in known[max(at - 1, 0) : at + 1]), default=0)
        insort(known, pieces)
        for call, prompt in zip(session.calls[1:], session.prompts[1:], strict=True):
            known_of = prompt - call.again - call.new_tokens
            hits += session.shared_tokens if call.fresh else known_of
    return hits


def _recorded(session: TraceSession) -> list[Piece]:
    """Return the tokens that a session's calls add, one after the other, while they are known."""
    calls = takewhile(lambda call: call.ids and call.keep is None, session.calls)
    # Answers are not known: a piece without tokens stands for one.
    return [piece for call in calls for piece in [*((str(each), 1) for each in call.ids), ("", 0)]]


def _common(one: Sequence[Piece], other: Sequence[Piece]) -> int:
    tokens = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        tokens += mine[1]
    return tokens


class Workload(msgspec.Struct, frozen=True):
    """Sessions that are all alike."""

    shape: SessionShape
    turns: int = 1  # requests of a session; each generates `shape.output` tokens
    tool_tokens: int = 256  # new tokens of every turn but the first: what the tool said
    think_time_s: float = 0.0  # between the end of an answer and the next request

    @property
    def label(self) -> str:
        return self.shape.label

    def sessions(self, count: int) -> list[TraceSession]:
        later = TraceCall(self.tool_tokens, self.shape.output, self.think_time_s)
        calls = [TraceCall(self.shape.prompt, self.shape.output), *[later] * (self.turns - 1)]
        return [TraceSession(str(number), calls) for number in range(count)]


class Load(msgspec.Struct, frozen=True):
    """How many sessions, and when they begin: by `concurrency`, by `rate`, or as the trace says."""

    sessions: int  # that are measured
    concurrency: int | None = None  # closed loop: sessions at once; as one ends the next begins
    rate: float | None = None  # open loop: sessions that begin per second, on average
    warmup: int = 2  # sessions played before the clock starts

    @property
    def fixed_schedule(self) -> bool:
        """Whether sessions begin, and calls are sent, when the trace says."""
        return self.concurrency is None and self.rate is None

    @property
    def label(self) -> str:
        """E.g. `c8`, `2/s` or `schedule`."""
        if self.fixed_schedule:
            return "schedule"
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
    drops: bool = False  # it takes a history without what was dropped: `TraceCall.keep`


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
    sessions: list[TraceSession]  # `load.sessions` of them
    load: Load
    vocabulary: Vocabulary
    seed: int = 0  # of prompts; the same seed sends the same to every server
    arrivals: int = 0  # seed of when sessions begin, where `load.rate` says how many do
    timeout_s: float = 1800.0  # longest wait for one answer, whole
    time_scale: float = 1.0  # gaps and the trace's clock are as many times as long
    goodput: dict[str, float] = {}  # ms that a good request stays within: ttft, tpot, e2el
