"""Whole simulations in the real environment, on made data and, where it is, on the real."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.adapters.data import data_folder
from agentbench_kv.adapters.tau2.task import V0
from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.results.records import TrialRecord, TrialStatus
from agentbench_kv.results.store import RunStore
from agentbench_kv.run import runner
from agentbench_kv.run.spec import RunSpec, resolve

pytestmark = pytest.mark.engine

Play = Callable[..., dict[str, TrialRecord]]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    try:
        python_of("tau2")
    except PrerequisiteError as error:
        pytest.skip(str(error))

    def run(agent: str = "gold", task: str = "tau2/retail", **changes: Any) -> dict[str, Any]:
        settings = {key: str(value) for key, value in changes.pop("settings", {}).items()}
        fixed = {"engine": "scripted", "model": agent, "method": "full", "budget": None}
        one = resolve(RunSpec(**{**fixed, "task": task, "concurrency": 4, **changes}), settings)
        runner.run_one(one, tmp_path / "runs", lambda *_: None)
        return {each.sample_id: each for each in RunStore(tmp_path / "runs").find(one.id).trials()}

    return run


def scores(records: dict[str, TrialRecord]) -> dict[str, float | None]:
    return {key: record.score for key, record in sorted(records.items())}


@pytest.mark.usefixtures("made_data")
def test_gold_wins_in_sessions_that_only_grow(play: Play) -> None:
    records = play("gold")
    assert scores(records) == dict.fromkeys("01234", 1.0)
    for record in records.values():
        assert record.session_resets == 0
        assert record.usage.requests == record.metrics["steps"]
        assert record.metrics["ended_by"] == "user_stop"
    assert records["0"].metrics["calls"] == 2


@pytest.mark.usefixtures("made_data")
def test_corrupt_fails_where_the_last_action_writes(play: Play) -> None:
    wanted = {"0": 0.0, "1": 1.0, "2": 1.0, "3": 0.0, "4": 0.0}
    assert scores(play("corrupt")) == wanted


@pytest.mark.usefixtures("made_data")
def test_null_gets_the_floor(play: Play) -> None:
    # Only task 2 asks for nothing that leaves a trace.
    assert scores(play("null")) == {**dict.fromkeys("0134", 0.0), "2": 1.0}


@pytest.mark.usefixtures("made_data")
def test_too_many_messages_are_a_turn_limit(play: Play) -> None:
    record = play("gold", limit=1, settings={"max_steps": 3})["0"]
    assert (record.status, record.score) == (TrialStatus.TURN_LIMIT, None)
    assert record.session_resets == 0


@pytest.mark.usefixtures("made_data")
def test_an_llm_plays_the_user_and_its_tokens_are_counted_apart(play: Play, chats: Any) -> None:
    turns = ["I want matter 1 settled.", "###STOP###"]
    lock = threading.Lock()

    def talk(_: Any) -> tuple[int, Any]:
        with lock:
            return 200, chats.say(turns.pop(0))

    chats.answer = talk
    user = {"user": chats.url, "user_model": "made-model"}
    records = play("gold", limit=1, settings=user)
    assert scores(records) == {"0": 1.0}
    metrics = records["0"].metrics
    assert (metrics["user_requests"], metrics["user_prompt_tokens"]) == (2, 14)
    assert metrics["user_completion_tokens"] == 6
    assert records["0"].usage.requests == metrics["steps"] == 3
    assert {body["model"] for body in chats.bodies} == {"made-model"}
    assert "matter 0" in chats.bodies[0]["messages"][0]["content"]


@pytest.mark.usefixtures("made_data")
def test_a_failing_user_is_not_the_agents_fault(play: Play, chats: Any) -> None:
    chats.answer = lambda _: (400, {"error": {"message": "no such model"}})
    user = {"user": chats.url, "user_model": "made-model"}
    record = play("gold", limit=1, settings=user)["0"]
    assert (record.status, record.score) == (TrialStatus.USER_ERROR, None)
    assert "no such model" in (record.error or "")


@pytest.mark.parametrize("domain", ["airline", "retail", "telecom"])
def test_the_first_real_tasks_are_won_by_gold(play: Play, domain: str) -> None:
    if not (data_folder() / V0.data).is_dir():
        pytest.skip(f"no {V0.data} in {data_folder()} (KVBENCH_DATA)")
    records = play("gold", f"tau2/{domain}", limit=3)
    assert [record.score for record in records.values()] == [1.0] * 3
    assert not any(record.session_resets for record in records.values())
