"""What sessions that `kvbench fidelity` played come to: an arm's figures over some of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from agentbench_kv.results.runs import Run, RunGroup
from agentbench_kv.results.stats import Interval, level, open_level

PREFIX = "fidelity/"  # of the task in a run's spec
KL, VALUE, FLIPS = "kl", "kl_value", "flips"
MEANS = (KL, "dnll", FLIPS)  # of which less is better; all but the last in nats
SHARES = ("top1", "right", "calls_exact", "calls_exact_full")


def of_fidelity(run: Run) -> bool:
    """Whether a run says how far from the full cache it is: by that it is judged, not by a score.

    Its score is the share of tokens with the same best one. An interval for samples that succeed or
    fail is far too wide for such shares.
    """
    return run.setting.task.startswith(PREFIX)


def diverges(metric: str) -> bool:
    """Whether a metric is a distance from the full cache, or a part of one (`kl_value`)."""
    return metric.partition("_")[0] in MEANS


@dataclass(frozen=True)
class Divergence:
    """One method at one budget against the full cache."""

    method: str
    budget: str
    sessions: int
    events: float  # per session
    behind: float | None  # share of the tokens that came behind an event; None: not counted
    means: Mapping[str, Interval]  # nats; of `flips` shares
    shares: Mapping[str, Interval]


def divergence(group: RunGroup, sessions: frozenset[str] | None = None) -> Divergence | None:
    """Return a group's figures over some sessions, or all; None if it has no divergence there."""
    kept = None if sessions is None else set(sessions)
    means: dict[str, Interval] = {}
    for name in sorted({name for run in group.runs for name in run.means}):
        found = group.means(name)
        own = found if found is None or kept is None else found.only(kept)
        if own is not None and own.parts:
            means[name] = _bounded(name, open_level(own.parts, own.groups))
    if KL not in means:
        return None
    shares = {}
    for name in SHARES:
        scores = group.scores(name)
        own = scores if scores is None or kept is None else scores.only(kept)
        if own is not None and own.parts:
            shares[name] = level(own)
    accounts = [(run.summary.kv.events, run.summary.trials) for run in group.runs if run.summary.kv]
    events = sum(each for each, _ in accounts) / max(1, sum(trials for _, trials in accounts))
    budget = "" if group.budget is None else str(group.budget)
    behind = _behind(group, kept)
    return Divergence(group.label, budget, means[KL].n, events, behind, means, shares)


def _behind(group: RunGroup, kept: set[str] | None) -> float | None:
    """Return the share of a group's tokens, in some sessions, that had an event before them."""
    counts = {"": 0.0, "_before": 0.0}
    for name in counts:
        found = group.means(f"{KL}{name}")
        if found is not None:
            own = found if kept is None else found.only(kept)
            counts[name] = sum(count for _, count in own.parts.values())
    far = any(group.means(f"{KL}{name}") for name in ("_before", "_to1", "_to8", "_later"))
    return 1 - counts["_before"] / counts[""] if far and counts[""] else None


def _bounded(name: str, interval: Interval) -> Interval:
    share = name.partition("_")[0] == FLIPS
    return replace(interval, high=min(interval.high, 1.0)) if share else interval
