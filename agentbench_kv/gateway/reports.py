"""The figures of a turn and of its session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from agentbench_kv.engines.base import FinishReason, KVStats
from agentbench_kv.methods.base import Phase

_NOT_RECORDED = frozenset(
    {"cached_tokens", "finish_reason", "reset", "cost", "unparsable", "unread_syntax"}
)


@dataclass(frozen=True, kw_only=True)
class TurnInfo:
    """Figures of one turn. Token counts are per (layer, KV head), bytes are totals."""

    turn: int  # index of the request in its session, from 0
    prompt_tokens: int  # logical, before the generation
    output_tokens: int
    cached_tokens: int  # of the prompt, that nobody had to compute
    phases: dict[str, int] = field(default_factory=dict)  # tokens this turn added, by phase name
    live_before: int  # before the prompt was added
    live_after: int  # after the last token
    events: int = 0
    evicted: int = 0
    restored: int = 0
    prefill_tokens: int
    kv_bytes_read: int = 0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    finish_reason: str
    reset: bool  # the request did not extend the token log, so the session started over
    cost: float | None = None  # at the prices the user gave; None without prices
    unparsable: bool = False  # a call's marker was not followed by a call
    unread_syntax: str = ""  # the tool syntax of calls that the session's own does not read

    def record(self) -> dict[str, Any]:
        """Return the fields of `results.records.TurnRecord`, without sample and trial."""
        return {name: value for name, value in asdict(self).items() if name not in _NOT_RECORDED}


@dataclass(frozen=True)
class SessionReport:
    """A session's accounting so far, carried over resets."""

    session: str
    turns: tuple[TurnInfo, ...]
    resets: int
    prompt_sha: str | None  # sha256 of the ids of the first rendered prompt
    stats: KVStats  # sums over the whole session; `logical` and `live` are the current ones
    outputs: tuple[tuple[int, ...], ...] = ()  # the ids of every generation
    expired: bool = False  # nobody asked for too long, and the session was closed
    note: str = ""  # what the client should be told with this answer
    cost_beside: float | None = None  # of requests that its method made by itself

    @property
    def usage(self) -> dict[str, int]:
        """Prompt and completion tokens and requests of the client, as an API would bill them.

        What a method asks by itself is in `stats.auxiliary_tokens`.
        """
        return {
            "prompt_tokens": sum(turn.prompt_tokens for turn in self.turns),
            "completion_tokens": sum(turn.output_tokens for turn in self.turns),
            "requests": len(self.turns),
        }

    @property
    def cost(self) -> float | None:
        """What the session was billed so far; None if no request has a price."""
        each = [*(turn.cost for turn in self.turns), self.cost_beside]
        known = [cost for cost in each if cost is not None]
        return sum(known) if known else None

    @property
    def endpoint_failed(self) -> bool:
        """Whether the last request got no usable answer, through no fault of the agent."""
        return self._ended_by(FinishReason.ENDPOINT_ERROR)

    @property
    def at_context_limit(self) -> bool:
        """Whether the last request ended at the model's last position, or would have passed it."""
        return self._ended_by(FinishReason.CONTEXT_LIMIT)

    def as_dict(self) -> dict[str, Any]:
        return {
            "session": self.session,
            "turns": len(self.turns),
            **self.stats.as_dict(),
            "session_resets": self.resets,
            "prompt_sha": self.prompt_sha,
            "usage": self.usage,
        }

    def _ended_by(self, reason: FinishReason) -> bool:
        return bool(self.turns) and self.turns[-1].finish_reason == reason


@dataclass(frozen=True)
class Spent:
    """What an answer took."""

    prefill_tokens: int
    live_tokens: int  # in the cache when it was written
    # From the request to the first token, a memory's search included; None if unknown.
    ttft_ms: float | None
    output_tokens: int = 0
    tpot_ms: float | None = None


def count_phases(phases: Iterable[Phase]) -> dict[str, int]:
    """Return how many tokens each phase has, all four named."""
    counts = Counter(phases)
    return {phase.name.lower(): counts[phase] for phase in Phase}


def kvbench_usage(report: SessionReport, turn: TurnInfo) -> dict[str, Any]:
    """Return `usage.kvbench`: the session's totals, then this turn's own figures."""
    stats = report.stats
    spans: dict[str, Any] = {}
    if stats.figures:  # a span-level method ran
        spans = {"resident": stats.live, "recovered": stats.restored}
        spans |= {"turn_recovered": turn.restored, "spans": stats.figures}
    return {
        "session": report.session,
        "turn": turn.turn,
        **stats.as_dict(),
        **spans,
        "session_resets": report.resets,
        "phases": turn.phases,
        "live_before": turn.live_before,
        "live_after": turn.live_after,
        "turn_events": turn.events,
        "turn_evicted": turn.evicted,
        "turn_restored": turn.restored,
        "turn_prefill_tokens": turn.prefill_tokens,
        "turn_bytes_read": turn.kv_bytes_read,
        "ttft_ms": turn.ttft_ms,
        "tpot_ms": turn.tpot_ms,
        "reset": turn.reset,
        "finish_reason": turn.finish_reason,
        **({"unparsable": True} if turn.unparsable else {}),
        **({"unread_syntax": turn.unread_syntax} if turn.unread_syntax else {}),
        "prompt_sha": report.prompt_sha,
        **({"note": report.note} if report.note else {}),
    }
