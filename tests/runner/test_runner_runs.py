"""What a run does around its trials: order, concurrency, progress, provenance, clean-up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentbench_kv.adapters.base import Outcome, TrialContext
from agentbench_kv.engines.base import EngineOptions, Generation, Sampling
from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.errors import UsageError
from agentbench_kv.results.records import TrialRecord, TrialStatus
from agentbench_kv.results.run_info import RunStatus
from agentbench_kv.results.store import RunStore
from agentbench_kv.results.validity import RunState
from agentbench_kv.run import runner
from agentbench_kv.run.spec import RunSpec

SpecOf = Callable[..., RunSpec]
Play = Callable[..., dict[str, TrialRecord]]
UseEngine = Callable[..., list[ScriptedEngine]]
# Only a broken test waits so long.
LONG = 30


def quiet(*_: Any) -> None:
    """Report no progress."""


def scored(*_: Any) -> Outcome:
    """Play a trial that is right."""
    return Outcome(TrialStatus.SCORED, score=1.0)


def test_every_sample_is_played_before_any_is_played_again(
    told: Callable[..., Any], spec: SpecOf, tmp_path: Path
) -> None:
    told(scored, ids=("x-0", "x-1"))
    one = spec(trials=2, concurrency=1)
    summary = runner.run_one(one, tmp_path, quiet)
    lines = RunStore(tmp_path).find(one.id).trial_lines().records
    assert [record.key for record in lines] == [("x-0", 0), ("x-1", 0), ("x-0", 1), ("x-1", 1)]
    assert (summary.expected_trials, summary.validity.state) == (4, RunState.VALID)


def test_samples_are_those_of_the_seed(spec: SpecOf, tmp_path: Path) -> None:
    one = spec(seed=1, limit=1)
    runner.run_one(one, tmp_path, quiet)
    (record,) = RunStore(tmp_path).find(one.id).trials()
    assert record.sample_id == "recall-1k-1000000"


def test_as_many_trials_run_at_once_as_were_asked_for(
    told: Callable[..., Any], spec: SpecOf, tmp_path: Path
) -> None:
    meeting, seen = threading.Barrier(3), []

    def behave(*_: Any) -> Outcome:
        meeting.wait(LONG)
        return scored()

    told(behave, ids=[f"x-{i}" for i in range(12)])
    one = spec(limit=None, concurrency=3)
    runner.run_one(one, tmp_path, lambda *state: seen.append(state[1]))
    assert seen == [0, *range(13)]
    assert {r.attempts for r in RunStore(tmp_path).find(one.id).trials()} == {1}


def test_as_many_requests_are_answered_at_once_as_there_are_trials(
    play: Play, use_engine: UseEngine, ask: Callable[..., httpx.Response]
) -> None:
    meeting = threading.Barrier(2)

    class Meeting(ScriptedEngine):
        def generate(self, session: str, sampling: Sampling) -> Generation:
            meeting.wait(LONG)
            return super().generate(session, sampling)

    def behave(_: str, __: int, context: TrialContext) -> Outcome:
        answer = ask(context).json()
        # Who does not say how much gets what the run allows.
        assert answer["usage"]["completion_tokens"] == 3
        return scored()

    use_engine(Meeting)
    texts = ("a long answer",)
    records = play(
        behave, ids=("x-0", "x-1"), texts=texts, endpoint=True, concurrency=2, max_tokens=3
    )
    assert [(record.score, record.error) for record in records.values()] == [(1.0, None)] * 2


def test_progress_counts_what_is_finished(
    told: Callable[..., Any], spec: SpecOf, tmp_path: Path
) -> None:
    seen: list[tuple[int, int, str | None]] = []

    def watch(_: RunSpec, done: int, expected: int, record: TrialRecord | None) -> None:
        seen.append((done, expected, record.sample_id if record else None))

    def behave(sample: str, *_: Any) -> Outcome:
        return Outcome(TrialStatus.INFRA_ERROR) if sample == "x-1" else scored()

    one = spec(concurrency=1)
    told(behave, ids=("x-0", "x-1", "x-2"))
    runner.run_one(one, tmp_path, watch)
    started = [(0, 3, None), (0, 3, None)]  # the run, then its first trial
    assert seen == [*started, (1, 3, "x-0"), (1, 3, "x-1"), (2, 3, "x-2")]
    seen.clear()
    told(scored, ids=("x-0", "x-1", "x-2"))
    runner.run_one(one, tmp_path, watch)
    assert seen == [(2, 3, None), (2, 3, None), (3, 3, "x-1")]


def test_a_run_says_what_it_ran_on(spec: SpecOf, tmp_path: Path) -> None:
    one = spec(limit=1, concurrency=2)
    runner.run_one(one, tmp_path, quiet)
    kept = RunStore(tmp_path).find(one.id).info.provenance
    assert {
        "engine": "scripted",
        "device": "cpu",
        "dtype": "none",
        "context_limit": 1 << 24,
        "determinism": "greedy",
        "concurrency": 2,
        "tool_parser": "hermes",
    }.items() <= kept.items()
    assert len(kept["model_sha"]) == len(kept["chat_template_sha"]) == 64
    assert len(kept["task"]["episodes_sha"]) == 64
    warm = spec(limit=1, temperature=0.5)
    runner.run_one(warm, tmp_path, quiet)
    assert RunStore(tmp_path).find(warm.id).info.provenance["determinism"] == "seeded sampling"


def test_a_run_is_not_finished_with_another_model(
    told: Callable[..., Any], spec: SpecOf, use_engine: UseEngine, tmp_path: Path
) -> None:
    class Other(ScriptedEngine):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.info = replace(self.info, model_sha="other")

    def behave(sample: str, *_: Any) -> Outcome:
        return Outcome(TrialStatus.INFRA_ERROR) if sample == "x-1" else scored()

    one = spec(concurrency=1)
    told(behave, ids=("x-0", "x-1"))
    runner.run_one(one, tmp_path, quiet)
    use_engine(Other)
    with pytest.raises(UsageError, match=r"the model gold changed since run .* began; choose"):
        runner.run_one(one, tmp_path, quiet)
    assert RunStore(tmp_path).find(one.id).info.resumes == []


def test_asking_again_for_a_finished_run_leaves_its_record_alone(
    told: Callable[..., Any], spec: SpecOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an upgrade it said to be resumed with other versions, and compare refused it."""
    seen: list[tuple[int, int]] = []
    told(scored)
    one = spec()
    runner.run_one(one, tmp_path, quiet)
    record = tmp_path / one.id / "run.json"
    before = record.read_bytes()
    monkeypatch.setattr(runner, "environment", lambda _: {"packages": {"torch": "99"}})
    told(scored)
    summary = runner.run_one(one, tmp_path, lambda _, *state: seen.append(state[:2]))
    assert (summary.validity.state, summary.notes, seen) == (RunState.VALID, [], [(4, 4)])
    assert record.read_bytes() == before
    record.write_bytes(before.replace(b'"complete"', b'"failed"'))
    assert runner.run_one(one, tmp_path, quiet).notes == []  # closed as it should have been
    assert RunStore(tmp_path).find(one.id).info.status is RunStatus.COMPLETE


def test_an_engine_that_does_not_start_leaves_nothing_in_the_figures(
    told: Callable[..., Any], spec: SpecOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any, **__: Any) -> ScriptedEngine:
        raise UsageError("no room")

    def behave(sample: str, *_: Any) -> Outcome:
        return Outcome(TrialStatus.INFRA_ERROR) if sample == "x-1" else scored()

    one, start = spec(concurrency=1), "agentbench_kv.run.engines.start_engine"
    told(behave, ids=("x-0", "x-1"))
    with monkeypatch.context() as patch:
        patch.setattr(start, breaks)
        with pytest.raises(UsageError, match="no room"):
            runner.run_one(one, tmp_path, quiet)
    reader = RunStore(tmp_path).find(one.id)
    assert reader.info.wall_s == 0.0
    runner.run_one(one, tmp_path, quiet)
    played = reader.info
    assert played.wall_s > 0.0
    assert played.resumes == []
    with monkeypatch.context() as patch:
        patch.setattr(start, breaks)
        patch.setattr(runner, "environment", lambda _: {"packages": {"torch": "99"}})
        with pytest.raises(UsageError, match="no room"):
            runner.run_one(one, tmp_path, quiet)
    after = reader.info
    assert (after.wall_s, after.resumes) == (played.wall_s, [])


@pytest.mark.parametrize(
    "end", [nullcontext(), pytest.raises(UsageError, match="no such thing")], ids=["well", "badly"]
)
def test_engine_and_task_are_let_go_of_however_the_run_ends(
    told: Callable[..., Any],
    spec: SpecOf,
    use_engine: UseEngine,
    tmp_path: Path,
    end: Any,
) -> None:
    ended: list[str] = []

    class Counted(ScriptedEngine):
        def shutdown(self) -> None:
            ended.append("engine")

    def behave(*_: Any) -> Outcome:
        if not isinstance(end, nullcontext):
            raise UsageError("no such thing")
        return scored()

    task = told(behave, ids=("x-0",))
    use_engine(Counted)
    with end:
        runner.run_one(spec(), tmp_path, quiet)
    assert ended == ["engine"]
    assert task.closed == 1


def test_the_engine_is_started_as_specified(
    told: Callable[..., Any], spec: SpecOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, EngineOptions]] = []

    def start(name: str, options: EngineOptions, _: Any) -> Any:
        started.append((name, options))
        raise UsageError("far enough")

    told(scored)
    monkeypatch.setattr("agentbench_kv.run.engines.start_engine", start)
    one = spec(
        engine="embedded", model="micro", method="agentkv", budget=64, dtype="bfloat16",
        device="cpu", concurrency=5,
    )  # fmt: skip
    with pytest.raises(UsageError, match="far enough"):
        runner.run_one(one, tmp_path, quiet)
    ((name, options),) = started
    assert (name, options.method.settings()) == ("embedded", one.params)
    assert (options.method.label, options.method.budget) == ("agentkv", 64)
    for shared in ("model", "dtype", "device", "concurrency"):
        assert getattr(options, shared) == getattr(one, shared)


def test_one_wrong_spec_stops_them_all(spec: SpecOf, tmp_path: Path) -> None:
    wrong = spec(method="streamingllm", budget=64)
    with pytest.raises(UsageError, match="does not compress"):
        runner.run_all([spec(), wrong], tmp_path, quiet)
    assert not list(tmp_path.iterdir())
