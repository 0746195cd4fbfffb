"""What `kvbench summarize` and `kvbench show` print, as tables or as one JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from agentbench_kv.budget import Budget
from agentbench_kv.errors import UsageError
from agentbench_kv.results import render
from agentbench_kv.results.reader import RunReader
from agentbench_kv.results.records import TrialRecord, TurnRecord
from agentbench_kv.results.store import RunStore, suggestion
from agentbench_kv.results.summary import Summary, build, summarize
from agentbench_kv.results.terminal import console, plain, print_json
from agentbench_kv.results.timeline import check_drawing, draw_timeline, steps, timeline_table
from agentbench_kv.results.transcripts import transcript_lines


def summarize_runs(out: Path, runs: Sequence[str], as_json: bool) -> None:
    """Rebuild the summary of each run (a path or an id) and print them all.

    A UsageError if a run does not exist; nothing is rebuilt then.
    """
    found = [RunStore(out).find(run) for run in runs]
    summaries = [summarize(run) for run in found]
    if as_json:
        print_json([summary.model_dump(mode="json") for summary in summaries])
    else:
        _print_summaries(summaries)


def show_run(
    out: Path, run: str, sample: str | None, as_json: bool, png: Path | None = None
) -> None:
    """Print one run: summary, failures by kind, and its timeline turn by turn.

    With `sample`, that sample's failures, turns and transcripts instead; with `png`, the timeline
    is drawn into that file as well. A UsageError if there is no such run or sample.
    """
    if png is not None:
        check_drawing()
    reader = RunStore(out).find(run)
    summary, trials, turns = build(reader), reader.trials(), reader.turns()
    if sample is not None:
        trials = [record for record in trials if record.sample_id == sample]
        turns = [record for record in turns if record.sample_id == sample]
        if not trials and not turns:
            known = sorted({record.sample_id for record in reader.trials()})
            hint = suggestion(sample, known)
            raise UsageError(f"run {reader.path.name} has no sample {sample!r}{hint}")
    budget = _budget(summary)
    if png is not None:
        title = reader.path.name if sample is None else f"{reader.path.name}, {sample}"
        draw_timeline(steps(turns), png, title, budget)
    if as_json:
        document = {
            "summary": summary.model_dump(mode="json"),
            "trials": msgspec.to_builtins(trials),
            "turns": msgspec.to_builtins(turns),
        }
        if sample is not None:
            document["transcripts"] = [_transcript(reader, record) for record in trials]
        print_json(document)
        return
    failed = [render.failure_kinds(summary), render.failure_table(trials)]
    _print_run(reader, summary, [*failed, *_turn_tables(turns, budget, sample is not None)])
    if sample is not None:
        _print_transcripts(reader, trials, turns)
    if png is not None:
        console().print(plain(png), soft_wrap=True)


def _turn_tables(turns: Sequence[TurnRecord], budget: int | None, apart: bool) -> list[Table]:
    """Return the timeline, that of every trial if they are to be told apart, and the turns."""
    if not turns:
        return []
    if not apart:
        return [timeline_table(steps(turns), budget), render.turn_overview(turns)]
    trials = sorted({turn.trial for turn in turns})
    own = (steps([turn for turn in turns if turn.trial == trial]) for trial in trials)
    return [*(timeline_table(each, budget) for each in own), render.turn_table(turns)]


def _budget(summary: Summary) -> int | None:
    """Return a budget that is a number of tokens; a share grows with the session."""
    try:
        return None if summary.budget is None else Budget.parse(summary.budget).tokens
    except UsageError:
        return None


def _transcript(reader: RunReader, record: TrialRecord) -> Any:
    """Load a transcript; None if there is none, or none that can be read."""
    try:
        return reader.transcript(record)
    except (OSError, ValueError, RecursionError):
        return None


def _print_summaries(summaries: Sequence[Summary]) -> None:
    screen = console()
    screen.print(render.summary_table(summaries))
    for summary in summaries:
        for reason in summary.validity.reasons:
            screen.print(plain(f"{summary.run_id}: {reason}"), soft_wrap=True)
    for table in render.finer_tables(summaries):
        screen.print()
        screen.print(table)


def _print_run(reader: RunReader, summary: Summary, tables: Sequence[Table | None]) -> None:
    _print_summaries([summary])
    screen = console()
    screen.print()
    screen.print(render.facts_table(summary))
    if reader.interrupted:
        screen.print("interrupted: run the same command again to finish it")
    for table in tables:
        if table is not None:
            screen.print()
            screen.print(table)


def _print_transcripts(
    reader: RunReader, trials: Sequence[TrialRecord], turns: Sequence[TurnRecord]
) -> None:
    screen = console()
    for record in trials:
        document = _transcript(reader, record)
        own = [turn for turn in turns if turn.key == record.key]
        screen.print()
        screen.print(plain(f"transcript of {record.sample_id}, trial {record.trial}"))
        if document is None:
            screen.print(plain(f"none that can be read ({record.transcript})"))
            continue
        for line in transcript_lines(document, own):
            screen.print(line, soft_wrap=True)
