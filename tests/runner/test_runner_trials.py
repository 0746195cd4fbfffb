"""Runs end to end with agents whose score is known, and trials that break."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentbench_kv import runner
from agentbench_kv.adapters.base import Outcome, Sample, ScriptedAgent, Task, TrialContext
from agentbench_kv.errors import CapacityError, UsageError
from agentbench_kv.results.records import TrialStatus
from agentbench_kv.results.store import RunStore
from agentbench_kv.results.validity import RunState
from agentbench_kv.spec import RunSpec, grid, resolve


def spec(**changes: Any) -> RunSpec:
    values = {
        "engine": "scripted",
        "model": "gold",
        "method": "full",
        "budget": None,
        "task": "micro/recall-1k",
        "limit": 6,
        **changes,
    }
    return resolve(RunSpec(**values), {})


def quiet(*_: Any) -> None:
    """Report no progress."""


@pytest.mark.parametrize(("agent", "score"), [("gold", 1.0), ("corrupt", 0.0), ("null", 0.0)])
@pytest.mark.parametrize("task", ["micro/recall-1k", "micro/recall-5k"])
def test_scripted_agents_score_what_they_must(
    task: str, agent: str, score: float, tmp_path: Path
) -> None:
    summary = runner.run_one(spec(task=task, model=agent, limit=4), tmp_path, quiet)
    assert summary.score is not None
    assert summary.score.point == score
    assert summary.validity.state is RunState.VALID
    assert summary.session_resets == 0


def test_sub_scores_name_phase_and_kind(tmp_path: Path) -> None:
    summary = runner.run_one(spec(limit=3), tmp_path, quiet)
    wanted = {"think", "act", "tool", "others", "recurring", "one_shot"}
    wanted |= {
        f"{p}_{k}" for p in ("think", "act", "tool", "others") for k in ("recurring", "one_shot")
    }
    assert wanted <= set(summary.sub_scores)


def test_several_trials_and_turn_records(tmp_path: Path) -> None:
    one = spec(trials=3, limit=2)
    runner.run_one(one, tmp_path, quiet)
    run = RunStore(tmp_path).find(one.id)
    keys = {record.key for record in run.trials()}
    assert len(keys) == 6
    assert len({record.seed for record in run.trials()}) == 6
    turns = run.turns()
    assert {turn.key for turn in turns} == keys
    assert all(turn.prompt_tokens > 0 and sum(turn.phases.values()) > 0 for turn in turns)


def test_a_finished_run_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = runner.run_one(spec(), tmp_path, quiet)
    monkeypatch.setattr(runner, "build_engine", lambda *_, **__: pytest.fail("engine started"))
    assert runner.run_one(spec(), tmp_path, quiet).score == first.score


class Faulty(Task):
    """Breaks in a chosen way; counts how often it was tried."""

    name: ClassVar[str] = "faulty"
    summary: ClassVar[str] = ""
    behave: ClassVar[Callable[[str, int, TrialContext], Outcome]]
    tries: ClassVar[dict[str, int]] = {}
    lock: ClassVar[threading.Lock] = threading.Lock()

    def samples(self, limit: int | None, seed: int) -> list[Sample]:  # noqa: ARG002
        return [Sample(id=f"x-{i}") for i in range(limit or 4)]

    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:
        with self.lock:
            self.tries[sample.id] = self.tries.get(sample.id, 0) + 1
        return type(self).behave(sample.id, self.tries[sample.id], context)

    def script(self, sample: Sample, agent: ScriptedAgent) -> list[str]:  # noqa: ARG002
        return ["hello"]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> type[Faulty]:
    monkeypatch.setattr(runner, "load_task", lambda _: Faulty)
    Faulty.tries = {}
    return Faulty


def run_faulty(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    one = spec(limit=4, **changes)
    runner.run_one(one, tmp_path, quiet)
    return {record.sample_id: record for record in RunStore(tmp_path).find(one.id).trials()}


def test_infrastructure_failures_are_retried_and_counted(
    faulty: type[Faulty], tmp_path: Path
) -> None:
    def behave(sample: str, tries: int, _: TrialContext) -> Outcome:
        if sample == "x-1" and tries < 3:
            raise OSError("the worker died")
        if sample == "x-2":
            raise OSError("always")
        return Outcome(TrialStatus.SCORED, score=1.0)

    faulty.behave = staticmethod(behave)
    records = run_faulty(tmp_path)
    assert records["x-0"].attempts == 1
    assert (records["x-1"].status, records["x-1"].attempts) == (TrialStatus.SCORED, 3)
    assert records["x-2"].status is TrialStatus.INFRA_ERROR
    assert "always" in records["x-2"].error


def test_engine_errors_and_timeouts_are_statuses(faulty: type[Faulty], tmp_path: Path) -> None:
    def behave(sample: str, _: int, context: TrialContext) -> Outcome:
        if sample == "x-0":
            raise CapacityError("too big")
        if sample == "x-1":
            time.sleep(0.05)
            context.client.chat([{"role": "user", "content": "hi"}])
        return Outcome(TrialStatus.SCORED, score=1.0)

    faulty.behave = staticmethod(behave)
    records = run_faulty(tmp_path, timeout_s=0.01)
    assert records["x-0"].status is TrialStatus.ENGINE_ERROR
    assert records["x-1"].status is TrialStatus.TIMEOUT
    assert records["x-2"].score == 1.0


def test_user_errors_end_the_run_and_keep_what_is_done(
    faulty: type[Faulty], tmp_path: Path
) -> None:
    def behave(sample: str, _: int, __: TrialContext) -> Outcome:
        if sample == "x-3":
            raise UsageError("no such thing")
        return Outcome(TrialStatus.SCORED, score=1.0)

    faulty.behave = staticmethod(behave)
    one = spec(limit=4, concurrency=1)
    with pytest.raises(UsageError, match="no such thing"):
        runner.run_one(one, tmp_path, quiet)
    assert len(RunStore(tmp_path).find(one.id).trials()) == 3


def test_trial_seeds_do_not_depend_on_the_method() -> None:
    full = spec(engine="embedded", model="micro")
    cut = resolve(
        RunSpec(engine="embedded", model="micro", method="agentkv", budget=64, task=full.task), {}
    )
    assert full.trial_seed("a", 1) == cut.trial_seed("a", 1)
    assert full.trial_seed("a", 1) != full.trial_seed("a", 2)


def test_grid_keeps_order_and_runs_full_once() -> None:
    base = RunSpec(engine="embedded", model="micro", method="", budget=None, task="")
    cells = grid(base, ["full", "snapkv"], [64, 128], ["micro/recall-1k"], [0, 1], {})
    assert [(c.seed, c.method, c.budget) for c in cells] == [
        (0, "full", None), (0, "snapkv", 64), (0, "snapkv", 128),
        (1, "full", None), (1, "snapkv", 64), (1, "snapkv", 128),
    ]  # fmt: skip


def test_impossible_pairs_are_refused_before_anything_starts(tmp_path: Path) -> None:
    wrong = spec(method="streamingllm", budget=64)
    with pytest.raises(UsageError, match="does not compress"):
        runner.run_all([wrong], tmp_path, quiet)
    assert not list(tmp_path.iterdir())
