"""Are these all trials of the run, each with its own seed, and none with a second try for luck."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from agentbench_kv.leaderboard.evidence import Evidence, place
from agentbench_kv.leaderboard.findings import Checks, Note, Wrong, differs
from agentbench_kv.results.records import TrialRecord, TrialStatus
from agentbench_kv.trials import MAX_ATTEMPTS

_RETRIED = frozenset({TrialStatus.INFRA_ERROR, TrialStatus.USER_ERROR})


def check_count(evidence: Evidence) -> Checks:
    """Check that every sample has all its trials, each finished, and no more."""
    spec, trials = evidence.spec, evidence.trials
    expected = evidence.info.expected_trials
    if expected != len(trials) or not trials:
        yield differs("run.json: expected_trials", expected, len(trials))
    samples = {sample for sample, _ in trials}
    if len(trials) != len(samples) * spec.trials:
        yield differs("trials", len(trials), f"{spec.trials} of each of {len(samples)} samples")
    for sample, trial in sorted(trials):
        if trial >= spec.trials:
            yield Wrong(
                f"sample {sample} trial {trial}", f"is beyond the {spec.trials} of the spec"
            )
    if spec.limit is not None and len(samples) > spec.limit:
        yield differs("samples", len(samples), spec.limit)
    for key, record in trials.items():
        if not record.finished:
            yield Wrong(
                place(key, "status"), f"is {record.status.value}: the trial is not finished"
            )


def check_seeds(evidence: Evidence) -> Checks:
    """Derive the seed of every attempt from spec, sample and trial."""
    for key, attempts in evidence.attempts.items():
        derived = evidence.spec.trial_seed(*key)
        for record in attempts:
            if record.seed != derived:
                yield differs(place(key, "seed"), record.seed, derived)


def check_attempts(evidence: Evidence) -> Checks:
    """Check that no record was superseded where the runner would not have tried again."""
    for key, attempts in evidence.attempts.items():
        if attempts[0].attempts != 1:
            yield differs(place(key, "attempts"), attempts[0].attempts, 1)
        yield from _check_order(key, attempts)
    again = sum(len(attempts) - 1 for attempts in evidence.attempts.values())
    if again:
        yield Note(f"{again} attempts are said to have been lost, and were repeated")


def _check_order(key: tuple[str, int], attempts: Sequence[TrialRecord]) -> Checks:
    for earlier, later in pairwise(attempts):
        spoilt = earlier.status is TrialStatus.USER_ERROR
        if earlier.status not in _RETRIED or (spoilt and earlier.attempts >= MAX_ATTEMPTS):
            said = f"a record with status {earlier.status.value} was superseded by a later one"
            yield Wrong(place(key, "status"), said)
        # A resumed run begins to count anew.
        allowed = {earlier.attempts + 1} | (set() if spoilt else {1})
        if later.attempts not in allowed or later.attempts > MAX_ATTEMPTS:
            yield differs(place(key, "attempts"), later.attempts, min(allowed))


def check_scores(evidence: Evidence) -> Checks:
    """Check that no part of a score has more right than asked."""
    for key, record in evidence.trials.items():
        for name, right in record.metrics.items():
            part = name.removesuffix("_right")
            asked = record.metrics.get(f"{part}_asked")
            if part == name or asked is None:
                continue
            if not isinstance(right, int | float) or not isinstance(asked, int | float):
                yield Wrong(place(key, f"metrics.{name}"), "is no number")
            elif not -asked <= right <= asked:
                yield Wrong(place(key, f"metrics.{name}"), f"is {right} of {asked} asked")


def check_unfounded(evidence: Evidence) -> Checks:
    """Check that turns belong to trials."""
    for key in sorted(evidence.turns.keys() - evidence.trials.keys())[:5]:
        yield Wrong(f"turns.jsonl: sample {key[0]} trial {key[1]}", "is no trial of the run")
