"""The base of span-level methods: whole spans of tokens leave the cache and may come back.

The spans themselves, and what manages one session, are in `methods.spans`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import LayerView, Method, Queries, QueryKind, QueryPlan, Selection
from agentbench_kv.methods.spans import SpanCache, SpanSession


class SpanSessions(Protocol):
    """All sessions of one engine under a span-level method, and what they share."""

    def open(self, cache: SpanCache) -> SpanSession:
        """Return what manages a new session."""

    def close(self) -> None:
        """Let go of what the sessions share, such as a host store."""


@dataclass(frozen=True, kw_only=True)
class Resident(Method):
    """What an engine runs below a span-level method: it keeps all rows until it is told."""

    name: ClassVar[str] = "resident"
    compresses: ClassVar[bool] = False

    recent_queries: int = 0

    def query_plan(self) -> QueryPlan:
        if not self.recent_queries:
            return QueryPlan()
        return QueryPlan(QueryKind.RECENT, self.recent_queries)


@dataclass(frozen=True, kw_only=True)
class SpanMethod(Method):
    """Base of span-level methods. Subclasses are frozen keyword-only dataclasses."""

    spans: ClassVar[bool] = True

    # Fields of the base that mean nothing here: no `param`, so `--set` does not take them.
    interval: int = 128
    trigger: str = "turn"
    kept_set: str = "shared"
    keep_recent: int = 0

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"evict_spans"})

    def below(self) -> Method:
        """Return the method that the engine itself runs."""
        return Resident()

    def sessions(self) -> SpanSessions:
        """Return what opens the sessions of one engine."""
        raise NotImplementedError(f"{type(self).__name__} does not implement sessions")

    def select(
        self,
        layers: Sequence[LayerView],
        queries: Sequence[Queries],
        now: int,
        prompt: int = 0,
        phases: Tensor | None = None,
    ) -> Selection:
        del layers, queries, now, prompt, phases
        raise UsageError(f"method {self.label!r} works on spans of a session, not on cache rows")
