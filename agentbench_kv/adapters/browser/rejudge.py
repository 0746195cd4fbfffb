"""Judging a finished run's answers from its transcripts: nothing is run again, no score changes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.browser.judge import Judge, Verdict
from agentbench_kv.adapters.browser.seal import unseal
from agentbench_kv.adapters.browser.task import EVALUATION
from agentbench_kv.errors import UsageError
from agentbench_kv.results.files import json_bytes, write_atomic
from agentbench_kv.results.reader import RunReader
from agentbench_kv.results.records import TrialRecord


@dataclass(frozen=True)
class Judged:
    """What judging a run came to.

    Attributes
    ----------
    path : Path
        The file with every verdict.
    trials, judged, asked : int
        Finished trials; those with a verdict; those the judge was asked about just now.
    mean : float or None
        Share of right answers over all trials that have a verdict or no answer (these count as
        wrong); None as long as answers wait for a verdict.
    errors : tuple of str
        Why verdicts are missing, each reason once.
    """

    path: Path
    trials: int
    judged: int
    asked: int
    mean: float | None
    errors: tuple[str, ...]


@dataclass(frozen=True)
class _Item:
    record: TrialRecord
    evaluation: dict[str, Any] | None
    sealed: bool


def judge_run(
    run: Path, judge: Judge, *, concurrency: int = 8, report: Callable[[int], None] | None = None
) -> Judged:
    """Ask a judge about every answer of a run that it has not judged yet.

    Parameters
    ----------
    run : Path
        A run directory of a browsing task.
    concurrency : int
        Requests at once.
    report : callable, optional
        Told how many answers have been judged so far.

    Raises
    ------
    UsageError
        If it is not a run, or its transcripts hold no answers to judge.
    PrerequisiteError
        If the verdicts cannot be written.
    """
    reader = RunReader(run)
    reader.info  # noqa: B018  refuses what is not a run
    items = list(_items(reader))
    answered = [item for item in items if item.evaluation and item.record.score is not None]
    if not answered:
        raise UsageError(f"{run} holds no answers to judge; only browsing tasks have them")
    path = run / _file_name(judge)
    known = _known(path)
    todo = [item for item in answered if known.get(_key(item)) is None]
    with ThreadPoolExecutor(concurrency) as pool:
        for count, (item, row) in enumerate(pool.map(lambda i: _ask(i, judge), todo), start=1):
            known[_key(item)] = row
            if report:
                report(count)
    rows = [known.get(_key(item)) or _unanswered(item) for item in items]
    result = _result(path, rows, len(todo))
    write_atomic(path, json_bytes(_document(judge, result, rows), indent=1))
    return result


def _items(reader: RunReader) -> Iterator[_Item]:
    for record in reader.trials():
        if record.finished:
            stored = (reader.transcript(record) or {}).get("transcript")
            entries = unseal(stored)
            last = entries[-1] if isinstance(entries, list) and entries else None
            found = isinstance(last, dict) and last.get("role") == EVALUATION
            yield _Item(record, last if found else None, entries is not stored)


def _ask(item: _Item, judge: Judge) -> tuple[_Item, dict[str, Any]]:
    fields = item.evaluation or {}
    verdict = judge.verdict(fields["question"], fields["gold"], fields["response"])
    return item, _row(item, verdict)


def _row(item: _Item, verdict: Verdict) -> dict[str, Any]:
    return {
        "sample_id": item.record.sample_id,
        "trial": item.record.trial,
        "response_sha256": _response_sha(item),
        "score": item.record.score,
        "judge": None if verdict.correct is None else float(verdict.correct),
        "error": verdict.error,
        # A judge repeats questions and answers.
        "reply": None if item.sealed else verdict.reply,
    }


def _unanswered(item: _Item) -> dict[str, Any]:
    return {
        "sample_id": item.record.sample_id,
        "trial": item.record.trial,
        "score": item.record.score,
        "judge": 0.0,
        "error": None,
        "status": str(item.record.status),
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


def _result(path: Path, rows: list[dict[str, Any]], asked: int) -> Judged:
    marks = [row["judge"] for row in rows if row["judge"] is not None]
    complete = len(marks) == len(rows)
    errors = sorted({row["error"] for row in rows if row["error"] and row["judge"] is None})
    mean = sum(marks) / len(marks) if complete else None
    return Judged(path, len(rows), len(marks), asked, mean, tuple(errors))


def _document(judge: Judge, result: Judged, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "judge": judge.provenance(),
        "note": "A judge's verdicts; the score of the run is EM-norm and stays as it is.",
        "mean": result.mean,
        "trials": rows,
    }


def _file_name(judge: Judge) -> str:
    spelled = json.dumps(judge.provenance(), sort_keys=True)
    slug = re.sub(r"[^A-Za-z0-9.-]+", "_", judge.model).strip("._")[:40] or "model"
    return f"judge-{slug}-{hashlib.sha256(spelled.encode()).hexdigest()[:8]}.json"


def _key(item: _Item) -> tuple[str, int, str]:
    return item.record.sample_id, item.record.trial, _response_sha(item)


def _response_sha(item: _Item) -> str:
    response = str((item.evaluation or {}).get("response", ""))
    return hashlib.sha256(response.encode("utf-8", "replace")).hexdigest()
