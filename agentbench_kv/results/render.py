"""Tables for the terminal. Every cell is data: markup and control characters stay visible text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from rich.table import Table

from agentbench_kv.results.reader import turns_by_index
from agentbench_kv.results.records import TrialRecord, TurnRecord
from agentbench_kv.results.stats import Interval
from agentbench_kv.results.summary import Summary, median
from agentbench_kv.results.terminal import failures, new_table, number, plain, share

T = TypeVar("T")

_MOST_ROWS = 50


# Scores are percentages with their 95% intervals, KV figures tokens per (layer, KV head).
_SUMMARY: dict[str, Callable[[Summary], object]] = {
    "run": lambda run: run.run_id,
    "method": lambda run: run.method,
    "budget": lambda run: run.budget,
    "score [95% CI]": lambda run: percent(run.score),
    "triggered only": lambda run: percent(run.score_triggered),
    "peak live": lambda run: run.kv and number(run.kv.median_peak_live),
    "logical": lambda run: run.kv and number(run.kv.median_logical),
    "events": lambda run: run.kv and run.kv.events,
    "evicted": lambda run: run.kv and run.kv.evicted,
    "tok/s": lambda run: number(run.tokens_per_s),
    "failures": lambda run: failures(run.failures),
    "validity": lambda run: run.validity.state,
}
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
    """Return one row per run: scores, KV figures, speed, failures, validity."""
    return _table(_SUMMARY, summaries)


def finer_tables(summaries: Sequence[Summary]) -> list[Table]:
    """Return what the headline scores are made of: sub-scores, and pass^k of repeated trials.

    Each has one row per run. A sub-score that crosses two others (`tool_one_shot`) is left to
    `summary.json`.
    """
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
    rows = (
        (r.sample_id, r.trial, r.status, r.attempts, r.transcript, r.error)
        for r in failed[:_MOST_ROWS]
    )
    table = new_table(*columns, rows=rows)
    if len(failed) > _MOST_ROWS:
        table.add_row(f"and {len(failed) - _MOST_ROWS} more; --json shows all")
    return table if failed else None


def turn_table(turns: Sequence[TurnRecord]) -> Table:
    """Return one row per turn; live tokens before and after, times in milliseconds."""
    return _table(_TURN, turns)


def turn_overview(turns: Sequence[TurnRecord]) -> Table:
    """Return one row per turn index."""
    return _table(_TURNS, turns_by_index(turns))


def percent(interval: Interval | None) -> str | None:
    """Write a share with its interval, in percent."""
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
        facts += [
            ("peak live, worst", kv.max_peak_live),
            ("peak live / logical", f"{100 * kv.live_over_logical:.1f}%"),
            (
                "rows moved / restored / recomputed",
                f"{kv.rows_moved} / {kv.restored} / {kv.recomputed}",
            ),
            ("KV read", f"{kv.bytes_read / 1e9:.3f} GB"),
        ]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in [*facts, *(("note", note) for note in summary.notes)]:
        table.add_row(plain(name), plain(value))
    return table
