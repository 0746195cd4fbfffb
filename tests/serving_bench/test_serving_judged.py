"""When exact calls are counted, tried again, and kept apart from what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from agentbench_kv.engines.base import Capability, EngineOptions
from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.methods.base import Phase
from agentbench_kv.registry import make_method
from agentbench_kv.run.engines import start_engine
from agentbench_kv.run.exact_calls import ExactCalls, exact_calls
from agentbench_kv.run.recordings import Recording, record_gold
from agentbench_kv.serving_bench import bench
from agentbench_kv.serving_bench.bench import ServingRun, measure_serving
from agentbench_kv.serving_bench.jobs import (
    Load,
    LoadJob,
    SessionShape,
    Target,
    Vocabulary,
    Workload,
)
from agentbench_kv.serving_bench.loadgen import JobResult
from agentbench_kv.serving_bench.measurements import (
    Quality,
    ServingArm,
    ServingFolder,
    ServingPlan,
    TraceFigures,
)
from agentbench_kv.serving_bench.servers import RunningServer
from agentbench_kv.serving_bench.tables import summary_tables

RECORDED = (Recording("s", None, ()),)
FOUND = ExactCalls(3, 4, 1, 0.1, {"s": (3, 4)}, {"s": (1, 2)})
ABLE: Any = SimpleNamespace(info=SimpleNamespace(capabilities={Capability.FORCE}))


def make_run(*arms: str) -> ServingRun:
    shape, load = SessionShape(100, 10), Load(4, concurrency=2)
    plan = ServingPlan(
        engine="embedded",
        model="micro",
        arms=[ServingArm(name=name, method=name) for name in arms],
        shapes=[shape.label],
        loads=[load.label],
        turns=1,
        tool_tokens=0,
        think_time_s=0.0,
        sessions=4,
        warmup=0,
        repeats=2,
        seed=0,
    )
    return ServingRun(plan, (Workload(shape),), (load,), recordings=RECORDED)


FIGURES = {
    "completed": 4, "failed": 0, "duration": 10.0, "total_output_tokens": 10,
    "output_throughput": 1.0, "mean_e2el_ms": 1000.0,
}  # fmt: skip


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Servers that were started, none of which is one."""
    names: list[str] = []

    @contextmanager
    def serve(_: ServingPlan, arm: ServingArm, __: int) -> Iterator[RunningServer]:
        names.append(arm.name)
        yield RunningServer(Target(arm.name, "gateway", "m"), Vocabulary(9), 1000, engine=ABLE)

    def measure(_: LoadJob, warmed: Callable[[], None]) -> JobResult:
        warmed()
        return JobResult(FIGURES, None, {}, 0, [])

    monkeypatch.setattr(bench, "serve_arm", serve)
    monkeypatch.setattr(bench, "measure_apart", measure)
    monkeypatch.setattr(bench, "PoolWatch", lambda _: NoPool())
    return names


class NoPool:
    peak, kept, restarts = None, "", 0

    def __enter__(self) -> NoPool:
        return self

    def __exit__(self, *_: object) -> None: ...

    def begin(self) -> None: ...


def judging(monkeypatch: pytest.MonkeyPatch, *outcomes: Any) -> list[Any]:
    """Have exact calls come to these, one after the other; return what is left."""
    left = list(outcomes)

    def judge(*_: Any) -> ExactCalls:
        outcome = left.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(bench, "exact_calls", judge)
    return left


def qualities(path: Path, run: ServingRun) -> list[Quality | None]:
    found = ServingFolder.create(path, run.plan, {}).measurements()
    return [each.quality for each in found]


def quietly(*_: Any) -> None: ...


def test_an_arm_is_judged_once(
    started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("full", "h2o")
    left = judging(monkeypatch, FOUND, FOUND)
    measure_serving(run, tmp_path, quietly)
    assert left == []
    assert [each.calls if each else None for each in qualities(tmp_path, run)] == [4, 4, None, None]
    assert measure_serving(run, tmp_path, quietly).cells[0].quality is not None
    assert started == ["full", "h2o", "h2o", "full"]


@pytest.mark.parametrize(
    "error", [KVBenchError("the server died"), ConnectionError("gone"), httpx.ReadTimeout("slow")]
)
def test_what_failed_for_a_reason_that_may_pass_is_tried_again(
    started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    run = make_run("full")
    judging(monkeypatch, error)
    (cell,) = measure_serving(run, tmp_path, quietly).cells
    assert cell.quality is not None
    assert (cell.quality.reason, cell.quality.failed) == (str(error), True)
    left = judging(monkeypatch, FOUND)
    (cell,) = measure_serving(run, tmp_path, quietly).cells
    assert left == []
    assert cell.quality is not None
    assert (cell.quality.exact, cell.quality.reason) == (0.75, "")
    assert len(started) == 3


def test_what_cannot_pass_is_not_tried_again(
    started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("full")
    judging(monkeypatch, UsageError("no room"))
    measure_serving(run, tmp_path, quietly)
    (cell,) = measure_serving(run, tmp_path, quietly).cells
    assert cell.quality is not None
    assert (cell.quality.reason, cell.quality.failed) == ("no room", False)
    assert len(started) == 2


def test_calls_that_are_counted_after_an_update_are_told_of(
    started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The damage of the new code stood beside the speed of the old, as if of one."""
    figures = {"sessions": 4, "calls": 4, "prompt_tokens": 9, "output_tokens": 9, "prefix_hits": 0}
    trace = TraceFigures(form="messages", sha256="0", **figures)  # type: ignore[arg-type]
    run = make_run("full")
    run = replace(run, plan=run.plan.model_copy(update={"trace": trace}))
    said = []
    for code, found in (("a" * 16, KVBenchError("later")), ("b" * 16, FOUND)):
        monkeypatch.setattr(bench, "environment", lambda _, code=code: {"code_sha": code})
        judging(monkeypatch, found)
        summary = measure_serving(run, tmp_path, quietly)
        notes = [note for table in summary_tables(summary) for note in table.notes]
        said.append(sum("counted on another machine" in note for note in notes))
    assert said == [0, 1]
    assert len(started) == 3


def test_an_interrupt_while_an_arm_is_judged_keeps_what_was_measured(
    started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("full")
    judging(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        measure_serving(run, tmp_path, quietly)
    assert qualities(tmp_path, run) == [None]
    told: list[bool] = []
    judging(monkeypatch, FOUND)
    measure_serving(run, tmp_path, lambda _, before: told.append(before))
    assert told == [True, False]
    assert [bool(each) for each in qualities(tmp_path, run)] == [True, False]
    assert len(started) == 3


def test_arms_of_other_calls_are_not_set_side_by_side(
    started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert started == []
    run = make_run("full", "h2o")
    judging(monkeypatch, FOUND, replace(FOUND, asked=5, parts={"s": (3, 5)}))
    with pytest.raises(UsageError, match="not of the same calls"):
        measure_serving(run, tmp_path, quietly)
    assert len(qualities(tmp_path, run)) == 4  # nothing is lost


def test_sessions_with_other_calls_are_not_set_side_by_side(
    started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many calls in all, but not in each session."""
    assert started == []
    run = make_run("full", "h2o")
    judging(
        monkeypatch,
        replace(FOUND, asked=4, right=3, parts={"s": (2, 2), "t": (1, 2)}, behind={}),
        replace(FOUND, asked=4, right=3, parts={"s": (2, 3), "t": (1, 1)}, behind={}),
    )
    with pytest.raises(UsageError, match="not of the same sessions' calls"):
        measure_serving(run, tmp_path, quietly)


@pytest.mark.parametrize(
    "said",
    [
        {"calls_right": 5, "calls": 4},
        {"calls_right": -1, "calls": 4},
        {"calls_right": 1, "calls": 4, "parts": {"a": (2, 4)}},
        {"calls_right": 3, "calls": 4, "parts": {"a": (3, 2), "b": (0, 2)}},
        {"calls_right": 3, "calls": 4, "parts": {"a": (3, 4)}, "behind": {"a": (2, 1)}},
        {"calls_right": 3, "calls": 4, "parts": {"a": (3, 4)}, "behind": {"a": (1, 3)}},
        {"calls_right": 3, "calls": 4, "parts": {"a": (3, 4)}, "behind": {"b": (0, 1)}},
    ],
)
def test_counts_that_cannot_be_are_refused(said: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="do not add up"):
        Quality(**said)


@pytest.mark.parametrize("syntax", ["auto", "json"])
def test_calls_are_labelled_as_they_were_recorded(syntax: str) -> None:
    """In any syntax: methods that look at phases would evict other rows."""
    (recording,) = record_gold("micro/recall-1k", "micro", 1, {}, syntax)
    method = make_method("full", None)
    engine: Any = start_engine("embedded", EngineOptions("micro", method, device="cpu"))
    seen: list[list[Phase]] = []
    close = engine.close

    def watched(session: str) -> Any:
        seen.append([Phase(each) for each in engine._scheduler.get(session)._phases])
        return close(session)

    engine.close = watched
    try:
        exact_calls(engine, [recording], tool_syntax=syntax)
    finally:
        engine.shutdown()
    said = [phase for turn in recording.turns for _, phase in (*turn.prompt, *turn.answer)]
    assert seen == [said[: len(seen[0])]]
    assert len(said) - len(seen[0]) == 1  # the last token was never fed
    assert Phase.ACT in said


def test_a_method_that_reads_markers_otherwise_is_not_judged() -> None:
    engine: Any = SimpleNamespace()
    with pytest.raises(UsageError, match="closing=next: sessions are labelled once for all"):
        exact_calls(engine, RECORDED, closing="next")
