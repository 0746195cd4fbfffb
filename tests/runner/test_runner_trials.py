"""Runs end to end with agents whose score is known, and trials that break."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.adapters.base import Outcome, Task, TrialContext
from agentbench_kv.errors import CapacityError, ContextLimitError, KVBenchError, UsageError
from agentbench_kv.results.records import TrialRecord, TrialStatus
from agentbench_kv.results.run_info import RunStatus
from agentbench_kv.results.store import RunStore
from agentbench_kv.results.validity import RunState
from agentbench_kv.run import runner
from agentbench_kv.run.spec import RunSpec

SpecOf = Callable[..., RunSpec]
Play = Callable[..., dict[str, TrialRecord]]


def quiet(*_: Any) -> None:
    """Report no progress."""


@pytest.mark.parametrize(("agent", "score"), [("gold", 1.0), ("corrupt", 0.0), ("null", 0.0)])
@pytest.mark.parametrize("task", ["micro/recall-1k", "micro/recall-5k"])
def test_scripted_agents_score_what_they_must(
    task: str, agent: str, score: float, spec: SpecOf, tmp_path: Path
) -> None:
    summary = runner.run_one(spec(task=task, model=agent, limit=4), tmp_path, quiet)
    assert summary.score is not None
    assert summary.score.point == score
    assert summary.validity.state is RunState.VALID
    assert summary.session_resets == 0


def test_sub_scores_name_phase_and_kind(spec: SpecOf, tmp_path: Path) -> None:
    summary = runner.run_one(spec(limit=3), tmp_path, quiet)
    wanted = {"think", "act", "tool", "others", "recurring", "one_shot"}
    wanted |= {
        f"{p}_{k}" for p in ("think", "act", "tool", "others") for k in ("recurring", "one_shot")
    }
    assert wanted <= set(summary.sub_scores)


def test_several_trials_and_turn_records(spec: SpecOf, tmp_path: Path) -> None:
    one = spec(trials=3, limit=2)
    runner.run_one(one, tmp_path, quiet)
    run = RunStore(tmp_path).find(one.id)
    keys = {record.key for record in run.trials()}
    assert len(keys) == 6
    assert len({record.seed for record in run.trials()}) == 6
    turns = run.turns()
    assert {turn.key for turn in turns} == keys
    assert all(turn.prompt_tokens > 0 and sum(turn.phases.values()) > 0 for turn in turns)


def test_a_finished_run_starts_nothing(
    spec: SpecOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = runner.run_one(spec(), tmp_path, quiet)
    monkeypatch.setattr(
        "agentbench_kv.run.engines.start_engine", lambda *_, **__: pytest.fail("engine started")
    )
    assert runner.run_one(spec(), tmp_path, quiet).score == first.score


def test_infrastructure_failures_are_retried_and_counted(play: Play) -> None:
    def behave(sample: str, tries: int, _: TrialContext) -> Outcome:
        if sample == "x-1" and tries < 3:
            raise OSError("the worker died")
        if sample == "x-2":
            raise OSError("always")
        return Outcome(TrialStatus.SCORED, score=1.0)

    records = play(behave)
    assert records["x-0"].attempts == 1
    assert (records["x-1"].status, records["x-1"].attempts) == (TrialStatus.SCORED, 3)
    assert records["x-2"].status is TrialStatus.INFRA_ERROR
    assert "always" in (records["x-2"].error or "")


def test_a_failing_user_is_retried_and_every_attempt_recorded(
    told: Callable[..., Task], spec: SpecOf, tmp_path: Path
) -> None:
    def behave(sample: str, tries: int, _: TrialContext) -> Outcome:
        if sample == "x-0" or tries < 2:
            return Outcome(TrialStatus.USER_ERROR, error="the user said nothing")
        return Outcome(TrialStatus.SCORED, score=1.0)

    told(behave, ids=("x-0", "x-1"))
    one = spec(concurrency=1)
    summary = runner.run_one(one, tmp_path, quiet)
    lines = RunStore(tmp_path).find(one.id).trial_lines().records
    assert [(line.sample_id, line.attempts, line.status.value) for line in lines] == [
        ("x-0", 1, "user_error"),
        ("x-0", 2, "user_error"),
        ("x-0", 3, "user_error"),
        ("x-1", 1, "user_error"),
        ("x-1", 2, "scored"),
    ]
    assert summary.failures == {"user_error": 1}
    assert (summary.user_retries, summary.infra_retries) == (3, 0)
    assert summary.validity.state == "valid"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CapacityError("too big"), TrialStatus.ENGINE_ERROR),
        (KVBenchError("broken"), TrialStatus.ENGINE_ERROR),
        (ContextLimitError("too long"), TrialStatus.CONTEXT_LIMIT),
        (TimeoutError("too slow"), TrialStatus.TIMEOUT),
    ],
)
def test_what_breaks_a_trial_is_its_status(
    play: Play, error: Exception, status: TrialStatus
) -> None:
    def behave(sample: str, _: int, __: TrialContext) -> Outcome:
        if sample == "x-0":
            raise error
        return Outcome(TrialStatus.SCORED, score=1.0)

    records = play(behave, ids=("x-0", "x-1"))
    assert (records["x-0"].status, records["x-0"].error) == (status, str(error))
    assert records["x-0"].attempts == 1
    assert records["x-1"].score == 1.0


def test_a_failed_trial_is_in_the_parts_of_the_score_too(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the task has counted what was right before it failed."""
    monkeypatch.setattr(Task, "nothing_right", lambda *_: {"fact_right": 0, "fact_asked": 4})

    def behave(sample: str, _: int, __: TrialContext) -> Outcome:
        if sample == "x-0":
            raise TimeoutError("too slow")
        known = {"fact_right": 3, "fact_asked": 4}
        return Outcome(TrialStatus.CONTEXT_LIMIT, metrics={**known} if sample == "x-1" else {})

    records = play(behave, ids=("x-0", "x-1", "x-2"))
    assert [records[f"x-{i}"].metrics["fact_right"] for i in range(3)] == [0, 3, 0]


def test_user_errors_end_the_run_and_keep_what_is_done(
    told: Callable[..., Task], spec: SpecOf, tmp_path: Path
) -> None:
    started: list[str] = []

    def behave(sample: str, _: int, __: TrialContext) -> Outcome:
        started.append(sample)
        if sample == "x-1":
            raise UsageError("no such thing")
        return Outcome(TrialStatus.SCORED, score=1.0)

    told(behave)
    one = spec(concurrency=1)
    with pytest.raises(UsageError, match="no such thing"):
        runner.run_one(one, tmp_path, quiet)
    assert started == ["x-0", "x-1"]
    run = RunStore(tmp_path).find(one.id)
    assert [record.sample_id for record in run.trials()] == ["x-0"]
    assert run.info.status is RunStatus.FAILED


def test_impossible_pairs_are_refused_before_anything_starts(spec: SpecOf, tmp_path: Path) -> None:
    wrong = spec(method="streamingllm", budget=64)
    with pytest.raises(UsageError, match="does not compress"):
        runner.run_all([wrong], tmp_path, quiet)
    assert not list(tmp_path.iterdir())
