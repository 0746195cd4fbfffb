"""Scores, sub-scores and peaks of two sides' trials, sample by sample."""

from __future__ import annotations

import numpy as np

from agentbench_kv.errors import UsageError
from agentbench_kv.results.gap import Gap, score_gap, size_gap
from agentbench_kv.results.passk import pass_k, sample_powers
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.statistics import RESAMPLES, Floats
from agentbench_kv.results.verdict import gap_of_scores

__all__ = ["Trials", "paired_gap"]

Trials = dict[str, list[TrialRecord]]
"""Sample to its trials, over tasks and repeated runs."""


def paired_gap(
    metric: str, base: Trials, cand: Trials, resamples: int = RESAMPLES
) -> tuple[Gap | None, set[str], set[str]]:
    """Compare two sides on a metric of single trials.

    Parameters
    ----------
    metric : str
        `score`, `pass^k` such as `pass^4`, `peak_live`, or a sub-score.
    base, cand : dict of str to list of TrialRecord
    resamples : int
        Of bootstrap and permutation test.

    Returns
    -------
    gap : Gap or None
        None if the sides share no sample.
    theirs, mine : set of str
        Samples for which the base, and the candidate, has the metric.

    Raises
    ------
    UsageError
        If a side does not have the metric at all.
    """
    k = pass_k(metric)
    if k is not None:
        return _of_powers(k, base, cand, resamples)
    compute = {"score": _of_scores, "peak_live": _of_peaks}.get(metric, _of_counts)
    return compute(metric, base, cand, resamples)


Outcome = tuple[Gap | None, set[str], set[str]]


def _of_scores(_: str, base: Trials, cand: Trials, resamples: int) -> Outcome:
    theirs, mine = _scores(base), _scores(cand)
    return gap_of_scores(mine, theirs, _clusters(base), resamples), set(theirs), set(mine)


def _of_powers(k: int, base: Trials, cand: Trials, resamples: int) -> Outcome:
    theirs, mine = (sample_powers(_scores(side), k) for side in (base, cand))
    if not theirs or not mine:
        raise UsageError(f"no sample of one side has {k} trials; run it with --trials {k} or more")
    ids = sorted(theirs.keys() & mine.keys())
    own, other = (np.array([[side[name], 1.0] for name in ids]) for side in (mine, theirs))
    gap = score_gap(ids, own, other, _clusters(base), resamples=resamples) if ids else None
    return gap, set(theirs), set(mine)


def _scores(trials: Trials) -> dict[str, list[float]]:
    return {name: [record.headline for record in records] for name, records in trials.items()}


def _clusters(trials: Trials) -> dict[str, str]:
    """Name a sample's group, apart for each task as the sample's name is."""
    return {
        name: f"{name.removesuffix(records[0].sample_id)}{records[0].cluster}"
        for name, records in trials.items()
        if records[0].cluster is not None
    }


def _of_peaks(metric: str, base: Trials, cand: Trials, resamples: int) -> Outcome:
    theirs, mine = (_peaks(side) for side in (base, cand))
    if not theirs or not mine:
        raise UsageError(f"no trial of one side reached the engine, so there is no {metric}")
    ids = sorted(theirs.keys() & mine.keys())
    own, other = (np.array([side[name] for name in ids]) for side in (mine, theirs))
    gap = size_gap(ids, own, other, _clusters(base), resamples=resamples) if ids else None
    return gap, set(theirs), set(mine)


def _peaks(trials: Trials) -> dict[str, float]:
    """Return each sample's mean peak, over the trials that reached the engine."""
    peaks = {
        name: [record.kv.peak_live for record in records if record.kv.peak_live]
        for name, records in trials.items()
    }
    return {name: float(np.mean(values)) for name, values in peaks.items() if values}


def _of_counts(metric: str, base: Trials, cand: Trials, resamples: int) -> Outcome:
    asked = _asked(base, metric) | _asked(cand, metric)
    if not asked:
        known = sorted({name for side in (base, cand) for name in _sub_scores(side)})
        raise UsageError(
            f"the records have no sub-score {metric!r}; "
            f"known: {', '.join(['score', 'pass^k', 'peak_live', 'output_tok_s', *known])}"
        )
    theirs, mine = (_counts(side, metric, asked) for side in (base, cand))
    ids = sorted(theirs.keys() & mine.keys())
    own, other = (np.array([side[name] for name in ids]) for side in (mine, theirs))
    gap = score_gap(ids, own, other, _clusters(base), resamples=resamples) if ids else None
    return gap, set(theirs), set(mine)


def _count(record: TrialRecord, name: str) -> float | None:
    value = record.metrics.get(name)
    return float(value) if isinstance(value, int | float) else None


def _asked(trials: Trials, metric: str) -> dict[str, float]:
    """Return what a trial of each sample is asked, from any trial that says so."""
    known = (
        (name, _count(record, f"{metric}_asked"))
        for name, records in trials.items()
        for record in records
    )
    return {name: asked for name, asked in known if asked}


def _counts(trials: Trials, metric: str, asked: dict[str, float]) -> dict[str, Floats]:
    """Sum right and asked; a failed trial without counts has nothing right of what it was asked."""
    counts: dict[str, Floats] = {}
    for name, records in trials.items():
        for record in records:
            right, of = (_count(record, f"{metric}_{part}") for part in ("right", "asked"))
            if right is None or not of:
                if record.score is not None or name not in asked:
                    continue
                right, of = 0.0, asked[name]
            counts[name] = counts.get(name, np.zeros(2)) + np.array([right, of])
    return counts


def _sub_scores(trials: Trials) -> set[str]:
    names = (name for records in trials.values() for record in records for name in record.metrics)
    return {name.removesuffix("_asked") for name in names if name.endswith("_asked")}
