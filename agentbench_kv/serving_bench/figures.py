"""Figures of a measurement, from its requests; names are `vllm bench serve`'s where it has one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentbench_kv.serving_bench.endpoints import TimedTurn
from agentbench_kv.serving_bench.jobs import TraceSession, prefix_hits

_MEDIANS = ("peak_bytes", "peak_live", "live", "logical")
_SUMMED = (
    "events", "evicted", "restored", "prefill_tokens", "recomputed", "rewrites", "session_resets",
    "refused",
)  # fmt: skip
# What `--goodput` sets targets of, and where a request has it.
_MEASURED = {"ttft": "ttft_s", "tpot": "tpot_s", "e2el": "latency_s"}
_FROM_START = ("ttft", "e2el")  # of which a request that was sent late has less left
TARGETS = tuple(_MEASURED)


def figures(
    turns: Sequence[TimedTurn],
    seconds: float,
    targets: Mapping[str, float] | None = None,
    sessions: Sequence[TraceSession] = (),
) -> dict[str, int | float]:
    """Return every figure of a measurement; failed requests only count as failed.

    `total_input_tokens` are new tokens, each counted once; `total_prompt_tokens` count a session's
    history again in every turn, as an API would bill it. Latencies are absent if nothing completed.
    """
    done = [turn for turn in turns if turn.error is None]

    def per_second(count: float) -> float:
        return count / seconds if seconds > 0 else 0.0

    new, out = sum(t.new_tokens for t in done), sum(t.output_tokens for t in done)
    starts, ends = [t.start for t in done], [t.end for t in done]
    firsts = [t.start + t.ttft_s for t in done]
    found: dict[str, int | float] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(turns) - len(done),
        "sessions": len({turn.session for turn in turns}),
        "total_input_tokens": new,
        "total_prompt_tokens": sum(t.prompt_tokens for t in done),
        "total_output_tokens": out,
        "request_throughput": per_second(len(done)),
        "output_throughput": per_second(out),
        "total_token_throughput": per_second(new + out),
        "max_concurrent_requests": most_at_once(starts, ends),
        "max_concurrent_decodes": most_at_once(firsts, ends),
        "concurrency": per_second(sum(t.latency_s for t in done)),
    }
    if (decoding := covered(firsts, ends)) > 0:
        found["mean_concurrent_decodes"] = sum(t.latency_s - t.ttft_s for t in done) / decoding
    if targets:
        good, whole = _good(done, targets, sessions)
        found |= {"request_goodput": per_second(good), "session_goodput": per_second(whole)}
    if told := [turn for turn in done if turn.cached_tokens is not None]:
        found["cached_prompt_tokens"] = sum(turn.cached_tokens or 0 for turn in told)
        prompt = sum(turn.prompt_tokens for turn in told)
        found["prefix_hit_rate"] = found["cached_prompt_tokens"] / prompt
    if sessions:
        prompt = sum(sum(session.prompts) for session in sessions)
        found["prefix_hit_bound"] = prefix_hits(sessions) / prompt
    for name, values in _latencies(done).items():
        if values:
            ms = np.array(values) * 1e3
            p90, p99 = np.percentile(ms, (90, 99))
            found[f"mean_{name}_ms"] = float(ms.mean())
            found[f"median_{name}_ms"] = float(np.median(ms))
            found[f"std_{name}_ms"] = float(ms.std())
            found |= {f"p90_{name}_ms": float(p90), f"p99_{name}_ms": float(p99)}
    return found


def kv_figures(turns: Sequence[TimedTurn]) -> dict[str, Any] | None:
    """Sum up the KV accounting of sessions: the last that each sent; None if none did.

    Token counts are per (layer, KV head). `max_over_budget` is the most that a session's peak was
    above budget and longest single prefill; what is left over may be at most the method's interval.
    """
    last = {(turn.session, turn.part): turn.kv for turn in turns if turn.kv}
    if not last:
        return None
    accounts = list(last.values())
    phases = Counter[str]()
    for turn in turns:
        phases.update((turn.kv or {}).get("phases") or {})
    budgets = {account.get("budget") for account in accounts}

    def column(name: str) -> list[Any]:
        return [account.get(name, 0) for account in accounts]

    steps, held = column("decode_tokens"), column("mean_decode_kv")
    over = [
        account["peak_live"] - account["budget"] - account.get("longest_prefill", 0)
        for account in accounts
        if account.get("budget") is not None
    ]
    return {
        "sessions": len(accounts),
        "budget": budgets.pop() if len(budgets) == 1 else None,
        **{f"median_{name}": float(np.median(column(name))) for name in _MEDIANS},
        "max_peak_live": max(column("peak_live")),
        "longest_prefill": max(column("longest_prefill")),
        "mean_decode_kv": float(np.average(held, weights=steps)) if sum(steps) else 0.0,
        "bytes_read": sum((turn.kv or {}).get("turn_bytes_read", 0) for turn in turns),
        "decode_tokens": sum(steps),
        "max_over_budget": max(over, default=None),
        "compressed_sessions": sum(account.get("events", 0) > 0 for account in accounts),
        **{name: sum(column(name)) for name in _SUMMED},
        "phases": dict(phases),
    }


def most_at_once(starts: Sequence[float], ends: Sequence[float]) -> int:
    """Return how many intervals overlap at most; one that ends as another starts does not."""
    steps = sorted([*((end, -1) for end in ends), *((start, 1) for start in starts)])
    return max(np.cumsum([step for _, step in steps], dtype=int).tolist(), default=0)


def covered(starts: Sequence[float], ends: Sequence[float]) -> float:
    """Return how long at least one of some intervals lasts."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(zip(starts, ends, strict=True)):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def _latencies(done: Sequence[TimedTurn]) -> dict[str, list[float]]:
    """Return seconds to the first token, per later token, between tokens, to the last, too late."""
    several = [turn for turn in done if turn.output_tokens > 1]
    return {
        "ttft": [turn.ttft_s for turn in done],
        "ttft_first": [turn.ttft_s for turn in done if turn.turn == 0],
        "ttft_later": [turn.ttft_s for turn in done if turn.turn > 0],
        "tpot": [turn.tpot_s for turn in several],
        "itl": [gap for turn in done for gap in turn.itls_s],
        "e2el": [turn.latency_s for turn in done],
        "late": [turn.late_s for turn in done] if any(turn.late_s for turn in done) else [],
    }


def _good(
    done: Sequence[TimedTurn], targets: Mapping[str, float], sessions: Sequence[TraceSession]
) -> tuple[int, int]:
    """Count the requests that stay within all targets, and the sessions that do in every call.

    Where a trace's clock says when a request was due, its time runs from then.
    """

    def within(turn: TimedTurn) -> bool:
        late = dict.fromkeys(_FROM_START, turn.late_s)
        took = ((getattr(turn, _MEASURED[name]) + late.get(name, 0.0), name) for name in targets)
        return all(seconds * 1e3 <= targets[name] for seconds, name in took)

    good = Counter(turn.session for turn in done if within(turn))
    whole = (good[number] == len(session.calls) for number, session in enumerate(sessions))
    return good.total(), sum(whole)
