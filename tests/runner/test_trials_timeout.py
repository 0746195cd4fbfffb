"""A trial whose time is up ends at once, whatever it is doing; the clock is in the test's hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentbench_kv.adapters.base import Outcome, Reading, TrialContext
from agentbench_kv.engines.base import FinishReason, Generation, Sampling
from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.gateway import base as gateway_module
from agentbench_kv.results.records import Timing, TrialRecord, TrialStatus
from agentbench_kv.results.store import RunStore
from agentbench_kv.run import trial as deadline_module
from agentbench_kv.run.trial import Deadline

Play = Callable[..., dict[str, TrialRecord]]
UseEngine = Callable[..., list[ScriptedEngine]]
Ask = Callable[..., httpx.Response]
HELLO = [{"role": "user", "content": "hello"}]
# Only a broken test waits so long.
LONG = 30
ONE = ("x-0",)


class HandTimer(threading.Timer):
    """A timer whose time is up when the test says so."""

    made: list[HandTimer]

    def __init__(self, seconds: float, function: Callable[[], None]) -> None:
        super().__init__(seconds, function)
        self.up = threading.Event()
        self.made.append(self)

    def run(self) -> None:
        self.up.wait(LONG)
        if not self.finished.is_set():
            self.function()

    def cancel(self) -> None:
        super().cancel()
        self.up.set()

    def strike(self) -> None:
        """Let the time be up, and everything that follows from it be done."""
        self.up.set()
        self.join(LONG)


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HandTimer]]:
    """List the timers that deadlines make; no one may be left running."""
    HandTimer.made = []
    monkeypatch.setattr(deadline_module, "Timer", HandTimer)
    yield HandTimer.made
    assert not [timer for timer in HandTimer.made if timer.is_alive()]


class EndlessGeneration(Generation):
    """Says one word of a text, then nothing until it is cancelled."""

    def __init__(self, inner: Generation, speaking: Callable[[], None]) -> None:
        self._inner = inner
        self._speaking = speaking
        self._cancelled = threading.Event()

    def __iter__(self) -> Iterator[int]:
        words = iter(self._inner)
        yield next(words)
        self._speaking()
        if not self._cancelled.wait(LONG):
            raise RuntimeError("nobody cancelled the generation")
        self.finish_reason = FinishReason.CANCELLED

    def cancel(self) -> None:
        self._cancelled.set()


class EndlessEngine(ScriptedEngine):
    """Its generations end only when they are cancelled; the clock strikes while they run."""

    def generate(self, session: str, sampling: Sampling) -> Generation:
        return EndlessGeneration(
            super().generate(session, sampling), lambda: HandTimer.made[-1].up.set()
        )


def assert_timed_out(record: TrialRecord, seconds: str) -> None:
    assert (record.status, record.score) == (TrialStatus.TIMEOUT, None)
    assert record.error == f"the trial took more than {seconds} s"
    assert record.timing == Timing()
    assert record.attempts == 1


def test_a_running_generation_is_ended(
    play: Play, use_engine: UseEngine, timers: list[HandTimer]
) -> None:
    engines, replies = use_engine(EndlessEngine), []

    def behave(_: str, __: int, context: TrialContext) -> Outcome:
        replies.append(context.client.chat(HELLO))
        return Outcome(TrialStatus.SCORED, score=1.0)

    record = play(behave, ids=ONE, timeout_s=2.5)["x-0"]
    assert_timed_out(record, "2.5")
    assert replies == []
    assert record.usage.completion_tokens == 1
    assert [timer.interval for timer in timers] == [2.5]
    assert engines[0].sessions() == []


def test_a_workers_generation_is_ended_and_never_scored(
    play: Play, use_engine: UseEngine, ask: Ask, timers: list[HandTimer], tmp_path: Path
) -> None:
    engines, answers = use_engine(EndlessEngine), []

    def behave(_: str, __: int, context: TrialContext) -> Outcome:
        answers.extend(ask(context).json() for _ in range(2))
        return Outcome(TrialStatus.SCORED, score=1.0, metrics={"right": 1}, transcript=["said"])

    record = play(behave, ids=ONE, endpoint=True)["x-0"]
    assert_timed_out(record, "3600")
    assert record.metrics == {}
    store = RunStore(tmp_path)
    assert store.find(store.names()[0]).transcript(record)["transcript"] == ["said"]
    # The second request did not wait for another clock.
    reasons = [answer["usage"]["kvbench"]["finish_reason"] for answer in answers]
    assert reasons == ["cancelled", "cancelled"]
    assert len(timers) == 1
    assert engines[0].sessions() == []


def test_what_was_known_when_time_was_up_stays(play: Play, timers: list[HandTimer]) -> None:
    def behave(*_: Any) -> Outcome:
        timers[-1].strike()
        known = {"fact_right": 1, "fact_asked": 4}
        return Outcome(TrialStatus.TIMEOUT, metrics=known, reading=Reading(calls=3, tokens=70))

    record = play(behave, ids=ONE)["x-0"]
    assert_timed_out(record, "3600")
    assert (record.metrics["fact_right"], record.metrics["fact_asked"]) == (1, 4)
    assert (record.metrics["ingest_calls"], record.metrics["ingest_tokens"]) == (3, 70)


@pytest.mark.parametrize("endpoint", [False, True])
def test_time_that_is_up_before_the_first_message(
    play: Play, ask: Ask, timers: list[HandTimer], endpoint: bool
) -> None:
    def behave(_: str, __: int, context: TrialContext) -> Outcome:
        timers[-1].strike()
        if endpoint:
            assert ask(context).json()["usage"]["completion_tokens"] == 0
        else:
            context.client.chat(HELLO)
        return Outcome(TrialStatus.SCORED, score=1.0)

    record = play(behave, ids=ONE, endpoint=endpoint)["x-0"]
    assert_timed_out(record, "3600")
    assert record.usage.requests == endpoint


def test_a_task_that_fails_because_its_time_was_up_timed_out(
    play: Play, timers: list[HandTimer]
) -> None:
    def behave(_: str, __: int, ___: TrialContext) -> Outcome:
        timers[-1].strike()
        raise OSError("the worker was cut off")

    assert_timed_out(play(behave, ids=ONE)["x-0"], "3600")


def test_every_attempt_has_its_own_time(play: Play, timers: list[HandTimer]) -> None:
    def behave(_: str, tries: int, context: TrialContext) -> Outcome:
        if tries == 1:
            raise OSError("once")
        assert context.client.chat(HELLO).content == "hello"
        return Outcome(TrialStatus.SCORED, score=1.0)

    assert play(behave, ids=ONE)["x-0"].attempts == 2
    assert len(timers) == 2


def test_a_session_that_will_not_close_costs_only_its_trial(
    play: Play,
    use_engine: UseEngine,
    ask: Ask,
    timers: list[HandTimer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker gave up on a request that the engine is still busy with: no fault of the agent's."""
    monkeypatch.setattr(gateway_module, "_CLOSE_WAIT_S", 0.01)
    busy, release = threading.Event(), threading.Event()

    class Deaf(ScriptedEngine):
        def extend(self, *args: Any) -> None:
            busy.set()
            release.wait(LONG)
            super().extend(*args)

    use_engine(Deaf)
    asking: list[threading.Thread] = []

    def behave(sample: str, _: int, context: TrialContext) -> Outcome:
        if sample == "x-1":
            release.set()
            asking[0].join(LONG)
            return Outcome(TrialStatus.SCORED, score=1.0)
        asking.append(threading.Thread(target=ask, args=(context,)))
        asking[0].start()
        busy.wait(LONG)
        timers[-1].strike()
        return Outcome(TrialStatus.INFRA_ERROR)

    records = play(behave, ids=("x-0", "x-1"), endpoint=True, concurrency=1)
    assert records["x-0"].status is TrialStatus.ENGINE_ERROR
    assert "did not let go of session" in (records["x-0"].error or "")
    assert records["x-1"].score == 1.0


def test_a_deadline_that_is_kept_calls_nothing() -> None:
    calls: list[str] = []
    with Deadline(1e300, lambda: calls.append("ended")) as deadline:
        deadline.check()
    assert (calls, deadline.passed) == ([], False)
    assert not [t for t in threading.enumerate() if t.name == "kvbench-deadline"]


def test_leaving_waits_for_a_call_that_has_begun(
    timers: list[HandTimer], monkeypatch: pytest.MonkeyPatch
) -> None:
    began, left, calls = threading.Event(), threading.Event(), []

    class Leaving(HandTimer):
        def cancel(self) -> None:
            super().cancel()
            left.set()

    def end() -> None:
        began.set()
        left.wait(LONG)
        calls.append("ended")

    monkeypatch.setattr(deadline_module, "Timer", Leaving)
    with Deadline(1, end) as deadline:
        timers[-1].up.set()
        began.wait(LONG)
        with pytest.raises(TimeoutError, match=r"^the trial took more than 1 s$"):
            deadline.check()
    assert (calls, deadline.passed) == (["ended"], True)


def test_time_that_is_up_just_as_the_block_ends() -> None:
    """Either the time was up and `end` was called once, or neither."""
    for _ in range(300):
        calls: list[str] = []
        with Deadline(0, lambda: calls.append("ended")) as deadline:  # noqa: B023
            pass
        assert len(calls) == deadline.passed
    assert not [t for t in threading.enumerate() if t.name == "kvbench-deadline"]
