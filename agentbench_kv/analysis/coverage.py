"""Utility coverage: how much of the future's attention a kept set would have got (AgentKV, app. C).

At an event, the utility of a token under a KV head is the attention all later queries of the
full-attention trajectory pay it, mean over the group: `U_i = Σ_{j > now} softmax(q_j·K_{≤j}/√d)_i`.
A strategy's coverage of a phase is the share of that phase's utility that its kept tokens hold.
Every event starts from the full cache; nothing was evicted before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from agentbench_kv.analysis.angles import check_same_shape, listed
from agentbench_kv.analysis.captures import Capture
from agentbench_kv.analysis.replay import (
    MethodInput,
    attention_sums,
    event_points,
    input_at,
    kept_queries,
)
from agentbench_kv.errors import UsageError
from agentbench_kv.kernels import attention_mass
from agentbench_kv.methods.agentkv import SAMPLERS, AgentKV
from agentbench_kv.methods.base import (
    PHASE_NAMES,
    Method,
    Phase,
    Queries,
    QueryKind,
    QueryPlan,
    ScoreContext,
)
from agentbench_kv.methods.oracle import Oracle
from agentbench_kv.params import param

ORACLE = "oracle"
OVERALL = "overall"


@dataclass(frozen=True, kw_only=True)
class RecentQueries(Method):
    """The diagnostic's recency baseline: AgentKV's score from the last queries of any phase."""

    name: ClassVar[str] = "recent"
    ordered: ClassVar[bool] = False

    representatives: int = param(24, "queries kept", low=1)

    def query_plan(self) -> QueryPlan:
        return QueryPlan(QueryKind.RECENT, self.representatives)

    def score(self, queries: Queries, keys: Tensor, context: ScoreContext) -> Tensor:  # noqa: ARG002
        return attention_mass(queries.vectors, keys)


@dataclass(frozen=True)
class CoverageRow:
    """Coverage of one phase, or overall, by one strategy at one budget."""

    # `recent`, `phase` (AgentKV with its default sampler), a sampler's name, or `oracle`.
    strategy: str
    representatives: int | None
    budget: int
    phase: str
    # Share of the phase's utility in [0, 1]: mean over (layer, KV head)s, then over events. None if
    # no event has the phase.
    coverage: float | None
    relative: float | None  # to the oracle's coverage; can be above 1 for a single phase
    events: int  # those with tokens of the phase


@dataclass(frozen=True)
class Coverage:
    """All rows, and how many events they are over."""

    rows: list[CoverageRow]
    events: dict[int, int]  # by budget
    interval: int

    def document(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "analysis": "coverage",
            "interval": self.interval,
            "events": {str(budget): count for budget, count in self.events.items()},
            "rows": [asdict(row) for row in self.rows],
        }


def _strategies(
    budget: int, recent: Sequence[int], representatives: int, interval: int
) -> dict[tuple[str, int | None], Method]:
    """Return what is compared at a budget, by name and number of representatives."""
    share = {"interval": interval}
    chosen: dict[tuple[str, int | None], Method] = {
        ("recent", q): RecentQueries.create("", budget, {"representatives": q, **share})
        for q in recent
    }
    for sampler in SAMPLERS:
        name = "phase" if sampler == SAMPLERS[0] else sampler
        settings = {"representatives": representatives, "sampler": sampler, **share}
        chosen[name, representatives] = AgentKV.create("paper", budget, settings)
    chosen[ORACLE, None] = Oracle.create("", budget, share)
    return chosen


def utility_coverage(
    captures: Sequence[Capture],
    budgets: Sequence[int],
    *,
    recent: Sequence[int] = (8, 24),
    representatives: int = 24,
    interval: int = 128,
) -> Coverage:
    """Compare representatives by the future attention they would have kept; events are pooled.

    `budgets` are tokens kept per (layer, KV head), `recent` numbers of last queries to try as
    representatives, `representatives` those of the phase-balanced strategies in all, a multiple of
    4, `interval` the generated tokens between two events. UsageError if a capture has no phases, or
    none has an event at a budget.
    """
    check_same_shape(captures)
    rows: list[CoverageRow] = []
    counts: dict[int, int] = {}
    for budget in budgets:
        methods = _strategies(budget, recent, representatives, interval)
        with torch.inference_mode():
            events = [c for capture in captures for c in _capture_coverage(capture, methods)]
        if not events:
            raise UsageError(
                f"no event at budget {budget}: no capture goes on after {interval} generated "
                f"tokens with more than {budget} cached; lower --budget or --interval"
            )
        counts[budget] = len(events)
        rows += _rows(budget, list(methods), torch.stack(events))
    return Coverage(rows, counts, interval)


def _rows(
    budget: int, names: Sequence[tuple[str, int | None]], events: Tensor
) -> list[CoverageRow]:
    """Summarise coverages [events, strategies, phases + 1]."""
    means = torch.nanmean(events, 0)
    best = means[names.index((ORACLE, None))]
    counts = (~events.isnan()).sum(0)
    return [
        CoverageRow(
            name,
            q,
            budget,
            phase,
            coverage=listed(means[i, column]),
            relative=listed(means[i, column] / best[column]),
            events=int(counts[i, column]),
        )
        for i, (name, q) in enumerate(names)
        for column, phase in enumerate((*PHASE_NAMES, OVERALL))
    ]


def _capture_coverage(
    capture: Capture, methods: Mapping[tuple[str, int | None], Method]
) -> Iterator[Tensor]:
    """Yield the coverage [strategies, phases + 1] of every event, the last event first."""
    labels = capture.labels("coverage")
    # All have the same events and cache.
    any_method = next(iter(methods.values()))
    for now, utility in _utilities(capture, event_points(capture, any_method)):
        count = capture.before(now)
        members = torch.stack([labels[:count] == int(phase) for phase in Phase])
        members = torch.cat([members, members.any(0, keepdim=True)])
        given = input_at(capture, any_method, now, sums=utility)
        every = methods.values()
        yield torch.stack([_covered(capture, method, given, members) for method in every])


def _utilities(capture: Capture, points: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Yield each event with the utility [layers, kv_heads, tokens before it], the last first."""
    # Going backwards, every query's attention is computed once.
    sums = torch.zeros(capture.layers, capture.kv_heads, capture.length)
    end = capture.length
    for now in reversed(points):
        start = capture.before(now)
        for layer in range(capture.layers):
            sums[layer, :, :end] += attention_sums(
                capture.q[layer, :, start:end],
                capture.positions[start:end],
                capture.k[layer, :, :end],
                capture.positions[:end],
            )
        end = start
        yield now, sums[..., :start].clone()


def _covered(capture: Capture, method: Method, given: MethodInput, members: Tensor) -> Tensor:
    """Return a strategy's coverage [phases + 1] at an event, mean over layers and KV heads."""
    # The views' sums are the utility.
    queries = kept_queries(capture, method.query_plan(), members.shape[1])
    selection = replace(given, queries=queries).select(method)
    total = torch.stack([view.sums for view in given.layers if view.sums is not None]).double()
    retained = torch.zeros_like(total).scatter_(-1, selection.kept, 1.0) * total
    groups = members.double().T
    return torch.nanmean(((retained @ groups) / (total @ groups)).flatten(0, 1), 0)
