"""Where an engine's session is not the embedded engine's: tokens, kept sets, accounting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import zip_longest

from agentbench_kv.conformance.engines.traces import EngineTrace
from agentbench_kv.conformance.result import CheckResult
from agentbench_kv.engines.base import KVStats

FIGURES = (
    "logical", "live", "peak_live", "evicted", "prefill_tokens", "longest_prefill",
    "decode_tokens", "decode_kv_sum", "bytes_read", "budget",
)  # fmt: skip

Traces = Mapping[str, EngineTrace]
Problem = Callable[[EngineTrace, EngineTrace], str]
"""Says where the second session differs from the first; empty if it does not."""


def compare(name: str, expected: Traces, found: Traces, problem: Problem) -> CheckResult:
    """Check a property session by session; the detail is the first counterexample."""
    for session, trace in found.items():
        text = error_problem(trace) or problem(expected[session], trace)
        if text:
            return CheckResult(name, False, f"{session}: {text}")
    return CheckResult(name, True, f"{len(found)} sessions")


def error_problem(trace: EngineTrace) -> str:
    """Say what ended a session early; empty if nothing did."""
    return "" if trace.error is None else f"{type(trace.error).__name__}: {trace.error}"


def token_problem(expected: EngineTrace, found: EngineTrace) -> str:
    for turn, (want, got) in enumerate(zip(expected.turns, found.turns, strict=True)):
        if want != got:
            for index, (a, b) in enumerate(zip_longest(want, got, fillvalue="the end")):
                if a != b:
                    return f"turn {turn}, token {index}: {b} instead of {a}"
    return ""


def reason_problem(expected: EngineTrace, found: EngineTrace) -> str:
    if expected.reasons == found.reasons:
        return ""
    ended, wanted = (", ".join(map(str, each.reasons)) for each in (found, expected))
    return f"ended by {ended} instead of {wanted}"


def kept_problem(expected: EngineTrace, found: EngineTrace) -> str:
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
