"""Submissions to a leaderboard: runs that anybody can recompute, with a manifest.

A submission is a folder with one directory per run (`run.json`, `samples.jsonl`, `summary.json`,
perhaps `turns.jsonl` and transcripts) and `submission.json`, which says whose it is and holds the
SHA-256 of the files that figures are derived from.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentbench_kv.errors import UsageError
from agentbench_kv.results.files import write_atomic, writing
from agentbench_kv.results.reader import RunReader
from agentbench_kv.results.runinfo import read_info
from agentbench_kv.results.summary import FILE as SUMMARY
from agentbench_kv.results.summary import Summary, build, summarize
from agentbench_kv.results.validity import RunState

__all__ = [
    "MANIFEST",
    "Finding",
    "Manifest",
    "SubmittedRun",
    "add",
    "pack",
    "submissions",
    "validate",
]

MANIFEST = "submission.json"
HASHED = ("samples.jsonl", "run.json", "turns.jsonl")
_NEEDED = ("samples.jsonl", "run.json", SUMMARY)
_KEPT = (*HASHED, SUMMARY)
_RECORDS = "submissions"
_EXACT = 1e-9
# Ends of bootstrap intervals move a little with the version of scipy.
_ENDS = 0.01

Line = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\r\n]+$")]


class SubmittedRun(BaseModel):
    """A run of a submission: its directory's name and the SHA-256 of those `HASHED` it has."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._@+-]*$", max_length=200)]
    sha256: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]


class Manifest(BaseModel):
    """The content of `submission.json`.

    Attributes
    ----------
    schema_version : int
        1; `schema` in the file.
    who, method : str
        Whose submission it is, and the method it is about.
    link : str
        Where to read more: a web address, or empty.
    runs : list of SubmittedRun
        At least one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    who: Line
    method: Line
    link: Annotated[str, Field(pattern=r"^(https?://[^\s<>\"']+)?$", max_length=500)] = ""
    runs: Annotated[list[SubmittedRun], Field(min_length=1)]


@dataclass(frozen=True)
class Finding:
    """What is wrong with a submission: the run (empty: the manifest), the field, the words."""

    run: str
    field: str
    text: str

    def __str__(self) -> str:
        """Return one line."""
        return ": ".join(part for part in (self.run, self.field, self.text) if part)


def validate(folder: Path) -> list[Finding]:
    """Recompute a submission and return everything that is wrong with it.

    Raises
    ------
    UsageError
        If there is no manifest or it cannot be read as one.
    """
    manifest = _manifest(folder)
    listed = [run.run_id for run in manifest.runs]
    findings = [
        Finding(name, "", "listed twice")
        for name in sorted({n for n in listed if listed.count(n) > 1})
    ]
    present = {path.parent.name for path in folder.glob("*/run.json")}
    findings += [
        Finding(name, "", f"not listed in {MANIFEST}") for name in sorted(present - set(listed))
    ]
    for run in manifest.runs:
        findings += _check_run(folder / run.run_id, run)
    return findings or _check_method(folder, manifest)


def pack(
    runs: Sequence[RunReader],
    folder: Path,
    *,
    who: str,
    method: str,
    link: str = "",
    transcripts: bool = False,
) -> Manifest:
    """Make a submission of runs; their summaries are derived again.

    Parameters
    ----------
    runs : sequence of RunReader
        The runs, left as they are.
    folder : Path
        Must not exist or be empty.
    who, method, link : str
        As `Manifest` holds them.
    transcripts : bool
        Whether to take the transcripts along.

    Raises
    ------
    UsageError
        If the folder is in use, or a name or the link is not acceptable.
    PrerequisiteError
        If it cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty; name a new folder for the submission")
    listed = [{"run_id": run.info.run_id, "sha256": _hashes(run.path)} for run in runs]
    manifest = _read_manifest({"who": who, "method": method, "link": link, "runs": listed})
    for run in runs:
        target = folder / run.info.run_id
        with writing(target):
            _copy(run.path, target, transcripts)
        summarize(RunReader(target))
    text = manifest.model_dump_json(indent=2, by_alias=True)
    write_atomic(folder / MANIFEST, text.encode() + b"\n")
    return manifest


def add(folder: Path, leaderboard: Path) -> list[str]:
    """Copy a submission that `validate` found nothing wrong with into a leaderboard's folder.

    The runs lie directly in it, so that `kvbench report` shows them; manifests in `submissions/`.

    Returns
    -------
    list of str
        The runs that were not there yet.

    Raises
    ------
    UsageError
        If the submission is not valid, or another run of the same name is there.
    PrerequisiteError
        If the leaderboard cannot be written.
    """
    findings = validate(folder)
    if findings:
        raise UsageError(f"{folder}: {findings[0]}" + _more(len(findings) - 1))
    manifest = _manifest(folder)
    new = [run.run_id for run in manifest.runs if not _is_there(leaderboard / run.run_id, run)]
    for name in new:
        _place(folder / name, leaderboard / name)
    content = (folder / MANIFEST).read_bytes()
    record = leaderboard / _RECORDS / f"{hashlib.sha256(content).hexdigest()[:16]}.json"
    with writing(record):
        record.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(record, content)
    return new


def submissions(leaderboard: Path) -> dict[str, Manifest]:
    """Return the manifest of each run that was added to a leaderboard's folder.

    A manifest that is not one is left out.
    """
    found: dict[str, Manifest] = {}
    for path in sorted((leaderboard / _RECORDS).glob("*.json")):
        with contextlib.suppress(ValidationError, OSError):
            manifest = Manifest.model_validate_json(path.read_bytes())
            found |= {run.run_id: manifest for run in manifest.runs}
    return found


def _more(number: int) -> str:
    return f" (and {number} more; kvbench leaderboard validate lists them)" if number else ""


def _manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    if not path.is_file():
        raise UsageError(
            f"{folder} is not a submission: no {MANIFEST}; kvbench leaderboard pack makes one"
        )
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UsageError(f"{path}: {_first(error)}") from error


def _read_manifest(content: Mapping[str, Any]) -> Manifest:
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise UsageError(f"the submission: {_first(error)}") from error


def _first(error: ValidationError) -> str:
    detail = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}"


def _check_run(path: Path, listed: SubmittedRun) -> list[Finding]:
    """Check one run; figures are compared only where the files are the ones that were promised."""
    name = listed.run_id
    missing = [file for file in _NEEDED if not _is_plain(path / file)]
    if missing:
        return [Finding(name, file, "is missing or not a plain file") for file in missing]
    found, promised = _hashes(path), listed.sha256
    broken = [
        Finding(name, file, f"sha256 is {found.get(file)}, {MANIFEST} says {promised.get(file)}")
        for file in HASHED
        if found.get(file) != promised.get(file)
    ]
    if broken:
        return broken
    try:
        info, stored = read_info(path), Summary.model_validate_json((path / SUMMARY).read_bytes())
    except ValidationError as error:
        return [Finding(name, f"{SUMMARY}: {_first(error)}", "")]
    except UsageError as error:
        return [Finding(name, "run.json", str(error))]
    if info is None or info.run_id != name:
        return [Finding(name, "run.json", f"run_id is {info and info.run_id}")]
    return _check_summary(name, stored, build(RunReader(path)))


def _check_summary(name: str, stored: Summary, derived: Summary) -> list[Finding]:
    mine, theirs = derived.model_dump(mode="json"), stored.model_dump(mode="json")
    findings = [
        Finding(name, f"{SUMMARY}: {field}", f"is {said!r}, the records give {true!r}")
        for field, said, true in _differences(theirs, mine)
    ]
    if derived.validity.state is not RunState.VALID:
        reasons = "; ".join(derived.validity.reasons)
        findings.append(Finding(name, "validity", f"{derived.validity.state.value}: {reasons}"))
    if derived.alien_lines:
        text = f"{derived.alien_lines} lines are no trial records of this version"
        findings.append(Finding(name, "samples.jsonl", text))
    return findings


def _differences(stored: Any, derived: Any, field: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield field, stored and derived value of each leaf that differs."""
    if isinstance(stored, dict) and isinstance(derived, dict):
        for key in sorted(stored.keys() | derived.keys()):
            place = f"{field}.{key}" if field else key
            yield from _differences(stored.get(key), derived.get(key), place)
    elif not _same(stored, derived, field):
        yield field, stored, derived


def _same(stored: Any, derived: Any, field: str) -> bool:
    numbers = isinstance(stored, int | float) and isinstance(derived, int | float)
    if not numbers or isinstance(stored, bool):
        return bool(stored == derived)
    tolerance = _ENDS if field.endswith((".low", ".high")) else _EXACT
    return math.isclose(stored, derived, rel_tol=_EXACT, abs_tol=tolerance)


def _check_method(folder: Path, manifest: Manifest) -> list[Finding]:
    infos = [RunReader(folder / run.run_id).info for run in manifest.runs]
    methods = {str(info.spec.get("method")).partition("@")[0] for info in infos}
    if manifest.method.partition("@")[0] in methods:
        return []
    return [Finding("", "method", f"is {manifest.method!r}, the runs are of {sorted(methods)}")]


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and not path.parent.is_symlink()


def _hashes(path: Path) -> dict[str, str]:
    found = {}
    for name in HASHED:
        with contextlib.suppress(FileNotFoundError), (path / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _is_there(path: Path, run: SubmittedRun) -> bool:
    """Whether the same run was added before."""
    if not path.exists():
        return False
    if _hashes(path) == dict(run.sha256):
        return True
    raise UsageError(
        f"{path} holds another run of this name; remove it or rename the submitted one"
    )


def _place(source: Path, target: Path) -> None:
    """Copy so that a half-copied run never lies in the leaderboard."""
    partial = target.parent / f".adding-{target.name}"
    with writing(target):
        shutil.rmtree(partial, ignore_errors=True)
        _copy(source, partial, transcripts=True)
        partial.rename(target)


def _copy(source: Path, target: Path, transcripts: bool) -> None:
    """Copy the plain files of a run that this version knows, nothing else."""
    names = list(_KEPT)
    if transcripts:
        names += [str(path.relative_to(source)) for path in source.glob("transcripts/*.json")]
    for name in names:
        if _is_plain(source / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
