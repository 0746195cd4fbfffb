"""What reading cost and what answering cost, for tasks that read first and ask then."""

from __future__ import annotations

from collections.abc import Sequence

from agentbench_kv.adapters.base import Reading
from agentbench_kv.gateway.reports import Spent, TurnInfo
from agentbench_kv.results.records import Metric, TurnRecord


def ledger(
    reading: Reading | None, turns: Sequence[TurnInfo | TurnRecord | Spent], *, timed: bool = True
) -> dict[str, Metric]:
    """Return tokens, calls and seconds of reading and of answering; empty without reading.

    A reading turn's prompt, and the time to its first token, are the reading's; what it generates
    is an answer's, as are all later turns. So the first question's few tokens count as read. Calls
    of reading are those made for nothing else: none where the session itself is the memory.
    Where questions are asked in sessions beside the trial's own, `turns` are all answers in them.
    Seconds are None where the engine measures none, or `timed` forbids performance figures. Tokens
    are those prefilled and generated. Of past sessions that came from files, all three are what it
    took to make these.
    """
    if reading is None:
        return {}
    read, later = turns[: reading.turns], turns[reading.turns :]
    generated = sum(turn.output_tokens for turn in turns)
    waited = _seconds([turn.ttft_ms for turn in read]) if timed else None
    asked = _seconds([turn.ttft_ms for turn in later]) if timed else None
    spoken = _seconds([_decoding_ms(turn) for turn in turns])
    return {
        "ingest_calls": reading.calls,
        "ingest_tokens": reading.tokens + sum(turn.prefill_tokens for turn in read),
        "ingest_s": None if waited is None else reading.seconds + waited,
        **({"ingest_failed": reading.failed} if reading.failed else {}),
        **_from_files(reading, timed=timed),
        **_appended(reading, timed=timed),
        "answer_calls": len(turns),
        "answer_tokens": generated + sum(turn.prefill_tokens for turn in later),
        "answer_s": None if asked is None or spoken is None else asked + spoken,
    }


def _from_files(reading: Reading, *, timed: bool) -> dict[str, Metric]:
    """Say how many past sessions came from files, and what that took in place of `ingest_s`."""
    if not reading.files:
        return {}
    return {"ingest_files": reading.files, "ingest_files_s": reading.files_s if timed else None}


def _appended(reading: Reading, *, timed: bool) -> dict[str, Metric]:
    """Say how many tokens finished turns added to a memory, and what that took beside them."""
    if not reading.appended:
        return {}
    return {"append_tokens": reading.appended, "append_s": reading.append_s if timed else None}


def answers(spent: Sequence[Spent], *, timed: bool = True) -> dict[str, Metric]:
    """Return what answers took, those of sessions beside the trial's own too: totals and counts."""
    found: dict[str, Metric] = {}
    for name in ("prefill_tokens", "live_tokens", "ttft_ms"):
        values = [getattr(each, name) for each in spent]
        if values and None not in values and (timed or name != "ttft_ms"):
            found |= {f"answer_{name}_total": sum(values), f"answer_{name}_count": len(values)}
    return found


def _decoding_ms(turn: TurnInfo | TurnRecord | Spent) -> float | None:
    """Return the milliseconds from a turn's first token to its last."""
    if turn.output_tokens < 2:
        return 0.0
    return None if turn.tpot_ms is None else turn.tpot_ms * (turn.output_tokens - 1)


def _seconds(parts: Sequence[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) / 1000 if len(known) == len(parts) else None
