"""Tables for the terminal. Every cell is data: markup and control characters stay visible text."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from agentbench_kv.results.records import TrialRecord, TurnRecord
from agentbench_kv.results.stats import Interval
from agentbench_kv.results.summary import Summary
from agentbench_kv.results.terminal import console as console
from agentbench_kv.results.terminal import failures, number, share
from agentbench_kv.results.terminal import new_table as new_table
from agentbench_kv.results.terminal import plain as plain

_MOST_ROWS = 50


def summary_table(summaries: Sequence[Summary]) -> Table:
    """Return one row per run: scores, KV figures, speed, failures, validity.

    Scores are percentages with their 95% intervals, KV figures tokens per (layer, KV head).
    """
    table = new_table(
        "run", "method", "budget", "score [95% CI]", "triggered only", "peak live", "logical",
        "events", "evicted", "tok/s", "failures", "validity",
    )  # fmt: skip
    for summary in summaries:
        kv = summary.kv
        row = (
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
        table.add_row(*map(plain, row))
    return table


def finer_tables(summaries: Sequence[Summary]) -> list[Table]:
    """Return what the headline scores are made of: sub-scores, and pass^k of repeated trials."""
    tables = (_sub_score_table(summaries), _pass_table(summaries))
    return [table for table in tables if table is not None]


def _sub_score_table(summaries: Sequence[Summary]) -> Table | None:
    """Return one row per run, one column per sub-score; None if no run has any.

    A sub-score that crosses two others (`tool_one_shot`) is left to `summary.json`.
    """
    parts = [
        {name: part.interval for name, part in summary.sub_scores.items()} for summary in summaries
    ]
    return _shares(summaries, _plain_sub_scores(summaries), parts)


def _pass_table(summaries: Sequence[Summary]) -> Table | None:
    """Return one row per run, one column for each pass^k; None if no run repeats its samples."""
    names = dict.fromkeys(name for summary in summaries for name in summary.pass_k)
    return _shares(summaries, list(names), [summary.pass_k for summary in summaries])


def _shares(
    summaries: Sequence[Summary], names: Sequence[str], shares: Sequence[Mapping[str, Interval]]
) -> Table | None:
    table = new_table("method", "budget", "task", *names)
    for summary, each in zip(summaries, shares, strict=True):
        cells = (percent(each.get(name)) for name in names)
        table.add_row(*map(plain, (summary.method, summary.budget, summary.task, *cells)))
    return table if names else None


def _plain_sub_scores(summaries: Sequence[Summary]) -> list[str]:
    names = dict.fromkeys(name for summary in summaries for name in summary.sub_scores)
    crossed = {f"{a}_{b}" for a in names for b in names}
    return [name for name in names if name not in crossed]


def facts_table(summary: Summary) -> Table:
    """Return everything about one run that the summary table has no column for."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in _facts(summary):
        table.add_row(plain(name), plain(value))
    return table


def failure_kinds(summary: Summary) -> Table | None:
    """Return one row per failure kind with its share of the trials; None without failures."""
    table = new_table("failure", "trials", "share")
    for kind, count in summary.failures.items():
        table.add_row(*map(plain, (kind, count, f"{100 * count / summary.trials:.1f}%")))
    return table if summary.failures else None


def failure_table(trials: Sequence[TrialRecord]) -> Table | None:
    """Return one row per trial without a score; None if there is none."""
    failed = [record for record in trials if record.score is None]
    table = new_table("sample", "trial", "status", "attempts", "transcript", "error")
    for record in failed[:_MOST_ROWS]:
        row = (
            record.sample_id,
            record.trial,
            record.status,
            record.attempts,
            record.transcript,
            record.error,
        )
        table.add_row(*map(plain, row))
    if len(failed) > _MOST_ROWS:
        table.add_row(f"and {len(failed) - _MOST_ROWS} more; --json shows all")
    return table if failed else None


def turn_table(turns: Sequence[TurnRecord]) -> Table:
    """Return one row per turn; live tokens before and after, times in milliseconds."""
    table = new_table(
        "sample", "trial", "turn", "prompt", "output", "phases", "live", "events", "evicted",
        "restored", "prefill", "KV MB read", "TTFT ms", "TPOT ms",
    )  # fmt: skip
    for turn in turns:
        row = (
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
        table.add_row(*map(plain, row))
    return table


def turn_overview(turns: Sequence[TurnRecord]) -> Table:
    """Return one row per turn index: medians over trials, totals of events and evicted tokens."""
    table = new_table(
        "turn", "trials", "prompt", "output", "live before", "live after", "events", "evicted",
        "TTFT ms", "TPOT ms",
    )  # fmt: skip
    for index in sorted({turn.turn for turn in turns}):
        group = [turn for turn in turns if turn.turn == index]
        row = (
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
        table.add_row(*map(plain, row))
    return table


def percent(interval: Interval | None) -> str | None:
    """Write a share with its interval, in percent."""
    return None if interval is None else share(interval.point, interval.low, interval.high)


def _median(values: Iterable[float | None]) -> str | None:
    known = [value for value in values if value is not None]
    return number(statistics.median(known)) if known else None


def _samples(summary: Summary) -> str:
    """Return how many there are, and in how many groups if groups were resampled."""
    score = summary.score
    groups = f" in {score.groups} groups" if score and score.groups else ""
    return f"{summary.samples}{groups}"


def _facts(summary: Summary) -> list[tuple[str, object]]:
    kv = summary.kv
    facts: list[tuple[str, object]] = [
        ("status", summary.status),
        ("task", summary.task),
        ("engine", summary.engine),
        ("model", summary.model),
        ("seed", summary.seed),
        ("samples", f"{_samples(summary)}, {summary.validity.triggered_samples} with an event"),
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
                _triple(kv.rows_moved, kv.restored, kv.recomputed),
            ),
            ("KV read", f"{kv.bytes_read / 1e9:.3f} GB"),
        ]
    return facts + [("note", note) for note in summary.notes]


def _triple(*values: int) -> str:
    return " / ".join(str(value) for value in values)
