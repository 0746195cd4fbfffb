"""The samples that changed between two sides, with how they ended and where to read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from agentbench_kv.results.groups import RunGroup
from agentbench_kv.results.records import TrialRecord

if TYPE_CHECKING:
    from agentbench_kv.results.contrast import Pair

Played = dict[tuple[int, int], tuple[Path, TrialRecord]]
"""Trials of one sample by index and seed, each with its run's folder."""


class Flip(BaseModel):
    """A sample whose figure differs.

    Attributes
    ----------
    base, cand : float
        Its score (mean of its trials) or size on each side.
    base_status, cand_status : str
        How the first trial ended that the sides scored differently, else the first.
    base_transcript, cand_transcript : str or None
        What that trial said; None if the run does not have it, as in a baseline.
    """

    model_config = ConfigDict(frozen=True)

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
    base: Mapping[str, tuple[float, float]],
    cand: Mapping[str, tuple[float, float]],
    moved: Mapping[str, float],
    most: int,
) -> list[Flip]:
    """List the samples that changed: the largest changes first, of equal ones losses first.

    Parameters
    ----------
    pairs : sequence of Pair
    base, cand : mapping of str to (float, float)
        Right and asked by `number of the pair/sample`.
    moved : mapping of str to float
        Change of each.
    most : int
        How many to list.
    """
    changed = [name for name, move in moved.items() if move]
    chosen = sorted(changed, key=lambda name: (-abs(moved[name]), moved[name], name))[:most]
    samples: dict[int, set[str]] = {}
    for number, _, sample in (name.partition("/") for name in chosen):
        samples.setdefault(int(number), set()).add(sample)
    played = {
        i: (_played(pairs[i].base, wanted), _played(pairs[i].cand, wanted))
        for i, wanted in samples.items()
    }
    found = []
    for name in chosen:
        number, _, sample = name.partition("/")
        theirs, mine = (side[sample] for side in played[int(number)])
        before, after = _telling(theirs, mine)
        found.append(
            Flip(
                task=pairs[int(number)].task,
                sample=sample,
                base=base[name][0] / base[name][1],
                cand=cand[name][0] / cand[name][1],
                base_status=before[1].status,
                cand_status=after[1].status,
                base_transcript=_transcript(*before),
                cand_transcript=_transcript(*after),
            )
        )
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
