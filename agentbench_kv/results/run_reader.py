"""Reading a run's files: what is whole, and what is odd, whoever may be writing at the time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agentbench_kv.errors import UsageError
from agentbench_kv.results.lines import Lines, read_lines
from agentbench_kv.results.records import TrialRecord, TurnRecord
from agentbench_kv.results.run_info import RunInfo, RunStatus, holder, read_info

TrialKey = tuple[str, int]  # sample id and trial


class RunReader:
    """The files of one run. Nothing here writes, locks, or fails on a damaged line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def info(self) -> RunInfo:
        """The current `run.json`; a UsageError if there is none."""
        info = read_info(self.path)
        if info is None:
            raise UsageError(f"{self.path} is not a run directory: it has no run.json")
        return info

    @property
    def interrupted(self) -> bool:
        """Whether the run says `running` but nobody is writing it."""
        info = self.info
        return info.status is RunStatus.RUNNING and holder(info, time.time()) is None

    def trial_lines(self) -> Lines[TrialRecord]:
        """Read `samples.jsonl` as it is: superseded records, unreadable lines and all."""
        return read_lines(self.path / "samples.jsonl", TrialRecord)

    def turn_lines(self) -> Lines[TurnRecord]:
        return read_lines(self.path / "turns.jsonl", TurnRecord)

    def trials(self) -> list[TrialRecord]:
        """Return the record that counts for each (sample, trial): the last one."""
        return latest_trials(self.trial_lines().records)

    def turns(self) -> list[TurnRecord]:
        """Return the turns of the last attempt at each trial, in the order they were written."""
        return latest_turns(self.turn_lines().records)

    def finished_trials(self) -> set[TrialKey]:
        """Return the (sample id, trial) pairs that need not be run again."""
        return {record.key for record in self.trials() if record.finished}

    def transcript(self, record: TrialRecord) -> Any:
        """Load a trial's transcript; None if it has none or the file is gone."""
        if record.transcript is None:
            return None
        path = (self.path / record.transcript).resolve()
        if not path.is_relative_to(self.path.resolve()) or not path.is_file():
            return None
        return json.loads(path.read_bytes())


def latest_trials(records: list[TrialRecord]) -> list[TrialRecord]:
    """Keep the last record of each key, in the order the keys first appeared."""
    return list({record.key: record for record in records}.values())


def latest_turns(records: list[TurnRecord]) -> list[TurnRecord]:
    """Keep each trial's last attempt: a turn index that does not grow begins a new one."""
    return [turn for turns in turns_by_trial(records).values() for turn in turns]


def turns_by_index(records: Iterable[TurnRecord]) -> list[list[TurnRecord]]:
    """Return the turns of each turn index, whatever their trial, the first index first."""
    groups: dict[int, list[TurnRecord]] = {}
    for record in records:
        groups.setdefault(record.turn, []).append(record)
    return [groups[index] for index in sorted(groups)]


def turns_by_trial(records: list[TurnRecord]) -> dict[TrialKey, list[TurnRecord]]:
    """Return the turns of each trial's last attempt, in the order the trials first appeared."""
    attempts: dict[TrialKey, list[TurnRecord]] = {}
    for record in records:
        turns = attempts.setdefault(record.key, [])
        if turns and record.turn <= turns[-1].turn:
            turns.clear()
        turns.append(record)
    return attempts
