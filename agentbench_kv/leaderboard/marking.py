"""Marking recorded answers again: what a score is made of where no token can be played again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentbench_kv.adapters.base import Sample, Task
from agentbench_kv.leaderboard.evidence import Checks, RunEvidence, differs, place
from agentbench_kv.leaderboard.replay import alike
from agentbench_kv.results.records import TrialStatus


def check_marks(evidence: RunEvidence, task: Task, samples: Mapping[str, Sample]) -> Checks:
    """Compare scores and their parts with what the transcripts' own answers say, if they do."""
    for key, record in evidence.trials.items():
        if key not in evidence.transcripts or record.status is not TrialStatus.SCORED:
            continue
        said = evidence.transcripts[key].transcript
        marked = task.mark(samples[key[0]], said)
        if marked is None:
            return
        pairs = [
            ("score", record.score, marked.score),
            *((f"metrics.{n}", record.metrics.get(n), v) for n, v in marked.metrics.items()),
            *_apart(said, marked.transcript, "transcript: transcript"),
        ]
        for name, one, other in pairs:
            if not alike(one, other):
                yield differs(place(key, name), one, other)


def _apart(said: Any, derived: Any, field: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield where a document has not what was derived of it; it may have more."""
    if isinstance(derived, Mapping) and isinstance(said, Mapping):
        for name, value in derived.items():
            yield from _apart(said.get(name), value, f"{field}.{name}")
    elif isinstance(derived, list) and isinstance(said, list) and len(said) == len(derived):
        for number, (one, other) in enumerate(zip(said, derived, strict=True)):
            yield from _apart(one, other, f"{field}[{number}]")
    elif not alike(said, derived):
        yield field, said, derived
