"""Calls that never end or come apart, in simulations: one trial's failure, and no other's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentbench_kv.adapters.tau2.task import Retail
from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("made_data")]
ENDLESS = ("calculate", {"expression": "9**9**9**9"})


@pytest.fixture(autouse=True)
def _environment() -> None:
    try:
        python_of("tau2")
    except PrerequisiteError as error:
        pytest.skip(str(error))


def nested(depth: int) -> str:
    arguments = "[" * depth + "]" * depth
    call = f'{{"name": "get_user_details", "arguments": {{"user_id": {arguments}}}}}'
    return f"<tool_call>\n{call}\n</tool_call>"


@pytest.mark.parametrize(
    ("bombs", "other"),
    [
        ({"0": [ENDLESS], "3": [ENDLESS]}, {"0": "timeout", "3": "timeout"}),
        # Not a call, so text: the user hears it and leaves before anything is done.
        ({"0": [nested(500)]}, {"0": 0.0}),
        # What a tool refuses is read by the agent, which goes on.
        ({"0": [("calculate", {"expression": "(" * 5000 + "1"})], "4": [nested(20)]}, {}),
    ],
    ids=["endless", "deep", "refused"],
)
def test_bombs_cost_their_own_trials(
    bombed: Callable[..., Any], bombs: dict[str, list[Any]], other: dict[str, str | float]
) -> None:
    played = bombed(Retail, bombs, "--max-tokens", "50000")
    ended = {sample: attempts[-1] for sample, attempts in played.attempts.items()}
    scored = {s: r.score if str(r.status) == "scored" else str(r.status) for s, r in ended.items()}
    assert scored == dict.fromkeys("01234", 1.0) | other
    endless = {sample for sample, status in other.items() if status == "timeout"}
    assert {s for s, attempts in played.attempts.items() if len(attempts) == 2} == endless
    assert played.summary["infra_retries"] == len(endless)
    assert played.summary["validity"]["state"] == "valid"
