"""What a turn and a session cost: the figures of `usage.kvbench` and of the run's records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from agentbench_kv.engines.accounting import merge_stats, stats_dict
from agentbench_kv.engines.base import FinishReason, KVStats, Phase

__all__ = ["SessionReport", "TurnInfo", "count_phases", "kvbench_usage", "merge_stats"]

_NOT_RECORDED = frozenset({"cached_tokens", "finish_reason", "reset", "cost"})


@dataclass(frozen=True)
class TurnInfo:
    """Figures of one turn. Token counts are per (layer, KV head), bytes are totals.

    Attributes
    ----------
    turn : int
        Index of the request in its session, from 0.
    prompt_tokens, output_tokens, cached_tokens : int
        Logical tokens before the generation, generated, and those of the prompt that were in the
        session before the request.
    phases : dict
        Tokens this turn added, prompt and output, by phase name.
    live_before, live_after : int
        Live tokens before the prompt was added and after the last token.
    reset : bool
        The request did not extend the token log, so the session started over.
    cost : float or None
        What the turn was billed, at the prices the user gave; None without prices.
    """

    turn: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    phases: dict[str, int]
    live_before: int
    live_after: int
    events: int
    evicted: int
    restored: int
    prefill_tokens: int
    kv_bytes_read: int
    ttft_ms: float | None
    tpot_ms: float | None
    finish_reason: str
    reset: bool
    cost: float | None = None

    def record(self) -> dict[str, Any]:
        """Return the fields of `results.records.TurnRecord`, sample and trial aside."""
        names = (field.name for field in fields(self) if field.name not in _NOT_RECORDED)
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class SessionReport:
    """A session's accounting so far, carried over resets.

    Attributes
    ----------
    stats : KVStats
        Sums over the whole session; `logical` and `live` are those of now.
    prompt_sha : str or None
        sha256 of the ids of the first rendered prompt.
    outputs : tuple of tuple of int
        The ids that every generation gave.
    """

    session: str
    turns: tuple[TurnInfo, ...]
    resets: int
    prompt_sha: str | None
    stats: KVStats
    outputs: tuple[tuple[int, ...], ...] = ()

    @property
    def usage(self) -> dict[str, int]:
        """Prompt and completion tokens and requests, as an API client would be billed."""
        return {
            "prompt_tokens": sum(turn.prompt_tokens for turn in self.turns),
            "completion_tokens": sum(turn.output_tokens for turn in self.turns),
            "requests": len(self.turns),
        }

    @property
    def cost(self) -> float | None:
        """What the session was billed so far; None if no turn has a price."""
        known = [turn.cost for turn in self.turns if turn.cost is not None]
        return sum(known) if known else None

    @property
    def endpoint_failed(self) -> bool:
        """Whether the last request got no usable answer, through no fault of the agent."""
        return bool(self.turns) and self.turns[-1].finish_reason == FinishReason.ENDPOINT_ERROR

    @property
    def at_context_limit(self) -> bool:
        """Whether the last request ended at the model's last position, or would have passed it."""
        return bool(self.turns) and self.turns[-1].finish_reason == FinishReason.CONTEXT_LIMIT

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON object: the last turn's accounting, usage and prompt hash."""
        totals = stats_dict(self.stats)
        head = {"session": self.session, "turns": len(self.turns)}
        tail = {"session_resets": self.resets, "prompt_sha": self.prompt_sha, "usage": self.usage}
        return {**head, **totals, **tail}


def count_phases(phases: Iterable[Phase]) -> dict[str, int]:
    """Return how many tokens each phase has, all four named."""
    counts = Counter(phases)
    return {phase.name.lower(): counts[phase] for phase in Phase}


def _spans(stats: KVStats, turn: TurnInfo) -> dict[str, Any]:
    """Return what a span-level method did, under the words of its kind; nothing for others."""
    if not stats.figures:
        return {}
    totals = {"resident": stats.live, "recovered": stats.restored}
    return {**totals, "turn_recovered": turn.restored, "spans": stats.figures}


def kvbench_usage(report: SessionReport, turn: TurnInfo) -> dict[str, Any]:
    """Return `usage.kvbench`: the session's totals, then this turn's own figures."""
    return {
        "session": report.session,
        "turn": turn.turn,
        **stats_dict(report.stats),
        **_spans(report.stats, turn),
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
        "prompt_sha": report.prompt_sha,
    }
