"""The task suite passes on good tasks and finds each thing a task can do wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from agentbench_kv.adapters.base import Outcome, Sample, ScriptedAgent, Task, TrialContext
from agentbench_kv.conformance import passed, tasks
from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.results.records import TrialStatus
from agentbench_kv.run import runner, spec


class Good(Task):
    """One request a sample; the answer is the sample's own name."""

    name: ClassVar[str] = "good"
    summary: ClassVar[str] = ""

    def samples(self, limit: int | None, seed: int) -> list[Sample]:  # noqa: ARG002
        return [Sample(id=f"n-{i}") for i in range(4)][:limit]

    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:
        messages = [{"role": "user", "content": f"Who are you, {sample.id}?"}]
        reply = context.client.chat(messages)
        right = float(reply.content == sample.id)
        return Outcome(TrialStatus.SCORED, score=right, transcript=[*messages, reply.message])

    def script(self, sample: Sample, agent: ScriptedAgent) -> list[str]:
        return [{"gold": sample.id, "corrupt": f"{sample.id}x", "null": "No."}[agent]]


class Twins(Good):
    def samples(self, limit: int | None, seed: int) -> list[Sample]:
        return [Sample(id="n-0"), *super().samples(limit, seed)][:limit]


class Unsteady(Good):
    calls: ClassVar[int] = 0

    def samples(self, limit: int | None, seed: int) -> list[Sample]:  # noqa: ARG002
        type(self).calls += 1
        return [Sample(id=f"n-{self.calls}-{i}") for i in range(4)][:limit]


class Unsafe(Good):
    def samples(self, limit: int | None, seed: int) -> list[Sample]:
        return [Sample(id=f"{sample.id}\n") for sample in super().samples(limit, seed)]


class Leaky(Good):
    """Right the first time only."""

    seen: ClassVar[set[str]] = set()
    lock: ClassVar[Any] = threading.Lock()

    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:
        outcome = super().run_trial(sample, context)
        with self.lock:
            fresh = sample.id not in self.seen
            self.seen.add(sample.id)
        outcome.score = float(fresh)
        return outcome


class EasyChecker(Good):
    """Takes anything for right."""

    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:
        outcome = super().run_trial(sample, context)
        outcome.score = 1.0
        return outcome


class Forgetful(Good):
    """Never asks the agent."""

    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:  # noqa: ARG002
        return Outcome(TrialStatus.SCORED, score=1.0)


class Rewriting(Good):
    """Sends another history the second time."""

    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:
        context.client.chat([{"role": "user", "content": "Warm up."}])
        return super().run_trial(sample, context)

    def script(self, sample: Sample, agent: ScriptedAgent) -> list[str]:
        return ["Ready.", *super().script(sample, agent)]


class Breaks(Good):
    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:  # noqa: ARG002
        raise ZeroDivisionError("boom")


class Partly(Good):
    """Corrupt gets half of each sample."""

    corrupt_score: ClassVar[float | None] = 0.5

    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:
        outcome = super().run_trial(sample, context)
        half = str(outcome.transcript[-1]["content"]).startswith(sample.id)
        outcome.score = max(outcome.score or 0.0, 0.5 * half)
        return outcome


class Wordy(Good):
    """Says more than a run's answers may hold unless told otherwise."""

    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:
        outcome = super().run_trial(sample, context)
        whole = str(outcome.transcript[-1]["content"]) == self.script(sample, "gold")[0]
        outcome.score = float(whole)
        return outcome

    def script(self, sample: Sample, agent: ScriptedAgent) -> list[str]:
        return [f"{super().script(sample, agent)[0]} {'ünüsual ' * 2000}".strip()]


class Mute(Good):
    """Knows no script for a null agent."""

    def script(self, sample: Sample, agent: ScriptedAgent) -> list[str]:
        if agent == "null":
            raise ZeroDivisionError("no script")
        return super().script(sample, agent)


class Lenient(Good):
    """What is corrupted matters in the last sample only."""

    corrupt_score: ClassVar[float | None] = None

    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:
        outcome = super().run_trial(sample, context)
        if outcome.transcript[-1]["content"] != "No." and sample.id != "n-3":
            outcome.score = 1.0
        return outcome


class LenientEverywhere(EasyChecker):
    corrupt_score: ClassVar[float | None] = None


class Undeclared(Partly):
    corrupt_score: ClassVar[float | None] = None


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    def run(cls: type[Task], limit: int | None = 3) -> dict[str, Any]:
        for module in (runner, spec, tasks):
            monkeypatch.setattr(module, "load_task", lambda _: cls)
        return tasks.task_suite("any", limit=limit, concurrency=2)

    return run


@pytest.mark.parametrize("cls", [Good, Partly, Undeclared, Wordy])
def test_good_tasks_pass(cls: type[Task], suite: Callable[..., Any]) -> None:
    results = suite(cls)
    assert passed(results), results
    assert set(results) == {"samples", "gold", "corrupt", "null", "resume"}
    assert "floor: 0.0% over 3" in results["null"][0].detail


@pytest.mark.parametrize(
    ("cls", "found"),
    [
        (Twins, "ids are unique"),
        (Unsteady, "two calls give the same samples"),
        (Unsafe, "ids are short, printable texts"),
        (Leaky, "a second pass gives the same"),
        (EasyChecker, "corrupt scores 0 as built"),
        (Forgetful, "records are complete"),
        (Rewriting, "no session is reset"),
        (Breaks, "gold scores 100 %"),
        (Mute, "null comes to an end"),
    ],
)
def test_each_fault_is_found(cls: type[Task], found: str, suite: Callable[..., Any]) -> None:
    results = suite(cls)
    assert found in {check.name for part in results.values() for check in part if not check.ok}


@pytest.mark.parametrize(
    ("cls", "limit", "ok", "skipped"),
    [
        (Lenient, 3, True, True),
        (Lenient, None, True, False),
        (LenientEverywhere, 3, True, True),
        (LenientEverywhere, None, False, False),
    ],
)
def test_where_corrupt_keeps_points_the_whole_set_decides(
    cls: type[Task], limit: int | None, ok: bool, skipped: bool, suite: Callable[..., Any]
) -> None:
    _, check = suite(cls, limit)["corrupt"]
    assert check.name == "corrupt scores less than gold"
    assert (check.ok, check.skipped) == (ok, skipped)


def test_what_is_missing_is_said_at_once(suite: Callable[..., Any]) -> None:
    class NoData(Good):
        def samples(self, limit: int | None, seed: int) -> list[Sample]:  # noqa: ARG002
            raise PrerequisiteError("no data; fetch it")

    with pytest.raises(PrerequisiteError, match="fetch it"):
        suite(NoData)


def test_a_stand_in_is_run_for_a_task_that_lacks_what_users_bring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from agentbench_kv.cli import kvbench

    class NeedsCorpus(Forgetful):
        @classmethod
        def stand_in(cls, settings: Any) -> str | None:
            return None if settings.get("corpus") else "made"

    for module in (runner, spec, tasks):
        monkeypatch.setattr(module, "load_task", {"real": NeedsCorpus, "made": Good}.__getitem__)
    assert not kvbench.main(["selftest", "task", "real", "--limit", "1"], standalone_mode=False)
    shown = capsys.readouterr()
    assert "real lacks what a user brings; checking made" in shown.err
    assert "made: " in shown.out
    assert tasks.suite_task("real", {"corpus": "mine"}) == "real"


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from agentbench_kv.cli import kvbench

    def ran(*args: str) -> Any:
        return kvbench.main(["selftest", "task", *args], standalone_mode=False)

    assert not ran("micro/recall-1k", "--limit", "2", "--json")
    document = json.loads(capsys.readouterr().out)
    assert (document["task"], document["ok"]) == ("micro/recall-1k", True)
    for module in (runner, spec, tasks):
        monkeypatch.setattr(module, "load_task", lambda _: EasyChecker)
    assert ran("any", "--limit", "2") == 1
    assert "FAILED" in capsys.readouterr().out
