"""Whether a run may be ranked, judged by its records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from pydantic import BaseModel

from agentbench_kv.budget import Budget
from agentbench_kv.errors import UsageError
from agentbench_kv.results.records import TrialRecord

UNCOMPRESSED = frozenset({"full", "full-constrained"})
# In the provenance of a run whose method has a memory; or is told what a session still needs.
REMEMBERS, FORESEES = "remembers", "foresees"
# Those that had, or were, before provenance said so.
_MEMORIES = frozenset({"memart", "mem0", "graphiti"})
_TOLD = frozenset({"oracle-tools"})
DEFAULT_INTERVAL = 128
_PARAMETER_FIELDS = ("params", "set", "method_params")


class RunState(StrEnum):
    """The verdict on a run; only `valid` runs are ranked."""

    VALID = "valid"
    INCOMPLETE = "incomplete"
    BUDGET_NOT_APPLIED = "budget_not_applied"
    DRIFT = "drift"


class Validity(BaseModel, frozen=True):
    """The verdict on a run with all its reasons."""

    state: RunState  # the gravest finding
    reasons: list[str]  # every finding, one line each; empty for a valid run
    triggered_samples: int  # with at least one event
    samples: int  # with at least one trial


def assess(
    spec: Mapping[str, Any],
    trials: Sequence[TrialRecord],
    expected: int | None = None,
    reference: Sequence[TrialRecord] | None = None,
    *,
    provenance: Mapping[str, Any] | None = None,
) -> Validity:
    """Judge a run by the records that count.

    Prompts that drifted weigh most, then a budget that was exceeded, then missing trials, then a
    method that never triggered (which missing trials might still show to be wrong).

    `expected` (trials) is the spec's `expected_trials` if not given; `reference` are trials of an
    arm that must have had the same prompts. `provenance` is the run's.
    """
    if expected is None:
        expected = spec.get("expected_trials")
    recalled = _never_recalled(trials) if remembers(spec, provenance or {}) else None
    findings = [
        (RunState.DRIFT, _drifted(trials, reference or ())),
        (RunState.BUDGET_NOT_APPLIED, _refused(trials)),
        (RunState.BUDGET_NOT_APPLIED, _exceeded(spec, trials)),
        (RunState.BUDGET_NOT_APPLIED, _raised(spec, trials)),
        (RunState.INCOMPLETE, _missing(spec, trials, expected)),
        (RunState.BUDGET_NOT_APPLIED, _never_triggered(spec, trials)),
        (RunState.BUDGET_NOT_APPLIED, recalled),
    ]
    found = [(state, reason) for state, reason in findings if reason is not None]
    return Validity(
        state=found[0][0] if found else RunState.VALID,
        reasons=[reason for _, reason in found],
        triggered_samples=len(triggered_samples(trials)),
        samples=len({record.sample_id for record in trials}),
    )


def remembers(spec: Mapping[str, Any], provenance: Mapping[str, Any]) -> bool:
    """Whether a run's method has a memory of past sessions."""
    return _method(spec) in _MEMORIES or bool(provenance.get(REMEMBERS))


def foresees(spec: Mapping[str, Any], provenance: Mapping[str, Any]) -> bool:
    """Whether a run's method was told what its sessions still need: a control, and no rival."""
    return _method(spec) in _TOLD or bool(provenance.get(FORESEES))


def budget_bounds(spec: Mapping[str, Any], trials: Sequence[TrialRecord]) -> list[int]:
    """Return the most live tokens each trial may hold; none where nothing bounds them.

    That is B + Δ + the longest single prefill, all in tokens per (layer, KV head); a budget that is
    a share counts by the session's final length. A policy with a trigger in tokens and no budget
    promises the trigger + the longest prefill.
    """
    if (trigger := _own_trigger(spec)) is not None:
        return [trigger + each.kv.longest_prefill for each in trials]
    if not _is_compressed(spec):
        return []
    size, interval = Budget.parse(spec["budget"]), _interval(spec)
    return [size.at(each.kv.logical) + interval + each.kv.longest_prefill for each in trials]


def triggered_samples(trials: Sequence[TrialRecord]) -> set[str]:
    return {record.sample_id for record in trials if record.kv.events}


def _is_compressed(spec: Mapping[str, Any]) -> bool:
    return _method(spec) not in UNCOMPRESSED and spec.get("budget") is not None


def _method(spec: Mapping[str, Any]) -> str:
    return str(spec.get("method", "full")).partition("@")[0]


def _own_trigger(spec: Mapping[str, Any]) -> int | None:
    """Return the tokens above which a policy drops messages, where that is not a budget."""
    if _parameter(spec, "exec") is None or spec.get("budget") is not None:
        return None
    try:
        return int(str(_parameter(spec, "trigger")))
    except ValueError:  # a word: the context, the model's own wish
        return None


def _interval(spec: Mapping[str, Any]) -> int:
    """Return Δ: from the spec itself, else from the method's parameters, else the default."""
    return _number("interval", _parameter(spec, "interval"), DEFAULT_INTERVAL)


def _number(name: str, found: Any, default: int) -> int:
    try:
        return default if found is None else int(found)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"the {name} of the run is {str(found)[:40]!r}, no number") from None


def _parameter(spec: Mapping[str, Any], name: str) -> Any:
    """Return a value of the spec itself, else of the method's parameters; None if it has none."""
    places = [spec, *(spec.get(field) for field in _PARAMETER_FIELDS)]
    values = (place.get(name) for place in places if isinstance(place, Mapping))
    return next((value for value in values if value is not None), None)


def _exceeded(spec: Mapping[str, Any], trials: Sequence[TrialRecord]) -> str | None:
    bounds = zip(trials, budget_bounds(spec, trials), strict=False)
    excess = [(_held(r) - bound, r) for r, bound in bounds if _held(r) > bound]
    if not excess:
        return None
    over, worst = max(excess, key=lambda item: item[0])
    limit, sizes, names = "budget", f"{spec['budget']} + {_interval(spec)}", "budget + interval"
    if (trigger := _own_trigger(spec)) is not None:
        limit, sizes, names = "trigger", f"{trigger}", "trigger"
    return (
        f"{len(excess)} trials exceeded the {limit}; worst: sample {worst.sample_id} trial "
        f"{worst.trial} held {_held(worst)} tokens, {over} over the bound "
        f"{sizes} + {worst.kv.longest_prefill} ({names} + longest prefill)"
        f"{_told_anew(spec, worst)}{_cure(spec)}"
    )


def _told_anew(spec: Mapping[str, Any], record: TrialRecord) -> str:
    """Say that a client changed its history, behind which a policy of messages begins anew."""
    if _parameter(spec, "exec") is None or not record.session_resets:
        return ""
    return f"; its history was changed {record.session_resets} times, and nothing leaves of such"


def _held(record: TrialRecord) -> int:
    """Return the most tokens of a session, without what its method asked beside it."""
    return record.kv.peak_alone or record.kv.peak_live


def _refused(trials: Sequence[TrialRecord]) -> str | None:
    """Say where what is always kept left no room under the budget, so that nothing was evicted."""
    refused = [record for record in trials if record.kv.refused]
    if not refused:
        return None
    worst = max(refused, key=lambda record: record.kv.protected)
    kv = worst.kv
    return (
        f"{len(refused)} of {len(trials)} trials had no room for an event; sample "
        f"{worst.sample_id} trial {worst.trial}: "
        f"protected {kv.protected} + recent {kv.refused_recent} >= budget {kv.refused_budget}; "
        "raise --budget or protect less"
    )


def _raised(spec: Mapping[str, Any], trials: Sequence[TrialRecord]) -> str | None:
    """Say where a share came to fewer tokens than the method can work with, so it kept more."""
    # A session without an event was not compressed to either number.
    if not _is_compressed(spec):
        return None
    size = Budget.parse(spec["budget"])
    raised = [r for r in trials if r.kv.events and (r.kv.budget or 0) > size.at(r.kv.logical)]
    if not raised:
        return None
    worst = min(raised, key=lambda record: record.kv.logical)
    return (
        f"{len(raised)} trials ended with a budget above the share; sample {worst.sample_id} trial "
        f"{worst.trial} was given {worst.kv.budget} tokens, the least the method takes, and "
        f"{spec['budget']} of {worst.kv.logical} are {size.at(worst.kv.logical)}"
    )


def _never_triggered(spec: Mapping[str, Any], trials: Sequence[TrialRecord]) -> str | None:
    if not trials or triggered_samples(trials):
        return None
    if not _is_compressed(spec):
        return _never_dropped(spec, trials)
    if any(record.kv.refused for record in trials):  # events fell due, and `_refused` says more
        return None
    longest = max(record.kv.logical for record in trials)
    fits = longest <= Budget.parse(spec["budget"]).at(longest)
    said = f"logical tokens at most {longest} {'<=' if fits else '>'} budget {spec['budget']}"
    return f"never triggered; {said}{'' if fits else _cure(spec)}"


def _never_dropped(spec: Mapping[str, Any], trials: Sequence[TrialRecord]) -> str | None:
    """Say that a method which drops messages above a length of its own met no such session."""
    if _parameter(spec, "exec") is None:
        return None
    if (every := _parameter(spec, "fork_every")) is not None:
        asked = sum(record.kv.auxiliary_calls for record in trials)
        cure = "ask more often: --set fork_every=N"
        if asked:
            cure = "use a model that kvbench train sidequest has trained, or ask one more often"
        return (
            f"never triggered; the model was asked {asked} times (fork_every={every}) and"
            f" named no result to drop; {cure}"
        )
    longest = max(record.kv.logical for record in trials)
    return (
        f"never triggered; logical tokens at most {longest}, trigger {_parameter(spec, 'trigger')}:"
        " nothing was dropped; --set trigger=TOKENS below that, or --set trigger=budget"
    )


def _never_recalled(trials: Sequence[TrialRecord]) -> str | None:
    """Say that a memory brought nothing back, rows or texts, as where it was told of no past."""
    found = any(each.kv.restored or each.metrics.get("recalled_texts") for each in trials)
    return None if found or not trials else "never triggered; its memory brought nothing back"


def _cure(spec: Mapping[str, Any]) -> str:
    """Say what makes a method fire that waits for generated tokens, of which there may be few."""
    if _parameter(spec, "trigger") != "every":
        return ""
    return (
        f"; an event is due at every {_interval(spec)}th generated token only, and answers may be "
        "short: --set trigger=prefill+every compresses after what was read, too"
    )


def _missing(
    spec: Mapping[str, Any], trials: Sequence[TrialRecord], expected: int | None
) -> str | None:
    finished = sum(record.finished for record in trials)
    samples = len({record.sample_id for record in trials})
    asked = samples * _number("trials", spec.get("trials"), 1)
    wanted = max(expected or 0, len(trials), asked)
    if finished >= wanted and trials:
        return None
    if not wanted:
        return "no trials"
    again = "; {} lost to engine or infrastructure count 0 until the same command tries them again"
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
