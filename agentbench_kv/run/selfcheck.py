"""Whether a method's own greedy run, played again, is what it was: the check of forced play."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.store import RunReader

# What a session's accounts must agree in.
_FIGURES = ("events", "evicted", "peak_live", "prefill_tokens", "decode_tokens")
_OF_SPEC = (
    "model",
    "method",
    "budget",
    "params",
    "dtype",
    "calibration",
    "context_limit",
    "kv_dtype",
)


def self_check(source: Path, arms: Sequence[RunReader]) -> list[str]:
    """Compare the arms that are the source run's own method with that run, a line each.

    Every token must be the arm's best one, and the events the same. A run that sampled says
    nothing, and one in another precision or by batches may differ where two tokens are as good.
    """
    own = RunReader(source)
    if own.info.spec.get("engine") != "embedded" or own.info.spec.get("temperature"):
        return []
    recorded = {record.sample_id: record for record in own.trials() if record.trial == 0}
    wanted = [own.info.spec.get(name) for name in _OF_SPEC]
    same = [arm for arm in arms if [arm.info.spec.get(name) for name in _OF_SPEC] == wanted]
    return [_told(recorded, arm) for arm in same]


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
    name = f"{arm.info.spec['method']} at {arm.info.spec.get('budget')}"
    good = right == asked > 0 and not other
    said = f"{right:,} of {asked:,} tokens are its own best, in {len(trials)} sessions"
    events = f"; other events in {', '.join(other[:3])}" if other else "; the same events"
    return f"self-check of {name} on its own run: {'passed' if good else 'FAILED'}, {said}{events}"
