"""Where the evidence of a session went, and whether an answer could still have known it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any

from agentbench_kv.adapters.base import Fact
from agentbench_kv.analysis.audit import Evidence, audit
from agentbench_kv.analysis.traces import Trace
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.errors import UsageError
from agentbench_kv.observe import trace_session
from agentbench_kv.phases.codec import TokenCodec, load_tokenizer
from agentbench_kv.spec import RunSpec

__all__ = ["AuditedFact", "SessionAudit", "audit_session", "by_outcome"]


@dataclass(frozen=True)
class AuditedFact:
    """A fact, the tokens that first stated it, and what became of them.

    Attributes
    ----------
    fact : Fact
    positions : tuple of int
        Logical positions of its tokens where it was first stated.
    tokens : list of Evidence
        One per position.
    """

    fact: Fact
    positions: tuple[int, ...]
    tokens: list[Evidence]

    @property
    def held(self) -> float:
        """Share of (layer, head, token)s that held it at the session's end; 0 if never stated."""
        if not self.tokens:
            return 0.0
        return fmean(token.held / token.heads if token.heads else 1.0 for token in self.tokens)

    @property
    def first_eviction(self) -> int | None:
        """Tokens ever seen when the first of it was evicted."""
        moments = [e.logical for token in self.tokens for e in token.evictions]
        return min(moments, default=None)

    @property
    def rank_over_places(self) -> float | None:
        """Mean of rank / places over its evictions: 1 is the last token that was kept."""
        ratios = [
            rank / max(1, place)
            for token in self.tokens
            for event in token.evictions
            for rank, place in zip(event.ranks.tolist(), event.places.tolist(), strict=True)
        ]
        return fmean(ratios) if ratios else None

    def document(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "text": self.fact.text,
            "source": self.fact.source,
            "kind": self.fact.kind,
            "right": self.fact.right,
            "positions": list(self.positions),
            "held": self.held,
            "first_eviction": self.first_eviction,
            "rank_over_places": self.rank_over_places,
        }


@dataclass(frozen=True)
class SessionAudit:
    """One session, played again."""

    sample: str
    score: float | None
    events: int
    facts: list[AuditedFact]


def audit_session(spec: RunSpec, sample: str) -> tuple[SessionAudit, Trace]:
    """Play a session again and follow the tokens of every fact it needed.

    Parameters
    ----------
    spec : RunSpec
        Of a greedy run, which therefore repeats.
    sample : str
        Id or number.

    Raises
    ------
    UsageError
        If sampling is not greedy, or the task does not say what its answers need.
    """
    if spec.temperature:
        raise UsageError("an audit plays sessions again, so it needs a greedy run: --temperature 0")
    trace, log, watched = trace_session(spec, sample)
    facts = watched.played.outcome.facts
    if not facts:
        raise UsageError(f"task {spec.task} does not say what its answers need; audit a micro task")
    codec = TokenCodec(load_tokenizer(model_path(spec.model)))
    pieces = [codec.decode([token]) for token in log.tokens]
    audited = [_audited(fact, pieces, trace) for fact in facts]
    score = watched.played.outcome.score
    return SessionAudit(watched.sample.id, score, len(trace.events), audited), trace


def by_outcome(audits: Sequence[SessionAudit]) -> dict[tuple[str, str, bool], dict[str, float]]:
    """Average over facts of one source, kind and outcome: how many, held, rank over places."""
    groups: dict[tuple[str, str, bool], list[AuditedFact]] = {}
    for session in audits:
        for found in session.facts:
            key = (found.fact.source, found.fact.kind, found.fact.right)
            groups.setdefault(key, []).append(found)
    return {key: _average(group) for key, group in sorted(groups.items())}


def _average(group: Sequence[AuditedFact]) -> dict[str, float]:
    ranks = [r for r in (found.rank_over_places for found in group) if r is not None]
    return {
        "facts": len(group),
        "held": fmean(found.held for found in group),
        "rank_over_places": fmean(ranks) if ranks else float("nan"),
    }


def _audited(fact: Fact, pieces: Sequence[str], trace: Trace) -> AuditedFact:
    positions = find_text(pieces, fact.text)
    return AuditedFact(fact, positions, audit(trace.events, positions))


def find_text(pieces: Sequence[str], text: str) -> tuple[int, ...]:
    """Return which tokens hold the first occurrence of a text; none if it never occurs.

    Parameters
    ----------
    pieces : sequence of str
        Text of every token.
    text : str
    """
    start = "".join(pieces).find(text)
    if start < 0:
        return ()
    ends = list(accumulate(map(len, pieces)))
    first = bisect_right(ends, start)
    last = bisect_right(ends, start + len(text) - 1)
    return tuple(range(first, last + 1))
