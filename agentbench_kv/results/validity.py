"""Whether a run's figures may be ranked (methods.md, 'What counts as an applied budget')."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict

from agentbench_kv.budget import Budget
from agentbench_kv.results.records import TrialRecord

UNCOMPRESSED = frozenset({"full", "full-constrained"})
DEFAULT_INTERVAL = 128
_PARAMETER_FIELDS = ("params", "set", "method_params")


class RunState(StrEnum):
    """The verdict on a run; only `valid` runs are ranked."""

    VALID = "valid"
    INCOMPLETE = "incomplete"
    BUDGET_NOT_APPLIED = "budget_not_applied"
    DRIFT = "drift"


class Validity(BaseModel):
    """The verdict on a run with all its reasons."""

    model_config = ConfigDict(frozen=True)

    state: RunState  # the gravest finding
    reasons: list[str]  # every finding, one line each; empty for a valid run
    triggered_samples: int  # with at least one event
    samples: int  # with at least one trial


def assess(
    spec: Mapping[str, Any],
    trials: Sequence[TrialRecord],
    expected: int | None = None,
    reference: Sequence[TrialRecord] | None = None,
) -> Validity:
    """Judge a run by the records that count.

    Prompts that drifted weigh most, then a budget that was exceeded, then missing trials, then a
    method that never triggered (which missing trials might still show to be wrong).

    `expected` (trials) is the spec's `expected_trials` if not given; `reference` are trials of an
    arm that must have had the same prompts.
    """
    if expected is None:
        expected = spec.get("expected_trials")
    findings = [
        (RunState.DRIFT, _drifted(trials, reference or ())),
        (RunState.BUDGET_NOT_APPLIED, _exceeded(spec, trials)),
        (RunState.BUDGET_NOT_APPLIED, _raised(spec, trials)),
        (RunState.INCOMPLETE, _missing(trials, expected)),
        (RunState.BUDGET_NOT_APPLIED, _never_triggered(spec, trials)),
    ]
    found = [(state, reason) for state, reason in findings if reason is not None]
    return Validity(
        state=found[0][0] if found else RunState.VALID,
        reasons=[reason for _, reason in found],
        triggered_samples=len(triggered_samples(trials)),
        samples=len({record.sample_id for record in trials}),
    )


def budget_bounds(spec: Mapping[str, Any], trials: Sequence[TrialRecord]) -> list[int]:
    """Return the most live tokens the budget allows each trial; none where there is no budget.

    That is B + Δ + the longest single prefill, all in tokens per (layer, KV head); a budget that is
    a share counts by the session's final length.
    """
    if not _is_compressed(spec):
        return []
    size, interval = Budget.parse(spec["budget"]), _interval(spec)
    return [size.at(each.kv.logical) + interval + each.kv.longest_prefill for each in trials]


def triggered_samples(trials: Sequence[TrialRecord]) -> set[str]:
    """Return the ids of the samples with at least one event."""
    return {record.sample_id for record in trials if record.kv.events}


def _is_compressed(spec: Mapping[str, Any]) -> bool:
    method = str(spec.get("method", "full")).partition("@")[0]
    return method not in UNCOMPRESSED and spec.get("budget") is not None


def _interval(spec: Mapping[str, Any]) -> int:
    """Return Δ: from the spec itself, else from the method's parameters, else the default."""
    found = _parameter(spec, "interval")
    return DEFAULT_INTERVAL if found is None else int(found)


def _parameter(spec: Mapping[str, Any], name: str) -> Any:
    """Return a value of the spec itself, else of the method's parameters; None if it has none."""
    places = [spec, *(spec.get(field) for field in _PARAMETER_FIELDS)]
    values = (place.get(name) for place in places if isinstance(place, Mapping))
    return next((value for value in values if value is not None), None)


def _exceeded(spec: Mapping[str, Any], trials: Sequence[TrialRecord]) -> str | None:
    excess = [
        (record.kv.peak_live - bound, record)
        for record, bound in zip(trials, budget_bounds(spec, trials), strict=False)
        if record.kv.peak_live > bound
    ]
    if not excess:
        return None
    over, worst = max(excess, key=lambda item: item[0])
    return (
        f"{len(excess)} trials exceeded the budget; worst: sample {worst.sample_id} trial "
        f"{worst.trial} held {worst.kv.peak_live} tokens, {over} over the bound "
        f"{spec['budget']} + {_interval(spec)} + {worst.kv.longest_prefill} "
        "(budget + interval + longest prefill)"
    )


def _raised(spec: Mapping[str, Any], trials: Sequence[TrialRecord]) -> str | None:
    """Say where a share came to fewer tokens than the method can work with, so that it kept more.

    A session without an event was not compressed to either number.
    """
    if not _is_compressed(spec):
        return None
    size = Budget.parse(spec["budget"])
    raised = [
        record
        for record in trials
        if record.kv.events and (record.kv.budget or 0) > size.at(record.kv.logical)
    ]
    if not raised:
        return None
    worst = min(raised, key=lambda record: record.kv.logical)
    return (
        f"{len(raised)} trials ended with a budget above the share; sample {worst.sample_id} trial "
        f"{worst.trial} was given {worst.kv.budget} tokens, the least the method takes, and "
        f"{spec['budget']} of {worst.kv.logical} are {size.at(worst.kv.logical)}"
    )


def _never_triggered(spec: Mapping[str, Any], trials: Sequence[TrialRecord]) -> str | None:
    if not trials or not _is_compressed(spec) or triggered_samples(trials):
        return None
    longest = max(record.kv.logical for record in trials)
    fits = longest <= Budget.parse(spec["budget"]).at(longest)
    said = f"logical tokens at most {longest} {'<=' if fits else '>'} budget {spec['budget']}"
    return f"never triggered; {said}{'' if fits else _cure(spec)}"


def _cure(spec: Mapping[str, Any]) -> str:
    """Say what makes a method fire that waits for more generated tokens than there are."""
    if _parameter(spec, "trigger") != "every":
        return ""
    return (
        f"; an event is due at every {_interval(spec)}th generated token only, and answers may be "
        "short: --set trigger=prefill+every compresses after what was read, too"
    )


def _missing(trials: Sequence[TrialRecord], expected: int | None) -> str | None:
    finished = sum(record.finished for record in trials)
    wanted = max(expected or 0, len(trials))
    if finished >= wanted and trials:
        return None
    if not wanted:
        return "no trials"
    again = "; {} lost to infrastructure errors count 0 until the same command tries them again"
    lost = len(trials) - finished
    return f"{finished} of {wanted} trials finished{again.format(lost) if lost else ''}"


def _drifted(trials: Sequence[TrialRecord], reference: Sequence[TrialRecord]) -> str | None:
    theirs = {record.key: record.prompt_sha for record in reference if record.prompt_sha}
    shared = [record for record in trials if record.prompt_sha and record.key in theirs]
    different = [record for record in shared if record.prompt_sha != theirs[record.key]]
    if not different:
        return None
    return (
        f"prompts differ from the other arm in {len(different)} of {len(shared)} trials, "
        f"first in sample {different[0].sample_id} trial {different[0].trial}"
    )
