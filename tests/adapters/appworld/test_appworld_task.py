"""The tasks as the runner sees them, and every way they cannot start; without AppWorld itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.adapters.appworld.task import Dev, TestChallenge, TestNormal, Train, data_sha256
from agentbench_kv.adapters.appworld.worker.main import corrupted, spoken
from agentbench_kv.adapters.base import Sample, TrialContext
from agentbench_kv.adapters.worker import WorkerTimeoutError
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.registry import load_task
from agentbench_kv.results.records import TrialStatus

STEP = {"calls": 2, "unparsable": 0, "finish_reason": "stop", "prompt_tokens": 50}
VERDICT = {"success": False, "difficulty": 2, "num_tests": 5, "passes": [{}] * 3, "failures": []}
PLAYED = {"status": "scored", "score": 0.0, "error": None, "agent": [], "api_calls": 1,
          "steps": [STEP, {**STEP, "unparsable": 1, "finish_reason": "length"}],
          "verdict": VERDICT}  # fmt: skip
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("spotify__login", {"username": "u"}),
    ("spotify__like_song", {"song_id": 1}),
    ("spotify__like_song", {"song_id": 2}),
    ("spotify__show_song", {"song_id": 2}),
    ("supervisor__complete_task", {"answer": None}),
]


class Pool:
    """Answers every command with one value, or raises it."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[Any] = []

    def call(self, _: str, args: Any = None, **__: Any) -> Any:
        self.asked.append(args)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def play(answer: Any) -> tuple[Any, Pool]:
    task, pool, client = Train(apis="all", max_steps=7), Pool(answer), Pool(None)
    task._started = pool
    context = TrialContext(0, 7, client, "http://127.0.0.1:1", "s")
    return task.run_trial(Sample("a_1"), context), pool


def test_a_played_trial_becomes_an_outcome() -> None:
    outcome, pool = play(PLAYED)
    assert (outcome.status, outcome.score) == (TrialStatus.SCORED, 0.0)
    assert outcome.metrics == {
        "steps": 2, "calls": 4, "api_calls": 1, "unparsable_calls": 1, "truncated_answers": 1,
        "first_prompt_tokens": 50, "difficulty": 2, "tests_right": 3, "tests_asked": 5,
    }  # fmt: skip
    assert (pool.asked[0]["apis"], pool.asked[0]["max_steps"]) == ("all", 7)


def test_a_trial_without_a_verdict_has_no_tests() -> None:
    outcome, _ = play({**PLAYED, "status": "turn_limit", "score": None, "verdict": {}})
    assert outcome.status == TrialStatus.TURN_LIMIT
    assert "tests_right" not in outcome.metrics
    assert play(WorkerTimeoutError("late"))[0].status == TrialStatus.TIMEOUT


def test_the_sets_are_registered_and_only_two_have_solutions() -> None:
    sets = (Train, Dev, TestNormal, TestChallenge)
    assert [load_task(f"appworld/{each.dataset}") for each in sets] == list(sets)
    assert [each.solved for each in sets] == [True, True, False, False]
    with pytest.raises(UsageError, match="apis=some"):
        Train.create({"apis": "some"})


def test_without_data_one_line_says_where_it_is_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_DATA", str(tmp_path))
    with pytest.raises(PrerequisiteError, match="appworld download data") as caught:
        Train().samples(None, 0)
    assert "\n" not in str(caught.value)


def test_without_the_environment_one_line_says_how_to_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "appworld" / "data"
    for name in ("datasets", "tasks", "base_dbs", "api_docs"):
        (data / name).mkdir(parents=True)
    (data / "datasets" / "train.txt").write_text("a_1")
    monkeypatch.setenv("KVBENCH_DATA", str(tmp_path))
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path))
    monkeypatch.delenv("KVBENCH_ENV_APPWORLD", raising=False)
    with pytest.raises(PrerequisiteError, match="kvbench env create appworld"):
        Train().samples(None, 0)
    first = data_sha256(data)
    (data / "tasks" / "evaluation.py").write_text("one")
    second = data_sha256(data)
    (data / "tasks" / "evaluation.py").write_text("two")
    assert len({first, second, data_sha256(data)}) == 3


def test_the_corrupt_agent_leaves_out_the_last_change_or_answers_wrongly() -> None:
    assert corrupted(CALLS) == [*CALLS[:2], *CALLS[3:]]
    asking = [CALLS[0], CALLS[3], ("supervisor__complete_task", {"answer": "7"})]
    assert [name for name, _ in corrupted(asking)] == [name for name, _ in asking]
    assert corrupted(asking)[-1][1]["answer"] not in ("7", None)


def test_agents_speak_as_the_tools_they_have() -> None:
    def said(offered: str) -> list[dict[str, Any]]:
        found = [text.partition("<tool_call>")[2].partition("</")[0] for text in
                 spoken(CALLS[1:2] + CALLS[-1:], offered)]  # fmt: skip
        return [json.loads(each) for each in found]

    direct = [{"name": name, "arguments": args} for name, args in (CALLS[1], CALLS[-1])]
    assert said("all") == said("needed") == direct
    whole = {"app_name": "spotify", "api_name": "like_song", "arguments": {"song_id": 1}}
    assert said("docs") == [{"name": "call_api", "arguments": whole}, direct[1]]
