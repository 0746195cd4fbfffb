"""One method, one parameter at a time: every variant against the method as it is, paired."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentbench_kv.errors import UsageError, unknown_name
from agentbench_kv.methods.samplers import SAMPLERS
from agentbench_kv.registry import load_method
from agentbench_kv.results.paired import (
    Difference,
    holm,
    paired_difference,
    paired_ratio_difference,
)
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.stats import Interval
from agentbench_kv.results.store import RunStore
from agentbench_kv.results.summary import Summary
from agentbench_kv.runner import Progress, run_all
from agentbench_kv.spec import RunSpec, resolve

logger = logging.getLogger(__name__)

__all__ = ["AXES", "Variant", "ablate", "variants"]

AXES: Mapping[str, tuple[Any, ...]] = {
    "representatives": (8, 16, 24, 32, 48, 64),
    "drop_phase": ("none", "think", "act", "tool", "others"),
    "sampler": SAMPLERS,
    "gqa": ("mean_prob", "max_prob", "max_logit"),
    "kept_set": ("per_head", "per_kv_head", "shared"),
    "keep_recent": (0, 8, 32, 128),
    "trigger": ("every", "slack", "turn", "prefill+every"),
}
"""Parameters that are varied if nothing else is asked for (AgentKV, tables 3 and 4, and what its
paper leaves open)."""


@dataclass(frozen=True)
class Variant:
    """One arm.

    Attributes
    ----------
    axis, value : str
        What was changed; both empty for the baseline.
    spec : RunSpec
    level : Interval or None
        The metric of this arm; None before it has run.
    difference : Difference or None
        This arm minus the baseline.
    adjusted_p : float or None
        Holm over all variants.
    """

    axis: str
    value: str
    spec: RunSpec
    level: Interval | None = None
    difference: Difference | None = None
    adjusted_p: float | None = None


def variants(
    base: RunSpec, settings: Mapping[str, str], axes: Mapping[str, Sequence[Any]] | None = None
) -> list[Variant]:
    """List the baseline and every variant that differs from it.

    Parameters
    ----------
    base : RunSpec
        Method, budget and task.
    settings : mapping of str to str
        Parameters all arms share.
    axes : mapping of str to values, optional
        Parameter -> values; those of `AXES` that the method has if not given, and of their values
        those that go with the budget.

    Raises
    ------
    UsageError
        For a parameter or a value the method does not take.
    """
    known = load_method(base.method.partition("@")[0]).parameters()
    for name in axes or ():
        if name not in known:
            raise unknown_name(f"{base.method} parameter", name, known)
    chosen = axes or {name: values for name, values in AXES.items() if name in known}
    arms = {resolve(base, settings).id: Variant("", "", resolve(base, settings))}
    for name, values in chosen.items():
        for value in values:
            try:
                spec = resolve(base, {**settings, name: str(value)})
            except UsageError as error:
                if axes:
                    raise
                logger.info("left out %s=%s: %s", name, value, error)
                continue
            arms.setdefault(spec.id, Variant(name, str(value), spec))
    if len(arms) < 2:
        raise UsageError("nothing to ablate: every variant is the baseline; name other values")
    return list(arms.values())


def ablate(
    arms: Sequence[Variant], out: Path, progress: Progress, metric: str = "score"
) -> list[Variant]:
    """Run what is missing and compare every arm with the first one.

    Parameters
    ----------
    arms : sequence of Variant
        The baseline first.
    out : Path
        Folder of runs.
    progress : callable
        As `run_all` takes it.
    metric : str
        `score`, or the name of a sub-score.
    """
    summaries = run_all([arm.spec for arm in arms], out, progress)
    store = RunStore(out)
    trials = [store.find(arm.spec.id).trials() for arm in arms]
    gaps = [_difference(own, trials[0], metric) for own in trials[1:]]
    adjusted = iter(holm([gap.p_value for gap in gaps if gap is not None]))
    compared = [replace(arms[0], level=_level(summaries[0], metric))]
    for arm, gap, summary in zip(arms[1:], gaps, summaries[1:], strict=True):
        p_value = None if gap is None else next(adjusted)
        level = _level(summary, metric)
        compared.append(replace(arm, level=level, difference=gap, adjusted_p=p_value))
    return compared


def _level(summary: Summary, metric: str) -> Interval | None:
    if metric == "score":
        return summary.score
    part = summary.sub_scores.get(metric)
    return part.interval if part else None


def _difference(
    own: Sequence[TrialRecord], base: Sequence[TrialRecord], metric: str
) -> Difference | None:
    if metric == "score":
        return paired_difference(_scores(own), _scores(base))
    return paired_ratio_difference(_counts(own, metric), _counts(base, metric))


def _scores(trials: Sequence[TrialRecord]) -> dict[str, list[float]]:
    scores: dict[str, list[float]] = {}
    for record in trials:
        scores.setdefault(record.sample_id, []).append(record.headline)
    return scores


def _counts(trials: Sequence[TrialRecord], metric: str) -> dict[str, tuple[float, float]]:
    counts: dict[str, tuple[float, float]] = {}
    for record in trials:
        right, asked = (record.metrics.get(f"{metric}_{part}") for part in ("right", "asked"))
        if isinstance(right, int | float) and isinstance(asked, int | float):
            old = counts.get(record.sample_id, (0.0, 0.0))
            counts[record.sample_id] = (old[0] + right, old[1] + asked)
    if not counts:
        raise UsageError(f"the records have no sub-score {metric!r}; use --metric score")
    return counts
