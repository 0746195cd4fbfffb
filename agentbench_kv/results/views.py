"""What `kvbench summarize` and `kvbench show` print, as tables or as one JSON document."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from agentbench_kv.errors import UsageError
from agentbench_kv.results import render
from agentbench_kv.results.reader import RunReader
from agentbench_kv.results.records import TrialRecord, TurnRecord
from agentbench_kv.results.store import RunStore
from agentbench_kv.results.summary import Summary, build, summarize

__all__ = ["show_run", "summarize_runs"]


def summarize_runs(out: Path, runs: Sequence[str], as_json: bool) -> None:
    """Rebuild the summary of each run and print them all.

    Parameters
    ----------
    out : Path
        Folder of runs, for those named by id.
    runs : sequence of str
        Paths or ids.
    as_json : bool
        Print one JSON list instead of tables.

    Raises
    ------
    UsageError
        If a run does not exist; nothing is rebuilt then.
    """
    found = [RunStore(out).find(run) for run in runs]
    summaries = [summarize(run) for run in found]
    if as_json:
        _print_json([summary.model_dump(mode="json") for summary in summaries])
        return
    _print_summaries(summaries)


def show_run(out: Path, run: str, sample: str | None, as_json: bool) -> None:
    """Print one run: summary, failures, and medians per turn index.

    With `sample`, only that sample's failures, and each of its turns.

    Raises
    ------
    UsageError
        If the run or the sample does not exist.
    """
    reader = RunStore(out).find(run)
    summary, trials, turns = build(reader), reader.trials(), reader.turns()
    if sample is not None:
        trials = [record for record in trials if record.sample_id == sample]
        turns = [record for record in turns if record.sample_id == sample]
        if not trials and not turns:
            raise _unknown_sample(reader, sample)
    if as_json:
        _print_json(_document(summary, trials, turns))
        return
    tables = [render.failure_table(trials), _turns(turns, sample is not None)]
    _print_run(reader, summary, tables)


def _turns(turns: Sequence[TurnRecord], each: bool) -> Table | None:
    if not turns:
        return None
    return render.turn_table(turns) if each else render.turn_overview(turns)


def _document(
    summary: Summary, trials: Sequence[TrialRecord], turns: Sequence[TurnRecord]
) -> dict[str, Any]:
    return {
        "summary": summary.model_dump(mode="json"),
        "trials": [record.model_dump(mode="json") for record in trials],
        "turns": [record.model_dump(mode="json") for record in turns],
    }


def _print_json(document: Any) -> None:
    # ASCII survives any terminal encoding; no rich here, which would wrap long lines.
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def _print_summaries(summaries: Sequence[Summary]) -> None:
    console = render.console()
    console.print(render.summary_table(summaries))
    for summary in summaries:
        for reason in summary.validity.reasons:
            console.print(render.plain(f"{summary.run_id}: {reason}"), soft_wrap=True)
    sub_scores = render.sub_score_table(summaries)
    if sub_scores is not None:
        console.print()
        console.print(sub_scores)


def _print_run(reader: RunReader, summary: Summary, tables: Sequence[Table | None]) -> None:
    _print_summaries([summary])
    console = render.console()
    console.print()
    console.print(render.facts_table(summary))
    if reader.interrupted:
        console.print("interrupted: run the same command again to finish it")
    for table in tables:
        if table is not None:
            console.print()
            console.print(table)


def _unknown_sample(reader: RunReader, sample: str) -> UsageError:
    known = sorted({record.sample_id for record in reader.trials()})
    near = difflib.get_close_matches(sample, known, n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return UsageError(f"run {reader.path.name} has no sample {sample!r}{hint}")
