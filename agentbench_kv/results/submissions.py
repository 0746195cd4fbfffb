"""Whose submission a run of a leaderboard is, how far it was checked, and who replicated it.

Everything here was written by the leaderboard's keeper, into `submissions/` beside the runs;
nothing is taken from a submitter's files. The checks themselves are in `agentbench_kv.leaderboard`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from enum import StrEnum
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentbench_kv.results.files import file_sha

KEPT = Path("submissions")
STANDINGS = KEPT / "checked"
RERUNS = KEPT / "reruns"
REPLICATIONS = Path("replications")
Line = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\r\n]+$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._@+-]*$", max_length=200)]
Sha = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Label(StrEnum):
    """How far a run's figures were checked, each beyond the one before.

    `self-reported`: the records agree with each other and with what the spec implies. `re-scored`:
    the recorded tokens, played through the task again, give the same prompts, answers and scores.
    `re-run`: a random part was computed again and gave the same tokens.
    """

    SELF_REPORTED = "self-reported"
    RESCORED = "re-scored"
    RERUN = "re-run"


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class SubmittedRun(_Stored):
    """A run of a submission: its directory's name and the SHA-256 of its files.

    The one of `transcripts` is over the sorted lines `NAME SHA256` of that folder's files.
    """

    run_id: Name
    sha256: Annotated[dict[str, Sha], Field(max_length=16)]


class Manifest(_Stored):
    """The content of `submission.json`: whose it is, the method it is about, where to read more."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    who: Line
    method: Line
    link: Annotated[str, Field(pattern=r"^(https?://[^\s<>\"']+)?$", max_length=500)] = ""
    runs: Annotated[list[SubmittedRun], Field(min_length=1)]


class Replication(_Stored):
    """The same run, played by somebody else; never more trials of it."""

    path: str  # its directory, relative to the leaderboard's folder
    who: str
    label: Label
    score: float  # mean over its trials, a failed one as 0
    trials: int  # that both have
    equal: int  # of those, with equal generated tokens


class Standing(_Stored):
    """What the keeper found when a run was added."""

    run_id: str
    submission: str  # name of the manifest's copy, without its suffix
    records: Sha  # of the `samples.jsonl` that this is about
    label: Label
    notes: list[str]  # what could not be proved
    replication: Replication | None = None  # None for the first run of its id


class Rerun(_Stored):
    """A random part of a run, computed again by the keeper."""

    run_id: str
    records: Sha  # of the `samples.jsonl` that was compared with
    seed: int  # chose the trials
    played: int
    equal: int  # of those played, with the same tokens, the same KV account, the same score
    accounts: int
    scores: int
    differs: list[str]  # where each other trial first differs
    machine: str

    @property
    def confirms(self) -> bool:
        """Whether everything played came out as it was recorded."""
        return 0 < self.played == self.equal == self.accounts == self.scores


S = TypeVar("S", bound=_Stored)


def submissions(leaderboard: Path) -> dict[str, Manifest]:
    """Return the manifest that each run of a leaderboard's folder was added with.

    One that only lists a run which was there already is not that.
    """
    added = {
        (standing.run_id, standing.submission)
        for _, standing in _read(leaderboard / STANDINGS, Standing)
        if standing.replication is None
    }
    return {
        run.run_id: manifest
        for path, manifest in _read(leaderboard / KEPT, Manifest)
        for run in manifest.runs
        if (run.run_id, path.stem) in added
    }


def labels(leaderboard: Path) -> dict[str, Label]:
    """Return how far each submitted run of a leaderboard's folder was checked."""
    return {standing.run_id: _label(leaderboard, standing) for standing in standings(leaderboard)}


def replications(leaderboard: Path) -> dict[str, list[Replication]]:
    found: dict[str, list[Replication]] = {}
    for _, standing in _read(leaderboard / STANDINGS, Standing):
        if standing.replication is not None:
            label = _label(leaderboard, standing)
            known = standing.replication.model_copy(update={"label": label})
            found.setdefault(standing.run_id, []).append(known)
    return found


def standings(leaderboard: Path) -> Iterator[Standing]:
    """Yield what is known of each submitted run whose records are still those that were checked."""
    for _, standing in _read(leaderboard / STANDINGS, Standing):
        samples = leaderboard / standing.run_id / "samples.jsonl"
        if standing.replication is None and file_sha(samples) == standing.records:
            yield standing


def kept_name(run_id: str, records: str) -> str:
    """Return how a file is called that is about these records of this run."""
    # The same records may stand under another method, whose run that is not.
    return hashlib.sha256(f"{run_id}/{records}".encode()).hexdigest()[:16]


def reruns(leaderboard: Path, run_id: str, records: str) -> list[Rerun]:
    """Return the reruns of a run with these records, the last one last."""
    found = [
        (path.stem.rpartition("-")[2], each)
        for path, each in _read(leaderboard / RERUNS, Rerun)
        if (each.run_id, each.records) == (run_id, records)
    ]
    return [each for _, each in sorted(found, key=itemgetter(0))]


def standing_of(leaderboard: Path, run_id: str, records: str) -> tuple[Path, Standing] | None:
    """Return what the keeper found of a run with these records, and the file it is in."""
    return next(
        (
            (path, each)
            for path, each in _read(leaderboard / STANDINGS, Standing)
            if (each.run_id, each.records) == (run_id, records)
        ),
        None,
    )


def _label(leaderboard: Path, standing: Standing) -> Label:
    """Return the standing's label, or `re-run` if the last rerun confirmed the records."""
    last = reruns(leaderboard, standing.run_id, standing.records)[-1:]
    return Label.RERUN if last and last[0].confirms else standing.label


def _read(folder: Path, kind: type[S]) -> Iterator[tuple[Path, S]]:
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(ValidationError, OSError):
            yield path, kind.model_validate_json(path.read_bytes())
