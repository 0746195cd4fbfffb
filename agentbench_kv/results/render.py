"""Tables for the terminal. Every cell is data: markup and control characters stay visible text."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

from rich.table import Table

from agentbench_kv.results.reader import turns_by_index
from agentbench_kv.results.records import TrialRecord, TurnRecord
from agentbench_kv.results.stats import Interval
from agentbench_kv.results.summary import Summary
from agentbench_kv.results.terminal import failures, new_table, number, plain, share

_MOST_ROWS = 50


def summary_table(summaries: Sequence[Summary]) -> Table:
    """Return one row per run: scores, KV figures, speed, failures, validity.

    Scores are percentages with their 95% intervals, KV figures tokens per (layer, KV head).
    """
    columns = (
        "run", "method", "budget", "score [95% CI]", "triggered only", "peak live", "logical",
        "events", "evicted", "tok/s", "failures", "validity",
    )  # fmt: skip
    return new_table(*columns, rows=map(_summary_row, summaries))


def _summary_row(summary: Summary) -> tuple[object, ...]:
    kv = summary.kv
    return (
        summary.run_id,
        summary.method,
        summary.budget,
        percent(summary.score),
        percent(summary.score_triggered),
        kv and number(kv.median_peak_live),
        kv and number(kv.median_logical),
        kv and kv.events,
        kv and kv.evicted,
        number(summary.tokens_per_s),
        failures(summary.failures),
        summary.validity.state,
    )


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


def facts_table(summary: Summary) -> Table:
    """Return everything about one run that the summary table has no column for."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in _facts(summary):
        table.add_row(plain(name), plain(value))
    return table


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
    columns = (
        "sample", "trial", "turn", "prompt", "output", "phases", "live", "events", "evicted",
        "restored", "prefill", "KV MB read", "TTFT ms", "TPOT ms",
    )  # fmt: skip
    rows = (
        (
            turn.sample_id,
            turn.trial,
            turn.turn,
            turn.prompt_tokens,
            turn.output_tokens,
            " ".join(f"{name} {count}" for name, count in turn.phases.items()),
            f"{turn.live_before} > {turn.live_after}",
            turn.events,
            turn.evicted,
            turn.restored,
            turn.prefill_tokens,
            number(turn.kv_bytes_read / 1e6),
            number(turn.ttft_ms),
            number(turn.tpot_ms),
        )
        for turn in turns
    )
    return new_table(*columns, rows=rows)


def turn_overview(turns: Sequence[TurnRecord]) -> Table:
    """Return one row per turn index: medians over trials, totals of events and evicted tokens."""
    columns = (
        "turn", "trials", "prompt", "output", "live before", "live after", "events", "evicted",
        "TTFT ms", "TPOT ms",
    )  # fmt: skip
    rows = (
        (
            index,
            len(group),
            _median(turn.prompt_tokens for turn in group),
            _median(turn.output_tokens for turn in group),
            _median(turn.live_before for turn in group),
            _median(turn.live_after for turn in group),
            sum(turn.events for turn in group),
            sum(turn.evicted for turn in group),
            _median(turn.ttft_ms for turn in group),
            _median(turn.tpot_ms for turn in group),
        )
        for index, group in turns_by_index(turns)
    )
    return new_table(*columns, rows=rows)


def percent(interval: Interval | None) -> str | None:
    """Write a share with its interval, in percent."""
    return None if interval is None else share(interval.point, interval.low, interval.high)


def _median(values: Iterable[float | None]) -> str | None:
    known = [value for value in values if value is not None]
    return number(statistics.median(known)) if known else None


def _facts(summary: Summary) -> list[tuple[str, object]]:
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
    return facts + [("note", note) for note in summary.notes]
