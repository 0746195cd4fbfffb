"""A run's own page: every figure with where it comes from, timeline, failures, transcripts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentbench_kv.results.runs import Problem, Run
from agentbench_kv.results.site.text import number, percent, visible
from agentbench_kv.results.site.timeline import overview, read_turns, session, timeline
from agentbench_kv.results.site.transcripts import transcripts
from agentbench_kv.results.stats import Interval
from agentbench_kv.results.summary import Summary

MOST_FAILURES = 200
MOST_SAMPLES = 1000
_HASHED = ("samples.jsonl", "turns.jsonl", "run.json")
_METHODS = {
    "wilson": "Wilson interval over samples",
    "score": "score interval over samples",
    "groups": "score interval over groups of samples",
}


@dataclass(frozen=True)
class Figure:
    """A number with its name, how it is derived, and the anchor that links point at."""

    anchor: str
    name: str
    value: str
    how: str


def context(run: Run, problems: Sequence[Problem]) -> dict[str, Any]:
    """Return what the template of a run's page shows."""
    trials = run.records()
    failed = [record for record in trials if record.score is None]
    return {
        "run": run,
        "summary": run.summary,
        "figures": list(_figures(run.summary)),
        "notes": [*run.summary.notes, *(p.reason for p in problems if p.path == run.path)],
        "failed": failed[:MOST_FAILURES],
        "failed_more": max(0, len(failed) - MOST_FAILURES),
        "samples": trials[:MOST_SAMPLES],
        "samples_more": max(0, len(trials) - MOST_SAMPLES),
        "transcripts": transcripts(run.path, trials),
        "spec": list(_flat(run.spec)),
        "provenance": list(_flat(run.info.provenance)),
        "files": list(_hashes(run.path)),
        **_timelines(run),
    }


def _figures(summary: Summary) -> Iterator[Figure]:
    trials = f"{summary.trials:,} trials of {summary.samples:,} samples (samples.jsonl)"
    yield Figure("score", "Score", percent(summary.score), _how(summary.score, trials))
    yield Figure(
        "triggered",
        "Score, triggered samples only",
        percent(summary.score_triggered),
        f"the {summary.validity.triggered_samples:,} samples with at least one eviction",
    )
    yield Figure(
        "completed",
        "Score, failed trials left out",
        percent(summary.score_completed),
        "what the failures cost; the headline counts each of them as 0",
    )
    yield from _pass_figures(summary)
    yield from _kv_figures(summary)
    yield from _speed_figures(summary)
    kinds = ", ".join(f"{count} {kind}" for kind, count in summary.failures.items())
    yield Figure(
        "failures",
        "Non-completion",
        f"{100 * summary.non_completion_rate:.1f}%",
        f"failed trials over trials; {kinds or 'none failed'}; "
        f"{summary.infra_retries} retries after infrastructure errors, "
        f"{summary.session_resets} session resets",
    )


def _pass_figures(summary: Summary) -> Iterator[Figure]:
    for name, ends in summary.pass_k.items():
        k = name.removeprefix("pass^")
        chance = f"chance that {k} trials of a sample all succeed, without bias"
        how = f"{chance}; 95% {_METHODS[ends.method]} (n = {ends.n:,})"
        yield Figure(f"pass-{k}", name, percent(ends), how)


def _kv_figures(summary: Summary) -> Iterator[Figure]:
    kv = summary.kv
    if kv is None:
        yield Figure("kv", "KV", number(None), "no trial reached the engine")
        return
    each = "tokens per (layer, KV head)"
    yield Figure(
        "kept",
        "Achieved KV",
        f"{100 * kv.live_over_logical:.1f}%",
        "mean over trials of kv.peak_live / kv.logical",
    )
    peak = f"median over trials of kv.peak_live, {each}; the most in any: {kv.max_peak_live:,}"
    yield Figure("peak", "Peak live", number(kv.median_peak_live), peak)
    yield Figure(
        "logical",
        "Logical",
        number(kv.median_logical),
        f"median over trials of kv.logical: {each} ever seen",
    )
    yield Figure(
        "decode-kv",
        "Live while decoding",
        number(kv.mean_decode_kv),
        "mean over trials of kv.mean_decode_kv",
    )
    totals = f"{kv.evicted:,} tokens evicted, {kv.restored:,} restored, {kv.rows_moved:,} moved"
    yield Figure("events", "Events", number(kv.events), f"total over trials; {totals}")
    yield Figure(
        "read",
        "KV read",
        f"{kv.bytes_read / 1e9:,.2f} GB",
        "total over trials of kv.bytes_read: K and V read while decoding",
    )


def _speed_figures(summary: Summary) -> Iterator[Figure]:
    tokens = summary.kv.decode_tokens if summary.kv else 0
    yield Figure(
        "speed",
        "Output tokens/s",
        number(summary.tokens_per_s),
        f"{tokens:,} generated tokens over {summary.wall_s:,.1f} s; one measurement, no ranking",
    )
    yield Figure("ttft", "TTFT, ms", number(summary.ttft_ms), "median over scored trials")
    yield Figure("tpot", "TPOT, ms", number(summary.tpot_ms), "median over scored trials")


def _how(ends: Interval | None, trials: str) -> str:
    if ends is None:
        return "no trials"
    return f"mean over samples, 95% {_METHODS[ends.method]} (n = {ends.n:,}); {trials}"


def _timelines(run: Run) -> dict[str, Any]:
    trials = read_turns(run.path / "turns.jsonl")
    if not trials:
        return {"turn_figures": []}
    longest = max(trials, key=lambda turns: (sum(t.events for t in turns), len(turns)))
    figures = overview(trials)
    budget = run.tokens if isinstance(run.budget, int) else None
    return {
        "turn_figures": figures,
        "turn_trials": len(trials),
        "turns_clipped": len(trials) < run.summary.trials,
        "timeline": timeline(figures, budget),
        "session": session(longest, budget),
        "session_name": f"{visible(longest[0].sample_id, 80)}, trial {longest[0].trial}",
    }


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield `a.b` and its value for every leaf."""
    for key, value in data.items():
        name = f"{prefix}{visible(key, 60)}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield name, visible(text)


def _hashes(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Yield name, bytes and SHA-256 of each file that the page's figures come from."""
    for name in _HASHED:
        path = folder / name
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            yield name, path.stat().st_size, digest
