"""Whole simulations of v1.0.1 in its own environment, judged and not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.results.records import TrialRecord, TrialStatus
from agentbench_kv.results.store import RunStore
from agentbench_kv.run import runner
from agentbench_kv.run.spec import RunSpec, resolve

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("made_data_v1")]

Play = Callable[..., dict[str, TrialRecord]]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    try:
        python_of("tau2-v1")
    except PrerequisiteError as error:
        pytest.skip(str(error))

    def run(agent: str = "gold", **settings: str) -> dict[str, TrialRecord]:
        fixed = {"engine": "scripted", "model": agent, "method": "full", "budget": None}
        one = resolve(RunSpec(**fixed, task="tau2-v1/retail", concurrency=2), settings)
        runner.run_one(one, tmp_path / "runs", lambda *_: None)
        return {each.sample_id: each for each in RunStore(tmp_path / "runs").find(one.id).trials()}

    return run


def scores(records: dict[str, TrialRecord]) -> list[float | None]:
    return [record.score for _, record in sorted(records.items())]


def verdicts(chats: Any, mets: Callable[[list[str]], list[bool]]) -> None:
    """Let the server judge the assertions it is asked about."""

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        asked = body["messages"][-1]["content"].split("expectedOutcomes:")[1]
        wanted = [each for each in ("Springfield", "kind", "brief") if each in asked]
        results = [
            {"expectedOutcome": each, "reasoning": "made", "metExpectation": met}
            for each, met in zip(wanted, mets(wanted), strict=False)
        ]
        return 200, chats.say(json.dumps({"results": results}))

    chats.answer = answer


def test_known_agents_with_a_scripted_judge(play: Play) -> None:
    gold = play("gold")
    assert scores(gold) == [1.0, 1.0, 1.0]
    assert not any(record.session_resets for record in gold.values())
    assert gold["2"].metrics["reward_nl_assertion"] == 1.0
    # Task 1 only reads, and the scripted judge agrees to everything.
    assert scores(play("null")) == [0.0, 1.0, 0.0]


def test_the_judges_no_is_a_zero(play: Play, chats: Any) -> None:
    verdicts(chats, lambda wanted: [each != "brief" for each in wanted])
    records = play("gold", judge=f"{chats.url}|made-judge")
    assert scores(records) == [1.0, 1.0, 0.0]
    assert records["2"].metrics["reward_nl_assertion"] == 0.0
    assert {body["model"] for body in chats.bodies} == {"made-judge"}
    assert len(chats.bodies) == 2


def test_a_model_plays_the_user_and_another_judges(play: Play, chats: Any) -> None:
    verdicts(chats, lambda wanted: [True] * len(wanted))
    judged = chats.answer

    def talk(body: dict[str, Any]) -> tuple[int, Any]:
        if body["model"] == "made-judge":
            return judged(body)  # type: ignore[no-any-return]
        # As often as a gold agent of a task speaks to the user: at the start and when it is done.
        done = len(body["messages"]) > 2 and "All done" in str(body["messages"][-1]["content"])
        return 200, chats.say("###STOP###" if done else "I want a matter settled.")

    chats.answer = talk
    partners = {"user": chats.url, "user_model": "made-user", "judge": f"{chats.url}|made-judge"}
    records = play("gold", **partners)
    assert scores(records) == [1.0, 1.0, 1.0]
    assert [record.metrics["user_requests"] for record in records.values()] == [2, 2, 2]
    assert [record.metrics["user_prompt_tokens"] for record in records.values()] == [14, 14, 14]
    assert {body["model"] for body in chats.bodies} == {"made-user", "made-judge"}


def test_a_judge_that_says_nothing_scores_nothing(play: Play, chats: Any) -> None:
    verdicts(chats, lambda wanted: [True] * (len(wanted) - 1))
    records = play("gold", judge=f"{chats.url}|made-judge")
    assert records["0"].score == 1.0
    for sample in ("1", "2"):
        record = records[sample]
        assert (record.status, record.score) == (TrialStatus.INFRA_ERROR, None)
        assert record.attempts == 3
        assert "verdicts on" in (record.error or "")
