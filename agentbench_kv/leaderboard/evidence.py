"""A submission's files, read strictly: manifest, listing, hashes, and the records of each run.

A submission is somebody else's text. Numbers beyond 64 bits, NaN, the same key twice, endless
nesting and half characters are what later code would fail on, or read in two ways.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from agentbench_kv.engines.base import Capability
from agentbench_kv.engines.core.memory import memory_method
from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.methods.dropping.policy import DropMethod
from agentbench_kv.registry import load_engine
from agentbench_kv.results.files import file_sha
from agentbench_kv.results.lines import Lines
from agentbench_kv.results.records import TrialRecord, TrialStatus, TurnRecord
from agentbench_kv.results.run_info import RunInfo
from agentbench_kv.results.run_reader import RunReader, TrialKey, latest_turns
from agentbench_kv.results.submissions import Manifest, SubmittedRun
from agentbench_kv.results.summary import FILE as SUMMARY
from agentbench_kv.run.spec import RunSpec

MANIFEST = "submission.json"
HASHED = ("samples.jsonl", "run.json", "turns.jsonl")  # every submitted run has them
TRANSCRIPTS = "transcripts"
_KNOWN = frozenset({*HASHED, SUMMARY, TRANSCRIPTS})

# Engines whose turns account for every token; a server may have stopped one token later.
OWN = frozenset({"embedded", "scripted"})
# Ends that no token proves. Such a trial counts 0, and its session may have been left anywhere.
CUT_OFF = frozenset({TrialStatus.TIMEOUT, TrialStatus.ENGINE_ERROR, TrialStatus.USER_ERROR})
_MOST_SHOWN = 160  # characters of a value in a finding
_DEEPEST = 64  # levels of JSON
_LARGEST = 2**63 - 1
_MOST_BYTES = 64 << 20  # of a document; of a file of records 16 times as many


@dataclass(frozen=True)
class Fault:
    """What is wrong, and refuses the submission."""

    field: str
    text: str
    run: str = ""  # empty of the manifest, and until a run's faults are gathered

    def __str__(self) -> str:
        return ": ".join(part for part in (self.run, self.field, self.text) if part)


@dataclass(frozen=True)
class Note:
    """Something that could not be checked, and why."""

    text: str


class Stop(Note):
    """A note for which a run cannot be called re-scored."""


Checks = Iterator[Fault | Note]


def differs(field: str, said: Any, derived: Any) -> Fault:
    return Fault(field, f"is {shown(said)}, expected {shown(derived)}")


def expect(field: str, said: Any, derived: Any) -> Checks:
    """Find a value that is not the derived one."""
    if said != derived:
        yield differs(field, said, derived)


def place(key: TrialKey, field: str) -> str:
    return f"sample {key[0]} trial {key[1]}: {field}"


def shown(value: Any) -> str:
    """Return a value on one short line, whatever it holds."""
    try:
        text = printable(repr(value))
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def printable(text: str) -> str:
    """Return a text without the half characters that a terminal refuses."""
    return text.encode("utf-8", "replace").decode("utf-8")


class RecordedEvent(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`engines.base.KVEvent` as a transcript has it."""

    decoded: int
    logical: int
    live_before: int
    live_after: int
    rows_moved: int


class RecordedTranscript(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A transcript file: the conversation, what the method did, the ids of every generation."""

    transcript: Any = None
    error: str | None = None
    events: list[RecordedEvent] = []
    facts: list[Any] = []
    generated: list[str] = []

    @property
    def tokens(self) -> list[list[int]]:
        """The generated ids; a ValueError if one is none."""
        return [[int(word) for word in text.split()] for text in self.generated]


@dataclass(frozen=True)
class RunEvidence:
    """One run, whose files were read without a finding."""

    path: Path
    info: RunInfo
    spec: RunSpec
    attempts: dict[TrialKey, list[TrialRecord]]  # all records of a trial, in order
    turns: dict[TrialKey, list[TurnRecord]]  # of a trial's last attempt
    transcripts: dict[TrialKey, RecordedTranscript] = field(default_factory=dict)  # or none

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def trials(self) -> dict[TrialKey, TrialRecord]:
        """The record that counts of every trial: the last."""
        return {key: records[-1] for key, records in self.attempts.items()}

    @cached_property
    def at_text_level(self) -> bool:
        """Whether an endpoint was asked, whose tokens and cache nobody sees."""
        try:
            return Capability.TEXT in load_engine(self.spec.engine).capabilities
        except KVBenchError:
            return False

    @cached_property
    def keeps_banks(self) -> bool:
        """Whether the method brings back rows of past sessions."""
        try:
            return Capability.MEMORY_BLOCKS.value in self.spec.built_method.needs
        except KVBenchError:  # a plug-in that is not here
            return False

    @cached_property
    def policy(self) -> DropMethod | None:
        """The method, if it is one that drops messages."""
        try:
            method = self.spec.built_method
        except KVBenchError:  # a plug-in that is not here
            return None
        return method if isinstance(method, DropMethod) else None

    @property
    def rewrites(self) -> bool:
        """Whether what leaves does so as the history is written anew."""
        return self.policy is not None and self.policy.exec == "text"

    @property
    def shares(self) -> bool:
        """Whether sessions may hold first rows in common."""
        return self.spec.params.get("prefix") == "shared"

    @property
    def passes(self) -> int:
        """How often each prompt is read."""
        return memory_method(self.spec.built_method).passes if self.keeps_banks else 1


def read_manifest(folder: Path) -> Manifest:
    """Read `submission.json`; a UsageError if there is none or it is not one."""
    path = folder / MANIFEST
    if not is_plain(path):
        raise UsageError(
            f"{folder} is not a submission: no {MANIFEST}; kvbench leaderboard pack makes one"
        )
    if path.stat().st_size > _MOST_BYTES:
        raise UsageError(f"{path} has more than {_MOST_BYTES:,} bytes")
    try:
        return Manifest.model_validate(strict_json(path.read_bytes()))
    except ValidationError as error:
        raise UsageError(f"{path}: {first_error(error)}") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None


def first_error(error: ValidationError) -> str:
    """Return the first thing that is wrong with data of a model."""
    detail = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}"


def check_listing(folder: Path, manifest: Manifest) -> list[Fault]:
    """Find runs listed twice, runs not listed and anything else in the folder."""
    listed = Counter(run.run_id for run in manifest.runs)
    twice = sorted(name for name, count in listed.items() if count > 1)
    present = sorted(entry.name for entry in folder.iterdir() if entry.name != MANIFEST)
    return [
        *(Fault("", "listed twice", name) for name in twice),
        *(Fault("", f"not listed in {MANIFEST}", n) for n in present if n not in listed),
    ]


def check_files(path: Path, listed: SubmittedRun) -> Checks:
    """Check that a run's files are plain, known, and those that were promised."""
    missing = [name for name in HASHED if not is_plain(path / name)]
    yield from (Fault(name, "is missing or not a plain file") for name in missing)
    if missing:
        return
    for entry in sorted(path.iterdir()):
        if entry.name not in _KNOWN or entry.is_symlink():
            yield Fault(ascii(entry.name)[1:-1], "is no file of a submitted run")
    if not _plain_transcripts(path / TRANSCRIPTS):
        yield Fault(TRANSCRIPTS, "holds something else than transcripts")
        return
    large = [
        each for each in path.rglob("*") if each.is_file() and each.stat().st_size > _most(each)
    ]
    yield from (Fault(each.name, f"has more than {_most(each):,} bytes") for each in large)
    if large:
        return
    found, promised = hashes(path), listed.sha256
    for name in sorted(found.keys() | promised.keys()):
        if found.get(name) != promised.get(name):
            text = f"sha256 is {found.get(name)}, {MANIFEST} says {promised.get(name)}"
            yield Fault(name, text)


def _most(path: Path) -> int:
    """Return how many bytes a file may have: it is read whole, and may be sparse."""
    return _MOST_BYTES if path.suffix == ".json" else 16 * _MOST_BYTES


def _plain_transcripts(folder: Path) -> bool:
    if not folder.exists():
        return True
    if not folder.is_dir() or folder.is_symlink():
        return False
    return all(
        path.suffix == ".json" and path.name.isascii() and is_plain(path)
        for path in folder.iterdir()
    )


def hashes(path: Path) -> dict[str, str]:
    """Return the SHA-256 of those `HASHED` a run has, and one over its transcripts."""
    found = {name: sha for name in HASHED if (sha := file_sha(path / name))}
    names = transcripts(path)
    if names:
        lines = [f"{name} {file_sha(path / TRANSCRIPTS / name)}\n" for name in names]
        found[TRANSCRIPTS] = hashlib.sha256("".join(lines).encode()).hexdigest()
    return found


def transcripts(path: Path) -> list[str]:
    return sorted(each.name for each in (path / TRANSCRIPTS).glob("*.json"))


def is_plain(path: Path) -> bool:
    """Whether this is a file, and neither it nor its folder a link to somewhere else."""
    return path.is_file() and not path.is_symlink() and not path.parent.is_symlink()


def read_run(path: Path, wrong: list[Fault]) -> RunEvidence | None:
    """Read a run whose files are in order; what is wrong is appended, and then there is no run."""
    info_and_spec = _read_info(path, wrong)
    trial_lines = _read_lines(path, "samples.jsonl", wrong)
    turn_lines = _read_lines(path, "turns.jsonl", wrong)
    if info_and_spec is None or trial_lines is None or turn_lines is None:
        return None
    attempts: dict[TrialKey, list[TrialRecord]] = {}
    for record in trial_lines.records:
        attempts.setdefault(record.key, []).append(record)
    turns: dict[TrialKey, list[TurnRecord]] = {}
    for turn in latest_turns(turn_lines.records):
        turns.setdefault(turn.key, []).append(turn)
    evidence = RunEvidence(path, *info_and_spec, attempts, turns)
    found = _read_transcripts(evidence)
    wrong += found
    return None if found else evidence


def _read_info(path: Path, wrong: list[Fault]) -> tuple[RunInfo, RunSpec] | None:
    try:
        document = strict_json((path / "run.json").read_bytes())
        info = RunReader(path).info
        if field := retyped(document, info):
            raise ValueError(f"{field} is of another type")
    except (ValueError, UsageError) as error:
        wrong.append(Fault("run.json", str(error)))
        return None
    try:
        budget: Any = msgspec.convert(info.spec.get("budget"), int | str | None)
        spec = replace(msgspec.convert({**info.spec, "budget": None}, RunSpec), budget=budget)
    except (msgspec.ValidationError, UsageError) as error:
        wrong.append(Fault("run.json: spec", str(error)))
        return None
    # A budget spelled otherwise would be another run of the same setting.
    said, written = info.spec, spec.document()
    odd = sorted(n for n in said.keys() | written.keys() if said.get(n, ...) != written.get(n, ...))
    wrong += [Fault(f"run.json: spec.{name}", "is not as this version writes it") for name in odd]
    return info, spec


def _read_lines(path: Path, name: str, wrong: list[Fault]) -> Lines[Any] | None:
    """Read a file of records; every line must be one of this version."""
    before, documents = len(wrong), []
    for number, raw in enumerate((path / name).read_bytes().split(b"\n"), start=1):
        try:
            if raw:
                documents.append(strict_json(raw))
        except ValueError as error:
            wrong.append(Fault(f"{name} line {number}", str(error)))
    if len(wrong) > before:
        return None
    reader = RunReader(path)
    lines = reader.trial_lines() if name == "samples.jsonl" else reader.turn_lines()
    wrong += [Fault(f"{name} line {odd.line}", odd.reason) for odd in lines.unreadable]
    if lines.torn or len(documents) != len(lines.records) + len(lines.unreadable):
        wrong.append(Fault(name, "its last line is torn"))
    if len(wrong) == before:
        pairs = zip(documents, lines.records, strict=True)
        odd_fields = [field for said, read in pairs if (field := retyped(said, read))]
        wrong += [Fault(name, f"{field} is of another type") for field in odd_fields]
    return None if len(wrong) > before else lines


def _read_transcripts(evidence: RunEvidence) -> list[Fault]:
    """Fill in the transcripts, each of one trial; return what is wrong with them."""
    names = transcripts(evidence.path)
    if not names:
        return []
    trials = evidence.trials
    belongs = {record.transcript: key for key, record in trials.items() if record.transcript}
    counts = Counter(record.transcript for record in trials.values())
    wrong = [
        Fault("samples.jsonl: transcript", f"{name} is that of two trials")
        for name, count in counts.items()
        if count > 1
    ]
    for name in names:
        file = f"{TRANSCRIPTS}/{name}"
        key = belongs.pop(file, None)
        if key is None:
            wrong.append(Fault(file, "is of no trial"))
            continue
        try:
            document = strict_json((evidence.path / file).read_bytes())
            evidence.transcripts[key] = msgspec.convert(document, RecordedTranscript)
            _ = evidence.transcripts[key].tokens
        except (ValueError, msgspec.ValidationError) as error:
            wrong.append(Fault(file, str(error)))
    wrong += [Fault(place(key, "transcript"), f"{n} is missing") for n, key in belongs.items()]
    return wrong


def strict_json(raw: bytes) -> Any:
    """Parse one JSON document as kvbench writes it; a ValueError gives the reason on one line."""
    try:
        document = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_object, parse_int=_integer,
            parse_float=_number, parse_constant=_constant,
        )  # fmt: skip
        _check_values(document)
    except RecursionError:
        raise ValueError("nested too deep") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos}") from None
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object with the same key twice")
    return found


def _integer(text: str) -> int:
    if len(text) > 20 or abs(int(text)) > _LARGEST:
        raise ValueError(f"a number of {len(text)} digits; the most are 64 bits")
    return int(text)


def _number(text: str) -> float:
    # A large one may become an integer of hundreds of digits where one is expected.
    if not abs(float(text)) <= _LARGEST:
        raise ValueError(f"a number out of range: {text[:20]}")
    return float(text)


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


def _check_values(document: Any) -> None:
    """Refuse deep nesting and half characters, without recursion."""
    level, depth = [document], 0
    while level:
        depth += 1
        if depth > _DEEPEST:
            raise ValueError(f"nested deeper than {_DEEPEST} levels")
        below: list[Any] = []
        for value in level:
            if isinstance(value, str):
                try:
                    value.encode("utf-8")
                except UnicodeEncodeError as error:
                    raise ValueError(f"half a character in {value[:40]!a}") from error
            elif isinstance(value, dict):
                below += [*value, *value.values()]
            elif isinstance(value, list):
                below += value
        level = below


def retyped(document: Any, record: Any, field: str = "") -> str:
    """Return the first field that a record holds as another type than its JSON; empty if none."""
    # A lenient reader makes a number of the text `"1"`, which no writer of ours wrote.
    if not isinstance(document, dict):
        texts = isinstance(document, str) == isinstance(record, str)
        same = texts and isinstance(document, bool) == isinstance(record, bool)
        return "" if same else field
    for name, said in document.items():
        read = record.get(name) if isinstance(record, dict) else getattr(record, name, said)
        if found := retyped(said, read, f"{field}.{name}".lstrip(".")):
            return found
    return ""
