"""Whether a method's own greedy run, played again, is what it was: the check of forced play."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.run_reader import RunReader

# What a session's accounts must agree in.
_FIGURES = ("events", "evicted", "peak_live", "prefill_tokens", "decode_tokens")
_METHOD = ("method", "budget")
_OF_SPEC = ("model", "dtype", "calibration", "context_limit", "kv_dtype")


def self_check(source: Path, arms: Sequence[RunReader]) -> list[str]:
    """Compare the arms that are the source run's own method with that run, a line each.

    Every token must be the arm's best one, and the events the same. Where no arm of the run's
    method and budget is the same in everything, each is told with the reason why it says nothing;
    one by batches may differ where two tokens are as good.
    """
    own = RunReader(source)
    spec = own.info.spec
    recorded = {record.sample_id: record for record in own.trials() if record.trial == 0}
    lines = []
    alike = [
        arm for arm in arms if all(arm.info.spec.get(name) == spec.get(name) for name in _METHOD)
    ]
    same = [arm for arm in alike if not _settings_apart(arm.info.spec, spec)]
    for arm in same or alike:
        apart = [name for name in _OF_SPEC if arm.info.spec.get(name) != spec.get(name)]
        why = [f"{name} is {arm.info.spec.get(name)}, there {spec.get(name)}" for name in apart]
        why += _settings_apart(arm.info.spec, spec)
        if spec.get("engine") != "embedded":
            why = [f"the run is of engine {spec.get('engine')}"]
        elif spec.get("temperature"):
            why = ["the run was drawn at a temperature"]
        if why:
            lines.append(f"no self-check of {_name(arm)} on its own run: {'; '.join(why)}")
        else:
            lines.append(_told(recorded, arm))
    return lines


def _settings_apart(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Say in which settings of the method two specs differ."""
    own, other = (spec.get("params") or {} for spec in (mine, theirs))
    return [
        f"{name} is {own.get(name, 'not set')}, there {other.get(name, 'not set')}"
        for name in sorted(own.keys() | other.keys())
        if own.get(name) != other.get(name)
    ]


def _told(recorded: dict[str, TrialRecord], arm: RunReader) -> str:
    trials = [record for record in arm.trials() if record.sample_id in recorded]
    pairs = [record.sub_scores["right"] for record in trials if "right" in record.sub_scores]
    right, asked = (int(sum(column)) for column in zip(*pairs, strict=True)) if pairs else (0, 0)
    other = [
        record.sample_id
        for record in trials
        if any(getattr(record.kv, name) != getattr(recorded[record.sample_id].kv, name)
               for name in _FIGURES)
    ]  # fmt: skip
    good = right == asked > 0 and not other
    said = f"{right:,} of {asked:,} tokens are its own best, in {len(trials)} sessions"
    events = f"; other events in {', '.join(other[:3])}" if other else "; the same events"
    verdict = "passed" if good else "FAILED"
    return f"self-check of {_name(arm)} on its own run: {verdict}, {said}{events}"


def _name(arm: RunReader) -> str:
    return f"{arm.info.spec['method']} at {arm.info.spec.get('budget')}"
