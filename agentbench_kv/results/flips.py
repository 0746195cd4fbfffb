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
    before = _played([pair.base for pair in pairs], chosen)
    after = _played([pair.cand for pair in pairs], chosen)
    found = []
    for name in chosen:
        number, _, sample = name.partition("/")
        old, new = _telling(before[name], after[name])
        ends = old[1].status, new[1].status, _transcript(*old), _transcript(*new)
        found.append(Flip(pairs[int(number)].task, sample, was[name], now[name], *ends))
    return found


def _played(groups: Sequence[RunGroup], chosen: Sequence[str]) -> dict[str, Played]:
    """Read the trials of some samples again; of a trial played twice the earliest counts."""
    found: dict[str, Played] = {name: {} for name in chosen}
    for i, group in enumerate(groups):
        for run in group.runs:
            for record in run.records():
                trials = found.get(f"{i}/{record.sample_id}", {})
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
