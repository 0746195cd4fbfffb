"""A baseline: runs in one JSON file, small enough to commit and complete enough to compare with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, PlainValidator, ValidationError

from agentbench_kv import __version__
from agentbench_kv.errors import UsageError
from agentbench_kv.results.files import write_atomic
from agentbench_kv.results.lines import Lines
from agentbench_kv.results.reader import latest_trials
from agentbench_kv.results.records import REFUSED, TrialRecord, TrialStatus, checked, encode
from agentbench_kv.results.runinfo import RunInfo
from agentbench_kv.results.runs import Run
from agentbench_kv.results.summary import derive

SCHEMA = 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]*")
_WRITER = "kvbench baseline save NAME RUN writes one"
_ANY = TrialRecord(sample_id="any", trial=0, seed=0, status=TrialStatus.TIMEOUT)
_REQUIRED = {"sample_id", "trial", "seed", "status"}
_NOT_KEPT = {"transcript", "error", "usage"}


class SavedRun(BaseModel, frozen=True):
    """One run: spec and provenance, and the record of every trial without its texts.

    Files of kvbench 0.1 hold a summary besides, which nothing reads.
    """

    info: RunInfo
    trials: list[Annotated[TrialRecord, PlainValidator(lambda data: checked(data, TrialRecord))]]

    def loaded(self, path: Path) -> Run:
        """Return it as a run; its figures are derived from the records here."""
        records = latest_trials(self.trials)
        summary = derive(self.info, Lines(records))
        return Run(path / self.info.run_id, self.info, records, summary, lambda: records)


class Baseline(BaseModel, frozen=True):
    """The content of the file."""

    schema_version: Literal[1]
    name: str
    kvbench: str
    runs: list[SavedRun]

    def loaded(self, path: Path) -> list[Run]:
        """Return the runs; `path` is where the file came from."""
        return [run.loaded(path) for run in self.runs]


def save_baseline(name: str, runs: Sequence[Run], folder: Path, force: bool = False) -> Path:
    """Write finished, valid runs to `folder/name.json`; `force` replaces an older file.

    Several runs of one method and task are its repetitions. A UsageError if the name is no file
    name or taken, or a run is not fit to be compared with; a PrerequisiteError if the file cannot
    be written.
    """
    if not NAME.fullmatch(name):
        raise UsageError(f"baseline name {name!r}: use letters, digits and . _ @ + - only")
    for run in runs:
        if run.info.status != "complete" or not run.trials.scores:
            raise UsageError(
                f"{run.path} is not finished ({run.info.status}); run its command again first"
            )
        if not run.valid:
            raise UsageError(f"{run.path} is not valid ({run.reason}); nothing could rest on it")
    path = folder / f"{name}.json"
    if path.exists() and not force:
        raise UsageError(f"{path} exists; --force replaces it, another NAME keeps both")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {folder}: {error.strerror}; choose another --to") from error
    write_atomic(path, _document(name, runs))
    return path


def read_baseline(raw: bytes, source: str) -> Baseline:
    """Return a baseline; a UsageError naming `source` if it is none, or of another version."""
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


def _document(name: str, runs: Sequence[Run]) -> bytes:
    """Encode with one trial a line: a committed baseline then has readable differences."""
    head = f'{{"schema_version": {SCHEMA}, "name": "{name}", "kvbench": "{__version__}",'
    return b'%s\n"runs": [\n%s\n]}\n' % (head.encode(), b",\n".join(map(_run, runs)))


def _run(run: Run) -> bytes:
    # Which process on which machine wrote the run is nobody's business in a committed file.
    info = run.info.model_copy(update={"pid": 1, "host": "saved", "owner": "saved"})
    return b'{"info": %s,\n"trials": [\n%s\n]}' % (
        info.model_dump_json().encode(),
        b",\n".join(map(_trial, run.records())),
    )


def _trial(record: TrialRecord) -> bytes:
    fields = msgspec.to_builtins(record).items()
    kept = {name: value for name, value in fields if name not in _NOT_KEPT}
    return encode(_changed(kept, msgspec.to_builtins(_ANY)))


def _changed(fields: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Leave out what has its default, in the parts of a record too."""
    return {
        name: _changed(value, defaults[name]) if isinstance(value, dict) else value
        for name, value in fields.items()
        if name in _REQUIRED or value != defaults.get(name, ...)
    }
