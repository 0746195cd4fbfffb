"""What runs of `kvbench fidelity` come to: each arm's figures, and what tells it from the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.stats import (
    Change,
    Interval,
    Scores,
    holm,
    level,
    open_change,
    open_level,
)
from agentbench_kv.results.store import RunReader

KL, VALUE = "kl", "kl_value"
SHARES = ("top1", "flips", "right", "calls_exact", "calls_exact_full")


@dataclass(frozen=True)
class FidelityLine:
    """One method at one budget."""

    method: str
    budget: str
    sessions: int
    events: float  # per session
    means: Mapping[str, Interval]  # nats
    shares: Mapping[str, Interval]
    against_first: Change | None  # KL of this arm less that of the first one, paired by session
    p_value: float | None  # of that, adjusted over the table


def fidelity_lines(runs: Sequence[RunReader]) -> list[FidelityLine]:
    """Return a line for every run, in their order; runs without a session are left out."""
    arms = [(run, [r for r in run.trials() if r.score is not None]) for run in runs]
    arms = [(run, records) for run, records in arms if records]
    if not arms:
        return []
    totals = [_totals(records, KL) for _, records in arms]
    groups = _groups(arms[0][1])
    changes = [open_change(own, totals[0], groups) for own in totals]
    compared = [each.p_value for each in changes[1:] if each is not None]
    adjusted = iter(holm(compared))
    lines = []
    for number, ((run, records), found) in enumerate(zip(arms, changes, strict=True)):
        first = number == 0 or found is None
        lines.append(
            _line(run, records, None if first else found, None if first else next(adjusted))
        )
    return lines


def _line(
    run: RunReader, records: Sequence[TrialRecord], found: Change | None, p_value: float | None
) -> FidelityLine:
    groups, spec = _groups(records), run.info.spec
    means = {name: open_level(_totals(records, name), groups) for name in _names(records)}
    shares = {}
    for name in SHARES:
        counts = {r.sample_id: r.sub_scores[name] for r in records if name in r.sub_scores}
        scores = Scores.of_counts(counts, groups)
        if scores.parts:
            shares[name] = level(scores)
    events = sum(record.kv.events for record in records) / len(records)
    return FidelityLine(
        str(spec["method"]), str(spec.get("budget") or ""), len(records), events, means, shares,
        found, p_value,
    )  # fmt: skip


def _names(records: Sequence[TrialRecord]) -> list[str]:
    return sorted({name for r in records for name, (_, count) in r.means.items() if count})


def _totals(records: Sequence[TrialRecord], name: str) -> dict[str, tuple[float, float]]:
    return {r.sample_id: r.means[name] for r in records if name in r.means}


def _groups(records: Sequence[TrialRecord]) -> dict[str, str]:
    return {r.sample_id: r.cluster for r in records if r.cluster is not None}
