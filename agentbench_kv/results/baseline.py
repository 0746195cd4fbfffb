"""A baseline: runs in one JSON file, small enough to commit and complete enough to compare with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError

from agentbench_kv import __version__
from agentbench_kv.errors import UsageError
from agentbench_kv.results.arms import Arm
from agentbench_kv.results.files import write_atomic
from agentbench_kv.results.records import REFUSED, TrialRecord, TrialStatus, checked, encode
from agentbench_kv.results.runinfo import RunInfo
from agentbench_kv.results.summary import Summary

SCHEMA = 1
_WRITER = "kvbench baseline save NAME RUN writes one"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]*")
_ANY = TrialRecord(sample_id="any", trial=0, seed=0, status=TrialStatus.TIMEOUT)
_REQUIRED = {"sample_id", "trial", "seed", "status"}
_NOT_KEPT = {"transcript", "error", "usage"}


def _record(data: Any) -> TrialRecord:
    return checked(data, TrialRecord)


class SavedRun(BaseModel):
    """One run: spec and provenance, figures, and the record of every trial without its texts."""

    model_config = ConfigDict(frozen=True)

    info: RunInfo
    summary: Summary
    trials: list[Annotated[TrialRecord, PlainValidator(_record)]]


class Baseline(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(frozen=True)

    schema_version: Literal[1]
    name: str
    kvbench: str
    runs: list[SavedRun]

    def arms(self, path: Path) -> list[Arm]:
        """Return the runs as arms; `path` is where the file came from."""
        return [
            SavedArm(path / run.info.run_id, run.info, run.summary, saved=tuple(run.trials))
            for run in self.runs
        ]


@dataclass(frozen=True)
class SavedArm(Arm):
    """A run out of a baseline: its records are here, not in a folder."""

    saved: tuple[TrialRecord, ...] = ()

    @cached_property
    def trials(self) -> list[TrialRecord]:
        """The record of each (sample, trial), sorted by key."""
        return sorted(self.saved, key=lambda record: record.key)


def save_baseline(name: str, arms: Sequence[Arm], folder: Path) -> Path:
    """Write runs to `folder/name.json`, replacing an older baseline of that name.

    Parameters
    ----------
    name : str
        Letters, digits and `._@+-`.
    arms : sequence of Arm
        Finished runs; several of one method and task are its repetitions.
    folder : Path
        Made if it is not there.

    Raises
    ------
    UsageError
        If the name is no file name or a run is not finished.
    PrerequisiteError
        If the file cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"baseline name {name!r}: use letters, digits and . _ @ + - only")
    for arm in arms:
        if arm.summary.status != "complete" or not arm.trials:
            raise UsageError(
                f"{arm.path} is not finished ({arm.summary.status}); run its command again first"
            )
    path = folder / f"{name}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {folder}: {error.strerror}; choose another --to") from error
    write_atomic(path, _document(name, arms))
    return path


def read_baseline(raw: bytes, source: str) -> Baseline:
    """Check and return a baseline.

    Parameters
    ----------
    raw : bytes
        The file.
    source : str
        Where it came from, for the message.

    Raises
    ------
    UsageError
        If it is not a baseline, or one of another version.
    """
    try:
        document = msgspec.json.decode(raw)
    except REFUSED as error:
        raise UsageError(f"{source} is not a baseline ({error}); {_WRITER}") from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version is None:
        raise UsageError(f"{source} is not a baseline; {_WRITER}")
    if version != SCHEMA:
        raise UsageError(
            f"{source} is a baseline of format {version!r}, this kvbench reads {SCHEMA}; "
            "save it again with kvbench baseline save"
        )
    try:
        return Baseline.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"{source} is damaged at {place}: {first['msg']}") from error


def _document(name: str, arms: Sequence[Arm]) -> bytes:
    """Encode with one trial a line: a committed baseline then has readable differences."""
    head = f'{{"schema_version": {SCHEMA}, "name": "{name}", "kvbench": "{__version__}",'
    return b'%s\n"runs": [\n%s\n]}\n' % (head.encode(), b",\n".join(map(_run, arms)))


def _run(arm: Arm) -> bytes:
    # Which process on which machine wrote the run is nobody's business in a committed file.
    info = arm.info.model_copy(update={"pid": 1, "host": "saved", "owner": "saved"})
    return b'{"info": %s,\n"summary": %s,\n"trials": [\n%s\n]}' % (
        info.model_dump_json().encode(),
        arm.summary.model_dump_json().encode(),
        b",\n".join(map(_trial, arm.trials)),
    )


def _trial(record: TrialRecord) -> bytes:
    fields = msgspec.to_builtins(record)
    kept = {name: value for name, value in fields.items() if name not in _NOT_KEPT}
    return encode(_changed(kept, msgspec.to_builtins(_ANY)))


def _changed(fields: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Leave out what has its default, in the parts of a record too."""
    return {
        name: _changed(value, defaults[name]) if isinstance(value, dict) else value
        for name, value in fields.items()
        if name in _REQUIRED or value != defaults.get(name, ...)
    }
