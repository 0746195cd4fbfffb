"""Judging a finished run's answers from its transcripts: nothing is run again, no score changes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.browser.answers import unseal
from agentbench_kv.adapters.browser.judge import Judge
from agentbench_kv.adapters.browser.task import EVALUATION
from agentbench_kv.errors import UsageError
from agentbench_kv.results.files import json_bytes, write_atomic
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.store import RunReader


@dataclass(frozen=True)
class Judged:
    """The result of judging a run."""

    path: Path  # the file with every verdict
    trials: int  # finished ones
    judged: int  # those with a verdict, or without an answer: these count as wrong
    asked: int  # those the judge was asked about just now
    mean: float | None  # share of right answers; None as long as answers wait for a verdict
    errors: tuple[str, ...]  # why verdicts are missing, each reason once


@dataclass(frozen=True)
class _Item:
    record: TrialRecord
    evaluation: dict[str, Any] | None
    sealed: bool

    @property
    def response_sha(self) -> str:
        response = str((self.evaluation or {}).get("response", ""))
        return hashlib.sha256(response.encode("utf-8", "replace")).hexdigest()

    @property
    def key(self) -> tuple[str, int, str]:
        return self.record.sample_id, self.record.trial, self.response_sha


def judge_run(
    run: Path, judge: Judge, *, concurrency: int = 8, report: Callable[[int], None] | None = None
) -> Judged:
    """Ask a judge about every answer of a browsing run that it has not judged yet.

    At most `concurrency` requests run at once; `report` is told how many answers have been judged.
    UsageError if `run` is not a run, or its transcripts hold no answers to judge.
    """
    reader = RunReader(run)
    reader.info  # noqa: B018  refuses what is not a run
    items = list(_items(reader))
    answered = [item for item in items if item.evaluation and item.record.score is not None]
    if not answered:
        raise UsageError(f"{run} holds no answers to judge; only browsing tasks have them")
    path = run / _file_name(judge)
    known = _known(path)
    todo = [item for item in answered if item.key not in known]
    with ThreadPoolExecutor(concurrency) as pool:
        rows = pool.map(partial(_ask, judge), todo)
        for count, (item, row) in enumerate(zip(todo, rows, strict=True), start=1):
            known[item.key] = row
            if report:
                report(count)
    trials = [known.get(item.key) or _unanswered(item.record) for item in items]
    marks = [row["judge"] for row in trials if row["judge"] is not None]
    errors = sorted({row["error"] for row in trials if row["error"] and row["judge"] is None})
    mean = sum(marks) / len(marks) if len(marks) == len(trials) else None
    document = {
        "judge": judge.provenance(),
        "note": "A judge's verdicts; the score of the run is EM-norm and stays as it is.",
        "mean": mean,
        "trials": trials,
    }
    write_atomic(path, json_bytes(document, indent=1))
    return Judged(path, len(trials), len(marks), len(todo), mean, tuple(errors))


def _items(reader: RunReader) -> Iterator[_Item]:
    for record in reader.trials():
        if record.finished:
            stored = (reader.transcript(record) or {}).get("transcript")
            entries = unseal(stored)
            last = entries[-1] if isinstance(entries, list) and entries else None
            found = isinstance(last, dict) and last.get("role") == EVALUATION
            yield _Item(record, last if found else None, entries is not stored)


def _ask(judge: Judge, item: _Item) -> dict[str, Any]:
    fields = item.evaluation or {}
    verdict = judge.verdict(fields["question"], fields["gold"], fields["response"])
    return {
        "sample_id": item.record.sample_id,
        "trial": item.record.trial,
        "response_sha256": item.response_sha,
        "score": item.record.score,
        "judge": None if verdict.correct is None else float(verdict.correct),
        "error": verdict.error,
        # A judge repeats questions and answers.
        "reply": None if item.sealed else verdict.reply,
    }


def _unanswered(record: TrialRecord) -> dict[str, Any]:
    return {
        "sample_id": record.sample_id,
        "trial": record.trial,
        "score": record.score,
        "judge": 0.0,
        "error": None,
        "status": str(record.status),
    }


def _known(path: Path) -> dict[tuple[str, int, str], dict[str, Any]]:
    """Return earlier verdicts of the same judge; failed ones are asked again."""
    if not path.is_file():
        return {}
    rows = json.loads(path.read_bytes())["trials"]
    return {
        (row["sample_id"], row["trial"], row["response_sha256"]): row
        for row in rows
        if "response_sha256" in row and row["judge"] is not None
    }


def _file_name(judge: Judge) -> str:
    spelled = json.dumps(judge.provenance(), sort_keys=True)
    slug = re.sub(r"[^A-Za-z0-9.-]+", "_", judge.model).strip("._")[:40] or "model"
    return f"judge-{slug}-{hashlib.sha256(spelled.encode()).hexdigest()[:8]}.json"
