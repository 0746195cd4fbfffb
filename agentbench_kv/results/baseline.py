"""The sides of a comparison: a run, a folder, a URL, or a baseline of runs in one JSON file.

A baseline is small enough to commit and complete enough to compare with.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, PlainValidator, ValidationError

from agentbench_kv import __version__
from agentbench_kv.errors import UsageError
from agentbench_kv.results.files import children, locate, reaching, write_atomic
from agentbench_kv.results.lines import Lines
from agentbench_kv.results.records import REFUSED, TrialRecord, TrialStatus, checked, encode
from agentbench_kv.results.run_info import RunInfo
from agentbench_kv.results.run_reader import latest_trials
from agentbench_kv.results.runs import Problem, Run, load_runs, run_folders
from agentbench_kv.results.store import RunStore
from agentbench_kv.results.summary import derive

SCHEMA = 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]*")
_WRITER = "kvbench baseline save NAME RUN writes one"
_ANY = TrialRecord(sample_id="any", trial=0, seed=0, status=TrialStatus.TIMEOUT)
_REQUIRED = {"sample_id", "trial", "seed", "status"}
_NOT_KEPT = {"transcript", "error", "usage"}


class SavedRun(BaseModel, frozen=True):
    """One run: spec and provenance, and the record of every trial without its texts."""

    # Files of kvbench 0.1 hold a summary besides, which nothing reads.

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
        if run.info.status != "complete" or not run.scores:
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
    head = f'{{"schema_version": {SCHEMA}, "name": "{name}", "kvbench": "{__version__}",'
    # One trial a line: a committed baseline then has readable differences.
    write_atomic(path, b'%s\n"runs": [\n%s\n]}\n' % (head.encode(), b",\n".join(map(_run, runs))))
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


BASELINES = Path("baselines")
_FILES = ("run.json", "samples.jsonl")
_MOST_COMMANDS = 4

# Parts of a spec with the option of `kvbench run` that sets each, and what it is without one.
_OPTIONS = {
    "task": ("task", None), "method": ("method", None), "budget": ("budget", None),
    "engine": ("engine", "embedded"), "model": ("model", "micro"), "limit": ("limit", None),
    "trials": ("trials", 1), "seed": ("seed", 0), "concurrency": ("concurrency", None),
    "temperature": ("temperature", 0.0), "max_tokens": ("max-tokens", 1024),
    "timeout_s": ("timeout", 3600.0), "dtype": ("dtype", "float32"), "device": ("device", "auto"),
    "kv_dtype": ("kv-dtype", ""), "tool_syntax": ("tool-syntax", ""),
    "context_limit": ("context-limit", 0), "max_live_tokens": ("max-live-tokens", 0),
}  # fmt: skip


@contextmanager
def open_sides(
    sources: Sequence[str], out: Path
) -> Iterator[tuple[list[list[Run]], list[Problem]]]:
    """Load the sides of a comparison; their records may be read inside the context only.

    A source is a run directory, a folder of runs (or of folders of runs), a baseline file, the name
    of one in `baselines/`, the id of a run in `out`, or a URL of any of these that fsspec reaches.
    Yields the runs of each source, and what could not be read. A UsageError or PrerequisiteError if
    a source is none of these or cannot be reached.
    """
    with tempfile.TemporaryDirectory(prefix="kvbench-") as scratch:
        found = [
            _remote(source, Path(scratch) / str(i)) if "://" in source else _local(source, out)
            for i, source in enumerate(sources)
        ]
        yield [runs for runs, _ in found], [problem for _, odd in found for problem in odd]


def unread(sides: Sequence[Sequence[Run]], problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems that are whole runs of some sides, and not lines of one."""
    known = {run.path for runs in sides for run in runs}
    return [problem for problem in problems if problem.path not in known]


def absent_baseline(source: str, out: Path) -> Path | None:
    """Return the baseline file that a source means where there is none, nor any run; else None."""
    named = "/" not in source and not source.endswith(".json")
    path = BASELINES / f"{source}.json" if named else Path(source)
    if "://" in source or path.suffix != ".json" or not NAME.fullmatch(path.stem):
        return None
    places = (Path(source), path, out / source / "run.json")
    return None if any(place.exists() for place in places) else path


def how_to_make(baseline: Path, runs: Sequence[Run], out: Path) -> str:
    """Say which command makes a baseline like some runs; without any, what it looks like."""
    made = [f"kvbench run {run_options(run)} --out {shlex.quote(str(out))}" for run in runs]
    kept = [shlex.quote(str(out / run.run_id)) for run in runs]
    if not 1 <= len(runs) <= _MOST_COMMANDS:
        made, kept = ["kvbench run ..."], ["RUN"]
    folder = "" if baseline.parent == BASELINES else f" --to {shlex.quote(str(baseline.parent))}"
    save = f"kvbench baseline save {shlex.quote(baseline.stem)} {' '.join(kept)}{folder}"
    return (
        f"no baseline {baseline}, nor a run of that name; on the version to compare with: "
        f"{' && '.join([*made, save])} (kvbench compare --bootstrap takes CAND itself)"
    )


def run_options(run: Run) -> str:
    """Return the options of `kvbench run` that make a run, without those at their default."""
    given = [
        (f"--{option}", str(run.spec[name]))
        for name, (option, default) in _OPTIONS.items()
        if run.spec.get(name) not in (None, default)
    ]
    changed = run.info.provenance.get("changed_settings")
    settings = changed.items() if isinstance(changed, dict) else ()
    given += [("--set", f"{name}={value}") for name, value in settings]
    arguments = run.spec.get("engine_args") or {}
    given += [("--engine-arg", f"{name}={value}") for name, value in arguments.items()]
    flags = [" --allow-untested-engine"] * bool(run.spec.get("allow_untested"))
    return " ".join(f"{option} {shlex.quote(value)}" for option, value in given) + "".join(flags)


def _local(source: str, out: Path) -> tuple[list[Run], list[Problem]]:
    if not source.strip():
        raise UsageError("one of the runs has no name; give a run, a folder of runs or a baseline")
    path, saved = Path(source), BASELINES / f"{source}.json"
    if path.is_dir():
        return load_runs([path] if run_folders([path]) else [path, *sorted(path.glob("*/"))])
    if not path.is_file() and saved.is_file() and not (out / source).exists():
        path = saved
    if not path.is_file():
        return load_runs([RunStore(out).find(source).path])
    return read_baseline(path.read_bytes(), str(path)).loaded(path), []


def _remote(url: str, scratch: Path) -> tuple[list[Run], list[Problem]]:
    fs, root = locate(url)
    with reaching(url):
        if fs.isfile(root):
            return read_baseline(fs.cat_file(root), url).loaded(Path(root)), []
        copied = [_copy(fs, folder, scratch) for folder in (root, *children(fs, root))]
    if not any(copied):
        raise UsageError(f"no run in {url}; name a run, a folder of runs or a baseline file")
    return load_runs([scratch])


def _copy(fs: Any, folder: str, scratch: Path) -> bool:
    """Fetch what a comparison reads of one run; whether it is a run at all."""
    name = PurePosixPath(folder).name
    if not fs.isfile(f"{folder}/{_FILES[0]}") or name in ("", ".", ".."):
        return False
    target = scratch / name
    target.mkdir(parents=True, exist_ok=True)
    for file in _FILES:
        if fs.isfile(f"{folder}/{file}"):
            (target / file).write_bytes(fs.cat_file(f"{folder}/{file}"))
    return True
