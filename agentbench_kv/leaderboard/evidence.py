"""The records of one submitted run, read strictly and laid out by trial."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from agentbench_kv.engines.base import Capability
from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.leaderboard.findings import Wrong
from agentbench_kv.leaderboard.layout import TRANSCRIPTS, transcripts
from agentbench_kv.leaderboard.strict import retyped, strict_json
from agentbench_kv.registry import load_engine
from agentbench_kv.results.lines import Lines
from agentbench_kv.results.reader import RunReader, TrialKey, latest_turns
from agentbench_kv.results.records import TrialRecord, TrialStatus, TurnRecord
from agentbench_kv.results.runinfo import RunInfo
from agentbench_kv.spec import RunSpec

CUT_OFF = frozenset({TrialStatus.TIMEOUT, TrialStatus.ENGINE_ERROR, TrialStatus.USER_ERROR})
"""Ends that no token tells. Such a trial counts 0, and its session may have been left anywhere."""


class Event(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`engines.base.KVEvent` as a transcript has it."""

    decoded: int
    logical: int
    live_before: int
    live_after: int
    rows_moved: int


class Transcript(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A transcript file: the conversation, what the method did, the ids of every generation."""

    transcript: Any = None
    error: str | None = None
    events: list[Event] = msgspec.field(default_factory=list)
    facts: list[Any] = msgspec.field(default_factory=list)
    generated: list[str] = msgspec.field(default_factory=list)

    @property
    def tokens(self) -> list[list[int]]:
        """The generated ids.

        Raises
        ------
        ValueError
            If one is none.
        """
        return [[int(word) for word in text.split()] for text in self.generated]


@dataclass(frozen=True)
class Evidence:
    """One run, whose files were read without a finding.

    Attributes
    ----------
    trials : dict
        The record that counts, by trial.
    attempts : dict
        All records of a trial, in order.
    turns : dict
        The turns of its last attempt.
    transcripts : dict
        Empty if the submission has none.
    """

    path: Path
    info: RunInfo
    spec: RunSpec
    attempts: dict[TrialKey, list[TrialRecord]]
    turns: dict[TrialKey, list[TurnRecord]]
    transcripts: dict[TrialKey, Transcript] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.name

    @property
    def trials(self) -> dict[TrialKey, TrialRecord]:
        """The last record of every trial."""
        return {key: records[-1] for key, records in self.attempts.items()}

    @cached_property
    def at_text_level(self) -> bool:
        """Whether an endpoint was asked, whose tokens and cache nobody sees."""
        try:
            return Capability.TEXT in load_engine(self.spec.engine).capabilities
        except KVBenchError:
            return False


def read_run(path: Path, wrong: list[Wrong]) -> Evidence | None:
    """Read a run whose files are in order; what is wrong is appended, and then there is no run."""
    info, spec = _read_info(path, wrong)
    trial_lines = _read_lines(path, "samples.jsonl", wrong)
    turn_lines = _read_lines(path, "turns.jsonl", wrong)
    if info is None or spec is None or trial_lines is None or turn_lines is None:
        return None
    attempts: dict[TrialKey, list[TrialRecord]] = {}
    for record in trial_lines.records:
        attempts.setdefault(record.key, []).append(record)
    turns: dict[TrialKey, list[TurnRecord]] = {}
    for turn in latest_turns(turn_lines.records):
        turns.setdefault(turn.key, []).append(turn)
    evidence = Evidence(path, info, spec, attempts, turns)
    before = len(wrong)
    wrong += _read_transcripts(evidence)
    return None if len(wrong) > before else evidence


def place(key: TrialKey, field: str) -> str:
    """Return how a finding names a field of a trial."""
    return f"sample {key[0]} trial {key[1]}: {field}"


def _read_info(path: Path, wrong: list[Wrong]) -> tuple[RunInfo | None, RunSpec | None]:
    try:
        document = strict_json((path / "run.json").read_bytes())
        info = RunReader(path).info
        if field := retyped(document, info):
            raise ValueError(f"{field} is of another type")
    except (ValueError, UsageError) as error:
        wrong.append(Wrong("run.json", str(error)))
        return None, None
    return info, _read_spec(info.spec, wrong)


def _read_spec(spec: dict[str, Any], wrong: list[Wrong]) -> RunSpec | None:
    try:
        read = msgspec.convert(spec, RunSpec)
    except msgspec.ValidationError as error:
        wrong.append(Wrong("run.json: spec", str(error)))
        return None
    document = read.document()
    odd = sorted(document.keys() ^ spec.keys())
    wrong += [Wrong(f"run.json: spec.{name}", "is not as this version writes it") for name in odd]
    return read


def _read_lines(path: Path, name: str, wrong: list[Wrong]) -> Lines[Any] | None:
    """Read a file of records; every line must be one of this version."""
    before, documents = len(wrong), []
    for number, raw in enumerate((path / name).read_bytes().split(b"\n"), start=1):
        try:
            if raw:
                documents.append(strict_json(raw))
        except ValueError as error:
            wrong.append(Wrong(f"{name} line {number}", str(error)))
    if len(wrong) > before:
        return None
    reader = RunReader(path)
    lines = reader.trial_lines() if name == "samples.jsonl" else reader.turn_lines()
    wrong += [Wrong(f"{name} line {odd.line}", odd.reason) for odd in lines.unreadable]
    if lines.torn or len(documents) != len(lines.records) + len(lines.unreadable):
        wrong.append(Wrong(name, "its last line is torn"))
    if len(wrong) == before:
        pairs = zip(documents, lines.records, strict=True)
        odd_fields = [field for said, read in pairs if (field := retyped(said, read))]
        wrong += [Wrong(name, f"{field} is of another type") for field in odd_fields]
    return None if len(wrong) > before else lines


def _read_transcripts(evidence: Evidence) -> list[Wrong]:
    names = transcripts(evidence.path)
    wrong: list[Wrong] = []
    if not names:
        return wrong
    trials = evidence.trials
    belongs = {record.transcript: key for key, record in trials.items() if record.transcript}
    shared = [n for n, count in Counter(r.transcript for r in trials.values()).items() if count > 1]
    wrong += [Wrong("samples.jsonl: transcript", f"{n} is that of two trials") for n in shared]
    for name in names:
        file = f"{TRANSCRIPTS}/{name}"
        key = belongs.pop(file, None)
        if key is None:
            wrong.append(Wrong(file, "is of no trial"))
            continue
        try:
            document = strict_json((evidence.path / file).read_bytes())
            evidence.transcripts[key] = msgspec.convert(document, Transcript)
            _ = evidence.transcripts[key].tokens
        except (ValueError, msgspec.ValidationError) as error:
            wrong.append(Wrong(file, str(error)))
    wrong += [Wrong(place(key, "transcript"), f"{n} is missing") for n, key in belongs.items() if n]
    return wrong
