"""The samples that changed between two sides, with how they ended and where to read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentbench_kv.results.groups import RunGroup
from agentbench_kv.results.records import TrialRecord

if TYPE_CHECKING:
    from agentbench_kv.results.contrast import Pair

Played = dict[tuple[int, int], tuple[Path, TrialRecord]]
"""Trials of one sample by index and seed, each with its run's folder."""


@dataclass(frozen=True)
class Flip:
    """A sample whose figure differs: its score (mean of its trials) or size on each side.

    Statuses and transcripts are of the first trial that the sides scored differently, else the
    first; a transcript is None if the run does not have it, as in a baseline.
    """

    task: str
    sample: str
    base: float
    cand: float
    base_status: str
    cand_status: str
    base_transcript: str | None
    cand_transcript: str | None


def flips(
    pairs: Sequence[Pair],
    was: Mapping[str, float],
    now: Mapping[str, float],
    moved: Mapping[str, float],
    most: int,
) -> list[Flip]:
    """List the samples that changed: the largest changes first, of equal ones losses first.

    Figures and changes are by `number of the pair/sample`.
    """
    changed = [name for name, move in moved.items() if move]
    chosen = sorted(changed, key=lambda name: (-abs(moved[name]), moved[name], name))[:most]
    places = [(int(number), sample) for number, _, sample in (n.partition("/") for n in chosen)]
    samples: dict[int, set[str]] = {}
    for i, sample in places:
        samples.setdefault(i, set()).add(sample)
    played = {
        i: (_played(pairs[i].base, wanted), _played(pairs[i].cand, wanted))
        for i, wanted in samples.items()
    }
    found = []
    for name, (i, sample) in zip(chosen, places, strict=True):
        before, after = _telling(*(side[sample] for side in played[i]))
        statuses = before[1].status, after[1].status
        transcripts = _transcript(*before), _transcript(*after)
        found.append(Flip(pairs[i].task, sample, was[name], now[name], *statuses, *transcripts))
    return found


def _played(group: RunGroup, wanted: set[str]) -> dict[str, Played]:
    """Read the trials of some samples again; of a trial played twice the earliest counts."""
    found: dict[str, Played] = {}
    for run in group.runs:
        for record in run.records():
            if record.sample_id in wanted:
                trials = found.setdefault(record.sample_id, {})
                trials.setdefault((record.trial, record.seed), (run.path, record))
    return found


def _telling(base: Played, cand: Played) -> tuple[tuple[Path, TrialRecord], ...]:
    """Choose a trial that both sides played and scored differently, else the first of each."""
    for key in sorted(base.keys() & cand.keys()):
        if base[key][1].headline != cand[key][1].headline:
            return base[key], cand[key]
    return base[min(base)], cand[min(cand)]


def _transcript(folder: Path, record: TrialRecord) -> str | None:
    path = folder / record.transcript if record.transcript else None
    return str(path) if path and path.is_file() else None
