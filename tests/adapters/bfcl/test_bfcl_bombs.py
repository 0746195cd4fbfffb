"""Calls that never end, eat memory or come apart: one trial's failure, and no other's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from agentbench_kv.adapters.bfcl.task import MultiTurnBase

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("bfcl_python")]
POWER = ("power", {"base": 7, "exponent": 10**10})
FIRST = {f"multi_turn_base_{number}" for number in range(18)}
BOMBED = "multi_turn_base_15"  # the first with the mathematical functions


def plain(record: Any) -> Any:
    """Return all of a trial's record that does not depend on the clock."""
    return {name: getattr(record, name) for name in record.__struct_fields__ if name != "timing"}


def test_one_bomb_among_eighteen_costs_its_own_trial(bombed: Callable[..., Any]) -> None:
    calm = bombed(MultiTurnBase, {}, "--limit", "18")
    played = bombed(MultiTurnBase, {BOMBED: [POWER]}, "--limit", "18")
    assert set(played.attempts) == FIRST
    for sample in FIRST - {BOMBED}:
        (record,), (undisturbed,) = played.attempts[sample], calm.attempts[sample]
        assert plain(record) == plain(undisturbed)
        assert (record.status, record.score, record.attempts) == ("scored", 1.0, 1)
    first, again = played.attempts[BOMBED]
    assert (first.status, again.status, again.attempts) == ("infra_error", "timeout", 2)
    assert again.error == (
        "a call took over 2 s of processor time, and did so again when it was played once more"
    )
    assert played.summary["infra_retries"] == 1
    assert played.summary["failures"] == {"timeout": 1}
    assert played.summary["validity"]["state"] == "valid"
    assert "1 timeout" in played.shown


def nested(depth: int) -> str:
    call = f'{{"name": "mean", "arguments": {{"numbers": {"[" * depth}1{"]" * depth}}}}}'
    return f"<tool_call>\n{call}\n</tool_call>"


BOMBS: dict[str, tuple[list[Any], str, float | None]] = {
    "15": ([POWER], "timeout", None),
    "28": ([("logarithm", {"value": 7, "base": 3, "precision": 10**8})], "timeout", None),
    # More memory than there may be is an error that the agent reads; then it goes on.
    "31": ([("square_root", {"number": 2, "precision": 10**17})], "scored", 1.0),
    "32": (["<tool_call>" + " " * 30_000], "scored", 0.0),
    "34": ([nested(100_000)], "scored", 0.0),
    "35": ([nested(500)], "scored", 0.0),
    "36": ([("power", {"base": 7, "exponent": 10**5})], "scored", 1.0),
}


def test_bombs_of_every_kind_at_once(bombed: Callable[..., Any]) -> None:
    bombs = {f"multi_turn_base_{number}": said for number, (said, *_) in BOMBS.items()}
    played = bombed(MultiTurnBase, bombs, "--limit", "38", "--max-tokens", "300000")
    found = {
        sample.rpartition("_")[2]: (attempts[-1].status, attempts[-1].score)
        for sample, attempts in played.attempts.items()
    }
    expected = {number: tuple(wanted) for number, (_, *wanted) in BOMBS.items()}
    assert found == {str(n): ("scored", 1.0) for n in range(38)} | expected
    assert {n: len(a) for n, a in played.attempts.items() if len(a) > 1} == {
        "multi_turn_base_15": 2, "multi_turn_base_28": 2,
    }  # fmt: skip
    assert played.summary["infra_retries"] == 2


@pytest.mark.slow
def test_what_harms_the_checker_alone_is_the_agents_failure_too(
    bombed: Callable[..., Any],
) -> None:
    """Calls within the limit, each by itself; the checker runs all of them without a pause."""
    exponent, took = 10**6, 0.0
    while took < 0.3:
        exponent = exponent * 3 // 2
        started = time.process_time()
        7**exponent
        took = time.process_time() - started
    call = ("power", {"base": 7, "exponent": exponent})
    played = bombed(MultiTurnBase, {BOMBED: [call] * 14}, "--limit", "18")
    failed = {s: [r.status for r in a] for s, a in played.attempts.items() if len(a) > 1}
    assert failed == {BOMBED: ["infra_error", "timeout"]}
    # All of them were answered, so it was not one of them that took too long.
    assert played.attempts[BOMBED][-1].usage.requests > 14
