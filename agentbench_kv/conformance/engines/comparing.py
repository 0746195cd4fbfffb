"""Where an engine's session is not the embedded engine's: tokens, kept sets, accounting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agentbench_kv.conformance.engines.traces import EngineTrace
from agentbench_kv.conformance.result import CheckResult
from agentbench_kv.engines.base import KVStats

__all__ = [
    "accounting_problem",
    "compare",
    "error_problem",
    "kept_problem",
    "reason_problem",
    "token_problem",
]

FIGURES = (
    "logical",
    "live",
    "peak_live",
    "evicted",
    "prefill_tokens",
    "longest_prefill",
    "decode_tokens",
    "decode_kv_sum",
    "bytes_read",
    "budget",
)

Traces = Mapping[str, EngineTrace]
Problem = Callable[[EngineTrace, EngineTrace], str]


def compare(name: str, expected: Traces, found: Traces, problem: Problem) -> CheckResult:
    """Check a property session by session; the detail is the first counterexample."""
    for session, trace in found.items():
        text = error_problem(trace) or problem(expected[session], trace)
        if text:
            return CheckResult(name, False, f"{session}: {text}")
    return CheckResult(name, True, f"{len(found)} sessions")


def error_problem(trace: EngineTrace) -> str:
    """Say what ended a session early, or nothing."""
    return "" if trace.error is None else f"{type(trace.error).__name__}: {trace.error}"


def token_problem(expected: EngineTrace, found: EngineTrace) -> str:
    """Say where two sessions' generated ids part, or nothing."""
    for turn, (want, got) in enumerate(zip(expected.turns, found.turns, strict=True)):
        if want != got:
            pairs = enumerate(zip(want, got, strict=False))
            first = next((i for i, (a, b) in pairs if a != b), min(len(want), len(got)))
            return f"turn {turn}, token {first}: {_at(got, first)} instead of {_at(want, first)}"
    return ""


def reason_problem(expected: EngineTrace, found: EngineTrace) -> str:
    """Say where a generation ended for another reason, or nothing."""
    if expected.reasons == found.reasons:
        return ""
    return f"ended by {_words(found.reasons)} instead of {_words(expected.reasons)}"


def kept_problem(expected: EngineTrace, found: EngineTrace) -> str:
    """Say which event kept other positions, or nothing."""
    if found.kept_missing:
        return found.kept_missing
    for number, (want, got) in enumerate(zip(expected.events, found.events, strict=False)):
        if want.logical != got.logical or want.kept.shape != got.kept.shape:
            return (
                f"event {number} at {got.logical} keeps {tuple(got.kept.shape)}, "
                f"expected {tuple(want.kept.shape)} at {want.logical}"
            )
        differ = (want.kept.sort(-1).values != got.kept.sort(-1).values).any(-1).nonzero()
        if len(differ):
            layer, head = differ[0].tolist()
            mine, theirs = set(got.kept[layer, head].tolist()), set(want.kept[layer, head].tolist())
            return (
                f"event {number}, layer {layer}, head {head} keeps {sorted(mine - theirs)[:5]} "
                f"instead of {sorted(theirs - mine)[:5]}"
            )
    return ""


def accounting_problem(expected: EngineTrace, found: EngineTrace) -> str:
    """Say which figure of the accounting is another one, or nothing."""
    for turn, (want, got) in enumerate(zip(expected.after, found.after, strict=True)):
        text = _figures_problem(want, got)
        if text:
            return f"after turn {turn}: {text}"
    return _figures_problem(expected.stats, found.stats)


def _figures_problem(want: KVStats, got: KVStats) -> str:
    wrong = [
        f"{key} {getattr(got, key)}, expected {getattr(want, key)}"
        for key in FIGURES
        if getattr(got, key) != getattr(want, key)
    ]
    if _events(got) != _events(want):
        wrong.append(f"events {_events(got)}, expected {_events(want)}")
    if bool(got.rows_moved) != bool(want.rows_moved):
        wrong.append(f"rows_moved {got.rows_moved}, the embedded engine's {want.rows_moved}")
    return "; ".join(wrong)


def _events(stats: KVStats) -> list[tuple[int, int, int, int]]:
    return [(e.decoded, e.logical, e.live_before, e.live_after) for e in stats.events]


def _at(tokens: list[int], index: int) -> Any:
    return tokens[index] if index < len(tokens) else "the end"


def _words(reasons: list[Any]) -> str:
    return ", ".join(str(reason) for reason in reasons)
