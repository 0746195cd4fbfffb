"""What `kvbench summarize` and `kvbench show` print.

Every cell is data: markup and control characters stay visible text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.table import Table

from agentbench_kv.budget import Budget
from agentbench_kv.errors import UsageError
from agentbench_kv.results import terminal
from agentbench_kv.results.records import TrialRecord, TurnRecord
from agentbench_kv.results.run_reader import RunReader, turns_by_index
from agentbench_kv.results.runs import Run, load_run
from agentbench_kv.results.stats import Interval
from agentbench_kv.results.store import RunStore, suggestion
from agentbench_kv.results.summary import Summary, build, ledger_means, median, summarize
from agentbench_kv.results.tables import formats
from agentbench_kv.results.tables.ledger import ledger_tables
from agentbench_kv.results.terminal import failures, megabytes, new_table, number, plain, share
from agentbench_kv.results.timeline import check_drawing, draw_timeline, steps, timeline_table
from agentbench_kv.results.transcripts import transcript_lines

T = TypeVar("T")
_MOST_ROWS = 50

# Scores are percentages with their 95% intervals, KV figures tokens per (layer, KV head).
_SUMMARY: dict[str, Callable[[Summary], object]] = {
    "run": lambda run: run.run_id,
    "method": lambda run: run.method,
    "budget": lambda run: run.budget,
    "score [95% CI]": lambda run: percent(run.score),
    "triggered only": lambda run: percent(run.score_triggered),
    "peak live MB": lambda run: run.kv and megabytes(run.kv.median_peak_bytes),
    "peak live": lambda run: run.kv and number(run.kv.median_peak_live),
    "logical": lambda run: run.kv and number(run.kv.median_logical),
    "events": lambda run: run.kv and run.kv.events,
    "evicted": lambda run: run.kv and run.kv.evicted,
    "aux calls": lambda run: run.kv and run.kv.auxiliary_calls,
    "aux tokens": lambda run: run.kv and number(run.kv.auxiliary_tokens),
    "tok/s": lambda run: number(run.tokens_per_s),
    "failures": lambda run: failures(run.failures),
    "validity": lambda run: run.validity.state,
}
_AUXILIARY = ("aux calls", "aux tokens")  # shown where a method asks the model by itself

_TURN: dict[str, Callable[[TurnRecord], object]] = {
    "sample": lambda turn: turn.sample_id,
    "trial": lambda turn: turn.trial,
    "turn": lambda turn: turn.turn,
    "prompt": lambda turn: turn.prompt_tokens,
    "output": lambda turn: turn.output_tokens,
    "phases": lambda turn: " ".join(f"{name} {count}" for name, count in turn.phases.items()),
    "live": lambda turn: f"{turn.live_before} > {turn.live_after}",
    "events": lambda turn: turn.events,
    "evicted": lambda turn: turn.evicted,
    "restored": lambda turn: turn.restored,
    "prefill": lambda turn: turn.prefill_tokens,
    "KV MB read": lambda turn: number(turn.kv_bytes_read / 1e6),
    "TTFT ms": lambda turn: number(turn.ttft_ms),
    "TPOT ms": lambda turn: number(turn.tpot_ms),
}

# Of the turns with one index: medians over trials, totals of events and evicted tokens.
_TURNS: dict[str, Callable[[list[TurnRecord]], object]] = {
    "turn": lambda turns: turns[0].turn,
    "trials": len,
    "prompt": lambda turns: number(median(turn.prompt_tokens for turn in turns)),
    "output": lambda turns: number(median(turn.output_tokens for turn in turns)),
    "live before": lambda turns: number(median(turn.live_before for turn in turns)),
    "live after": lambda turns: number(median(turn.live_after for turn in turns)),
    "events": lambda turns: sum(turn.events for turn in turns),
    "evicted": lambda turns: sum(turn.evicted for turn in turns),
    "TTFT ms": lambda turns: number(median(turn.ttft_ms for turn in turns)),
    "TPOT ms": lambda turns: number(median(turn.tpot_ms for turn in turns)),
}


def _table(columns: Mapping[str, Callable[[T], object]], items: Iterable[T]) -> Table:
    rows = ([cell(item) for cell in columns.values()] for item in items)
    return new_table(*columns, rows=rows)


def summary_table(summaries: Sequence[Summary]) -> Table:
    left_out = () if any(summary.asks for summary in summaries) else _AUXILIARY
    columns = {name: of for name, of in _SUMMARY.items() if name not in left_out}
    return _table(columns, summaries)


def finer_tables(summaries: Sequence[Summary]) -> list[Table]:
    """Return tables of sub-scores and pass^k of repeated trials, with one row per run."""
    # A sub-score that crosses two others (`tool_one_shot`) is left to `summary.json`.
    parts = [{name: sub.interval for name, sub in s.sub_scores.items()} for s in summaries]
    names = {name for each in parts for name in each}
    crossed = {f"{a}_{b}" for a in names for b in names}
    passes = [summary.pass_k for summary in summaries]
    tables = (_shares(summaries, parts, crossed), _shares(summaries, passes))
    return [table for table in tables if table is not None]


def _shares(
    summaries: Sequence[Summary],
    shares: Sequence[Mapping[str, Interval]],
    left_out: Collection[str] = (),
) -> Table | None:
    names = [name for name in dict.fromkeys(chain(*shares)) if name not in left_out]
    rows = (
        (summary.method, summary.budget, summary.task, *(percent(own.get(name)) for name in names))
        for summary, own in zip(summaries, shares, strict=True)
    )
    return new_table("method", "budget", "task", *names, rows=rows) if names else None


def failure_kinds(summary: Summary) -> Table | None:
    """Return one row per failure kind with its share of the trials; None without failures."""
    kinds = summary.failures.items()
    rows = ((kind, count, f"{100 * count / summary.trials:.1f}%") for kind, count in kinds)
    return new_table("failure", "trials", "share", rows=rows) if kinds else None


def failure_table(trials: Sequence[TrialRecord]) -> Table | None:
    """Return one row per trial without a score; None if there is none."""
    failed = [record for record in trials if record.score is None]
    columns = ("sample", "trial", "status", "attempts", "transcript", "error")
    cells = attrgetter("sample_id", *columns[1:])
    table = new_table(*columns, rows=map(cells, failed[:_MOST_ROWS]))
    if len(failed) > _MOST_ROWS:
        table.add_row(f"and {len(failed) - _MOST_ROWS} more; --json shows all")
    return table if failed else None


def percent(interval: Interval | None) -> str | None:
    return None if interval is None else share(interval.point, interval.low, interval.high)


def facts_table(summary: Summary) -> Table:
    """Return everything about one run that the summary table has no column for."""
    kv, score = summary.kv, summary.score
    groups = f" in {score.groups} groups" if score and score.groups else ""
    triggered = summary.validity.triggered_samples
    facts: list[tuple[str, object]] = [
        ("status", summary.status),
        ("task", summary.task),
        ("engine", summary.engine),
        ("model", summary.model),
        ("seed", summary.seed),
        ("samples", f"{summary.samples}{groups}, {triggered} with an event"),
        ("trials", f"{summary.trials} of {summary.expected_trials or 'unknown'}"),
        ("score, failures left out", percent(summary.score_completed)),
        ("failed trials", f"{100 * summary.non_completion_rate:.1f}%"),
        ("infra retries", summary.infra_retries),
        ("user retries", summary.user_retries),
        ("session resets", summary.session_resets),
        ("wall s", number(summary.wall_s)),
        ("TTFT / TPOT ms", f"{number(summary.ttft_ms)} / {number(summary.tpot_ms)}"),
    ]
    if kv is not None:
        moved = kv.rows_moved, kv.restored, kv.recomputed
        facts += [
            *[("peak live, worst", f"{kv.max_peak_bytes / 1e6:.3f} MB")] * bool(kv.max_peak_bytes),
            ("peak live tokens, worst", kv.max_peak_live),
            ("peak live / logical", f"{100 * kv.live_over_logical:.1f}%"),
            ("rows moved / restored / recomputed", " / ".join(map(str, moved))),
            ("KV read", f"{(kv.bytes_read + kv.auxiliary_bytes_read) / 1e9:.3f} GB"),
        ]
        if summary.asks:
            asked = kv.auxiliary_calls, kv.auxiliary_tokens, f"{kv.auxiliary_s:.1f}"
            facts += [
                ("auxiliary calls / tokens / s", " / ".join(map(str, asked))),
                ("peak live without them, worst", kv.max_peak_alone),
            ]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in [*facts, *(("note", note) for note in summary.notes)]:
        table.add_row(plain(name), plain(value))
    return table


def summarize_runs(out: Path, runs: Sequence[str], as_json: bool) -> None:
    """Rebuild and print summaries of runs, paths or ids; first a UsageError if one is absent."""
    found = [RunStore(out).find(run) for run in runs]
    summaries = [summarize(run) for run in found]
    if as_json:
        terminal.print_json([summary.model_dump(mode="json") for summary in summaries])
    else:
        _print_summaries(summaries)


def show_run(
    out: Path, run: str, sample: str | None, as_json: bool, png: Path | None = None
) -> None:
    """Print one run: summary, failures by kind, what a memory cost, its timeline turn by turn.

    With `sample`, that sample's failures, costs, turns and transcripts instead; with `png`, the
    timeline is drawn into that file as well. A UsageError if there is no such run or sample.
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
    size = summary.kv.token_bytes if summary.kv else None
    if png is not None:
        title = reader.path.name if sample is None else f"{reader.path.name}, {sample}"
        draw_timeline(steps(turns), png, title, budget, size)
    if as_json:
        document = {
            "summary": summary.model_dump(mode="json"),
            "trials": msgspec.to_builtins(trials),
            "turns": msgspec.to_builtins(turns),
        }
        if sample is not None:
            document["transcripts"] = [_transcript(reader, record) for record in trials]
        terminal.print_json(document)
        return
    failed = [failure_kinds(summary), failure_table(trials)]
    _print_run(reader, summary, failed)
    if summary.ledger:
        _print_ledger(load_run(reader.path), trials)
    _print_tables(_turn_tables(turns, budget, size, sample is not None))
    if sample is not None:
        _print_transcripts(reader, trials, turns)
    if png is not None:
        terminal.console().print(plain(png), soft_wrap=True)


def _turn_tables(
    turns: Sequence[TurnRecord], budget: int | None, size: float | None, apart: bool
) -> list[Table]:
    """Return the timeline, that of every trial if they are to be told apart, and the turns."""
    if not turns:
        return []
    if not apart:
        return [timeline_table(steps(turns), budget, size), _table(_TURNS, turns_by_index(turns))]
    trials = sorted({turn.trial for turn in turns})
    own = (steps([turn for turn in turns if turn.trial == trial]) for trial in trials)
    return [*(timeline_table(each, budget, size) for each in own), _table(_TURN, turns)]


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
    screen = terminal.console()
    screen.print(summary_table(summaries))
    for summary in summaries:
        for reason in summary.validity.reasons:
            screen.print(plain(f"{summary.run_id}: {reason}"), soft_wrap=True)
    for table in finer_tables(summaries):
        screen.print()
        screen.print(table)


def _print_run(reader: RunReader, summary: Summary, tables: Sequence[Table | None]) -> None:
    _print_summaries([summary])
    screen = terminal.console()
    screen.print()
    screen.print(facts_table(summary))
    if reader.interrupted:
        screen.print("interrupted: run the same command again to finish it")
    _print_tables(tables)


def _print_tables(tables: Iterable[Table | None]) -> None:
    screen = terminal.console()
    for table in tables:
        if table is not None:
            screen.print()
            screen.print(table)


def _print_ledger(run: Run, trials: Sequence[TrialRecord]) -> None:
    """Print what a run's memory cost in some of its trials; nothing of a run without one."""
    own = {"ledger": ledger_means(trials), "trials": len(trials)}
    part = copy(run)
    part.summary = run.summary.model_copy(update=own)
    if tables := ledger_tables([part]):
        terminal.console().print()
        formats.show(tables, "terminal")


def _print_transcripts(
    reader: RunReader, trials: Sequence[TrialRecord], turns: Sequence[TurnRecord]
) -> None:
    screen = terminal.console()
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
