"""Making a submission of runs, and adding a checked one to a leaderboard's folder."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from pydantic import BaseModel, ValidationError

from agentbench_kv.errors import UsageError
from agentbench_kv.leaderboard import evidence
from agentbench_kv.leaderboard.checking import RunVerdict, SubmissionVerdict, validate
from agentbench_kv.results import submissions
from agentbench_kv.results.files import file_sha, write_atomic, writing
from agentbench_kv.results.run_reader import RunReader, TrialKey
from agentbench_kv.results.submissions import Label, Manifest, Replication, Standing
from agentbench_kv.results.summary import summarize


def pack(
    runs: Sequence[RunReader],
    folder: Path,
    *,
    who: str,
    method: str,
    link: str = "",
    with_transcripts: bool = True,
) -> Manifest:
    """Copy runs into a new folder with a manifest; their summaries are derived again.

    Without transcripts scores can be neither derived again nor compared with a rerun. A UsageError
    if the folder is in use, or a name or the link is not acceptable.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty; name a new folder")
    listed = [{"run_id": run.info.run_id, "sha256": {}} for run in runs]
    try:  # refuse names before anything is written
        said = {"who": who, "method": method, "link": link, "runs": listed}
        manifest = Manifest.model_validate(said)
    except ValidationError as error:
        raise UsageError(f"the submission: {evidence.first_error(error)}") from None
    for run, entry in zip(runs, manifest.runs, strict=True):
        target = folder / entry.run_id
        with writing(target):
            copy_run(run.path, target, with_transcripts=with_transcripts)
        summarize(RunReader(target))
        entry.sha256.update(evidence.hashes(target))
    text = manifest.model_dump_json(indent=2, by_alias=True)
    write_atomic(folder / evidence.MANIFEST, text.encode() + b"\n")
    return manifest


def copy_run(source: Path, target: Path, *, with_transcripts: bool = True) -> None:
    """Copy the plain files of a run that this version knows, nothing else."""
    names = list(evidence.HASHED)
    if with_transcripts:
        names += [f"{evidence.TRANSCRIPTS}/{name}" for name in evidence.transcripts(source)]
    for name in names:
        if evidence.is_plain(source / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)


@dataclass(frozen=True)
class Added:
    """What adding a submission came to: run ids that are new, and replications of known ones."""

    new: list[str] = field(default_factory=list)
    replications: list[str] = field(default_factory=list)


def add(
    folder: Path, leaderboard: Path, *, rescore: bool = False, model: Path | None = None
) -> Added:
    """Validate a submission and copy its runs into a leaderboard's folder.

    A run that is there already with the same records is passed over. Other records of the same run
    are a replication: they are kept beside it, and never count as more of its trials. A UsageError
    if the submission is not valid, or holds an edited copy of a run that is there.
    """
    verdict = validate(folder, rescore=rescore, model=model)
    if verdict.findings:
        more = len(verdict.findings) - 1
        rest = f" (and {more} more; kvbench leaderboard validate lists them)" if more else ""
        raise UsageError(f"{folder}: {verdict.findings[0]}{rest}")
    places = {run.run_id: _place(folder, leaderboard, run.run_id) for run in verdict.runs}
    added = Added()
    submission = (folder / evidence.MANIFEST).read_bytes()
    name = hashlib.sha256(submission).hexdigest()[:16]
    if any(places.values()):
        _write(leaderboard / submissions.KEPT / f"{name}.json", submission)
    for run in verdict.runs:
        target = places[run.run_id]
        if target is None:
            _upgrade(leaderboard, run, folder)
            continue
        _copy(folder / run.run_id, target)
        replicates = target.parent != leaderboard
        (added.replications if replicates else added.new).append(run.run_id)
        _write_standing(leaderboard, target, verdict, run, name)
    return added


def _place(folder: Path, leaderboard: Path, name: str) -> Path | None:
    """Return where a run goes; None if it is there."""
    source, first = folder / name, leaderboard / name
    found = evidence.hashes(source)
    if not first.exists():
        _refuse_renamed(source, leaderboard)
        return first
    if not (first / "run.json").is_file():
        raise UsageError(f"{first} is no run; remove it or rename it")
    target = leaderboard / submissions.REPLICATIONS / f"{name}~{found['samples.jsonl'][:8]}"
    known = [first, *(leaderboard / submissions.REPLICATIONS).glob(f"{name}~*")]
    for hashed in map(evidence.hashes, known):
        # Transcripts aside.
        if all(hashed.get(file) == found.get(file) for file in evidence.HASHED):
            return None
    for each in known:
        if _measured(each) & _measured(source):
            raise UsageError(
                f"{source} is an edited copy of {each}: they share measurements that no two runs "
                "have; a replication is a run of one's own"
            )
    return target


def _refuse_renamed(source: Path, leaderboard: Path) -> None:
    """Refuse a run that was measured under another name: another method, say."""
    mine = _times(source)
    for path in sorted(leaderboard.glob("*/run.json")):
        both = mine & _times(path.parent)
        if len(both) > 1 and 2 * len(both) > len(mine):
            raise UsageError(
                f"{source} has the times of {path.parent} in {len(both)} trials, which no two runs "
                "have; name what was played as it was played"
            )


def _measured(path: Path) -> set[str | float]:
    """Return what two plays of the same run never have in common: the writer, the times."""
    return {RunReader(path).info.owner, *_times(path)}


def _times(path: Path) -> set[float]:
    return {record.timing.e2e_s for record in RunReader(path).trials() if record.timing.e2e_s}


def _upgrade(leaderboard: Path, run: RunVerdict, folder: Path) -> None:
    """Raise the label of a run that is there if it was checked further this time."""
    records = file_sha(folder / run.run_id / "samples.jsonl")
    if found := submissions.standing_of(leaderboard, run.run_id, records):
        path, old = found
        if list(Label).index(old.label) < list(Label).index(run.label):
            write_stored(path, old.model_copy(update={"label": run.label, "notes": run.notes}))


def _write_standing(
    leaderboard: Path, target: Path, verdict: SubmissionVerdict, run: RunVerdict, submission: str
) -> None:
    records = file_sha(target / "samples.jsonl")
    first = leaderboard / run.run_id
    standing = Standing(
        run_id=run.run_id,
        submission=submission,
        records=records,
        label=run.label,
        notes=run.notes,
        replication=None if target == first else _replication(target, first, verdict, run),
    )
    file = f"{submissions.kept_name(run.run_id, records)}.json"
    write_stored(leaderboard / submissions.STANDINGS / file, standing)


def _replication(
    target: Path, first: Path, verdict: SubmissionVerdict, run: RunVerdict
) -> Replication:
    trials = RunReader(target).trials()
    one, other = _generated(target), _generated(first)
    return Replication(
        path=str(target.relative_to(first.parent)),
        who=verdict.manifest.who,
        label=run.label,
        score=fmean(record.headline for record in trials),
        trials=len({record.key for record in trials}),
        equal=sum(one[key] == other[key] for key in one.keys() & other.keys()),
    )


def _generated(path: Path) -> dict[TrialKey, list[str]]:
    run = evidence.read_run(path, [])
    known = run.transcripts if run else {}
    return {key: each.generated for key, each in known.items() if each.generated}


def _copy(source: Path, target: Path) -> None:
    """Copy so that a half-copied run never lies in the leaderboard."""
    partial = target.parent / f".adding-{target.name}"
    with writing(target):
        shutil.rmtree(partial, ignore_errors=True)
        copy_run(source, partial)
        summarize(RunReader(partial))
        partial.rename(target)


def write_stored(path: Path, content: BaseModel) -> None:
    """Write what the keeper found out, for `results.submissions` to read."""
    _write(path, content.model_dump_json(indent=2).encode() + b"\n")


def _write(path: Path, content: bytes) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content)
