"""How runs end before they are done: what is cancelled, recorded, told, and played again."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from agentbench_kv.adapters.base import Outcome, Task, TrialContext
from agentbench_kv.cli.output import show_lost
from agentbench_kv.engines.base import FinishReason, Generation, KVStats, Sampling
from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.errors import (
    EngineGoneError,
    KVBenchError,
    MemoryLostError,
    PrerequisiteError,
    SessionFailedError,
    UsageError,
)
from agentbench_kv.results.records import TrialRecord, TrialStatus
from agentbench_kv.results.run_info import RunStatus
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.store import RunStore
from agentbench_kv.results.summary import build
from agentbench_kv.run import runner
from agentbench_kv.run.spec import RunSpec

Told = Callable[..., Task]
UseEngine = Callable[..., list[ScriptedEngine]]
SpecOf = Callable[..., RunSpec]
Ask = Callable[..., httpx.Response]
HELLO = [{"role": "user", "content": "hello"}]
LONG = 30


def quiet(*_: Any) -> None:
    pass


def scored(*_: Any) -> Outcome:
    return Outcome(TrialStatus.SCORED, score=1.0)


def contents(run: RunReader) -> tuple[list[tuple[str, str]], set[str], set[str]]:
    """Return what a run's files say: records, samples with turns, transcripts."""
    lines = [(r.sample_id, r.status.value) for r in run.trial_lines().records]
    turns = {turn.sample_id for turn in run.turn_lines().records}
    return lines, turns, {path.name[:3] for path in run.path.glob("transcripts/*")}


class SlowGeneration(Generation):
    """Says what it has to, then nothing until it is cancelled."""

    def __init__(self, inner: Generation, engine: SlowEngine) -> None:
        self._inner, self._engine = inner, engine
        self._cancelled = threading.Event()

    def __iter__(self) -> Iterator[int]:
        yield from self._inner
        self._engine.speaking.release()
        if not self._cancelled.wait(LONG):
            raise AssertionError("nobody cancelled the generation")
        self.finish_reason = FinishReason.CANCELLED

    def cancel(self) -> None:
        self._cancelled.set()


class SlowEngine(ScriptedEngine):
    """Sessions of samples from `x-1` on only end when they are cancelled."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.speaking = threading.Semaphore(0)
        self.stopped = False

    def generate(self, session: str, sampling: Sampling) -> Generation:
        inner = super().generate(session, sampling)
        return inner if session.endswith("x-0") else SlowGeneration(inner, self)

    def shutdown(self) -> None:
        self.stopped = True


@pytest.mark.parametrize("endpoint", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, UsageError])
def test_what_ends_a_run_cancels_what_is_under_way_and_keeps_nothing_of_it(
    told: Told,
    spec: SpecOf,
    use_engine: UseEngine,
    ask: Ask,
    tmp_path: Path,
    endpoint: bool,
    error: type[BaseException],
) -> None:
    engines, ended = use_engine(SlowEngine), []

    def behave(sample: str, _: int, context: TrialContext) -> Outcome:
        try:
            if endpoint:
                ask(context).raise_for_status()
            else:
                context.client.chat(HELLO)
        finally:
            ended.append(sample)
        return scored()

    def end(_: RunSpec, __: int, ___: int, record: TrialRecord | None) -> None:
        if record is not None:
            for _ in range(3):  # all others are in the middle of their answers
                assert engines[0].speaking.acquire(timeout=LONG)
            raise error("enough")

    told(behave, endpoint=endpoint)
    one = spec(limit=None, concurrency=4)
    with pytest.raises(error):
        runner.run_one(one, tmp_path, end)
    assert sorted(ended) == ["x-0", "x-1", "x-2", "x-3"]
    assert engines[0].stopped
    assert engines[0].sessions() == []
    run = RunStore(tmp_path).find(one.id)
    assert contents(run) == ([("x-0", "scored")], {"x-0"}, {"x-0"})
    assert run.interrupted == (error is KeyboardInterrupt)
    assert (run.info.status is RunStatus.FAILED) == (error is not KeyboardInterrupt)
    assert build(run).validity.state == "incomplete"
    use_engine(ScriptedEngine)
    summary = runner.run_one(one, tmp_path, quiet)
    assert summary.validity.state == "valid"
    assert sorted(contents(run)[0]) == [(f"x-{i}", "scored") for i in range(4)]
    assert {record.attempts for record in run.trials()} == {1}


def test_a_trial_that_cannot_be_cancelled_records_nothing_when_it_ends_at_last(
    told: Told, spec: SpecOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_STOP_S", 0.01)
    begun, go_on, left = threading.Event(), threading.Event(), threading.Event()

    def behave(sample: str, *_: Any) -> Outcome:
        if sample == "x-0":
            assert begun.wait(LONG)
            raise PrerequisiteError("enough")
        begun.set()
        assert go_on.wait(LONG)
        left.set()
        return scored()

    told(behave, ids=("x-0", "x-1"))
    one = spec(limit=None, concurrency=2)
    with pytest.raises(PrerequisiteError):
        runner.run_one(one, tmp_path, quiet)
    late = [each for each in threading.enumerate() if each.name == "kvbench-trial"]
    assert len(late) == 1
    assert late[0].daemon
    go_on.set()
    late[0].join(LONG)
    assert left.is_set()
    assert contents(RunStore(tmp_path).find(one.id)) == ([], set(), set())


def test_nothing_is_recorded_in_a_run_that_is_closed(tmp_path: Path, spec: SpecOf) -> None:
    run = RunStore(tmp_path).open("a", spec().document(), {}, 1)
    record = TrialRecord(sample_id="x", trial=0, seed=0, status=TrialStatus.TIMEOUT)
    run.append_trial(record)
    run.close()
    for write in (
        lambda: run.append_trial(record),
        lambda: run.append_turns([]),
        lambda: run.save_transcript("y", 0, {}),
    ):
        with pytest.raises(UsageError, match="closed"):
            write()
    assert contents(run) == ([("x", "timeout")], set(), set())


class DyingEngine(ScriptedEngine):
    """Is gone from sample `x-1` on."""

    def generate(self, session: str, sampling: Sampling) -> Generation:
        if not session.endswith("x-0"):
            raise EngineGoneError("the engine died of a broken heart")
        return super().generate(session, sampling)


@pytest.mark.parametrize("endpoint", [False, True])
def test_an_engine_that_is_gone_ends_the_run_and_is_nobodys_failure(
    told: Told, spec: SpecOf, use_engine: UseEngine, ask: Ask, tmp_path: Path, endpoint: bool
) -> None:
    use_engine(DyingEngine)

    def behave(_: str, __: int, context: TrialContext) -> Outcome:
        if endpoint and ask(context).status_code != 200:
            return Outcome(TrialStatus.ENGINE_ERROR, error="HTTP 500")
        if not endpoint:
            context.client.chat(HELLO)
        return scored()

    told(behave, endpoint=endpoint)
    one = spec(limit=None, concurrency=1)
    with pytest.raises(EngineGoneError, match="broken heart") as caught:
        runner.run_one(one, tmp_path, quiet)
    assert caught.value.exit_code == 1
    run = RunStore(tmp_path).find(one.id)
    assert [(r.sample_id, r.status.value) for r in run.trials()] == [("x-0", "scored")]
    assert run.info.status is RunStatus.FAILED
    assert "broken heart" in (run.info.error or "")
    use_engine(ScriptedEngine)
    assert runner.run_one(one, tmp_path, quiet).validity.state == "valid"


def test_what_an_engine_failed_at_is_lost_and_played_again(
    told: Told, spec: SpecOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def behave(sample: str, *_: Any) -> Outcome:
        if sample == "x-0":
            return scored()
        if sample == "x-1":
            raise KVBenchError("refused")
        error = SessionFailedError("session failed: ZeroDivisionError: in a method")
        raise error from ZeroDivisionError("in a method\nmore of it")

    told(behave, ids=("x-0", "x-1", "x-2"))
    one = spec(limit=None, concurrency=1)
    summary = runner.run_one(one, tmp_path, quiet)
    assert summary.failures == {"engine_error": 2}
    assert (summary.lost, summary.validity.state) == (2, "incomplete")
    records = {r.sample_id: r for r in RunStore(tmp_path).find(one.id).trials()}
    assert [records[f"x-{i}"].attempts for i in range(3)] == [1, 1, 1]
    assert records["x-1"].error == "refused"
    assert (records["x-2"].error or "").splitlines()[0].endswith("ZeroDivisionError: in a method")
    assert show_lost([summary], tmp_path) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"2 of 3 trials of {one.id} were lost" in said
    assert "ZeroDivisionError: in a method; the same command tries them again" in said
    told(scored, ids=("x-0", "x-1", "x-2"))
    mended = runner.run_one(one, tmp_path, quiet)
    assert (mended.score.point if mended.score else None, mended.validity.state) == (1.0, "valid")
    assert show_lost([mended], tmp_path) == 0


def test_a_memory_that_is_lost_is_told_again_in_the_same_command(
    told: Told, spec: SpecOf, tmp_path: Path
) -> None:
    tries: list[str] = []

    def behave(sample: str, *_: Any) -> Outcome:
        tries.append(sample)
        if len(tries) == 1:
            raise MemoryLostError("the backend that had memory bank b is gone")
        return scored()

    told(behave, ids=("x-0",))
    one = spec(limit=None)
    assert runner.run_one(one, tmp_path, quiet).validity.state == "valid"
    (record,) = RunStore(tmp_path).find(one.id).trials()
    assert (record.status, record.attempts) == (TrialStatus.SCORED, 2)


def test_a_session_without_an_account_is_lost(
    told: Told, spec: SpecOf, use_engine: UseEngine, tmp_path: Path
) -> None:
    class Forgetful(ScriptedEngine):
        def close(self, session: str) -> KVStats:
            super().close(session)
            if session.endswith("x-1"):
                raise KVBenchError("who was that?")
            return KVStats()

    use_engine(Forgetful)

    def behave(_: str, __: int, context: TrialContext) -> Outcome:
        context.client.chat(HELLO)
        return scored()

    told(behave, ids=("x-0", "x-1", "x-2"))
    one = spec(limit=None)
    runner.run_one(one, tmp_path, quiet)
    statuses = {r.sample_id: (r.status, r.error) for r in RunStore(tmp_path).find(one.id).trials()}
    assert statuses["x-1"] == (TrialStatus.ENGINE_ERROR, "who was that?")
    assert statuses["x-0"] == statuses["x-2"] == (TrialStatus.SCORED, None)


class StandingEngine(ScriptedEngine):
    """Stands still in its first session and says so."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked, self.over = threading.Event(), threading.Event()

    def generate(self, session: str, sampling: Sampling) -> Generation:
        self.asked.set()
        self.over.wait(LONG)
        return super().generate(session, sampling)

    def progress(self) -> int | None:
        return 7 if self.asked.is_set() else None

    def shutdown(self) -> None:
        self.over.set()


@pytest.mark.parametrize("what", ["engine", "session"])
def test_a_run_that_hangs_is_ended_with_what_hangs(
    told: Told,
    spec: SpecOf,
    use_engine: UseEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    monkeypatch.setattr(runner, "_LOOK_S", 0.01)
    monkeypatch.setattr(runner, "_STOP_S", 0.01)
    monkeypatch.setenv(runner.HUNG, "0.2")
    if what == "session":  # an engine that does not say
        monkeypatch.setattr(StandingEngine, "progress", lambda _: None)
    use_engine(StandingEngine)

    def behave(_: str, __: int, context: TrialContext) -> Outcome:
        context.client.chat(HELLO)
        return scored()

    told(behave, ids=("x-0",))
    # Time enough to begin on a busy machine: what ends before it has asked does not hang.
    one = spec(limit=None, timeout_s=2.0 if what == "session" else 3600)
    says = {
        "engine": "the run hangs: engine 'scripted' has work and has done nothing for 0.2 s;",
        "session": r"the run hangs: session .*\|x-0 goes on 0.2 s after its time limit;",
    }
    with pytest.raises(EngineGoneError, match=says[what]):
        runner.run_one(one, tmp_path, quiet)
    run = RunStore(tmp_path).find(one.id)
    assert contents(run) == ([], set(), set())
    assert "in generate" in (run.path / runner.THREADS).read_text()
    assert run.info.status is RunStatus.FAILED


def test_slowness_is_no_hanging(
    told: Told,
    spec: SpecOf,
    use_engine: UseEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that moves, or that has nothing to do, is waited for."""
    looks = threading.Semaphore(0)
    numbers = iter([1, 2, 2, 2, None, None, None, None, 2, 2, *range(3, 10**6)])

    class Slow(ScriptedEngine):
        def progress(self) -> int | None:
            looks.release()
            return next(numbers)

    monkeypatch.setattr(runner, "_LOOK_S", 0.01)
    monkeypatch.setenv(runner.HUNG, "0.03")
    use_engine(Slow)

    def behave(*_: Any) -> Outcome:
        for _ in range(15):
            assert looks.acquire(timeout=LONG)
        return scored()

    told(behave, ids=("x-0",))
    one = spec(limit=None)
    assert runner.run_one(one, tmp_path, quiet).validity.state == "valid"


def test_a_prompt_is_said_to_be_read_as_far_as_it_is(
    told: Told,
    spec: SpecOf,
    use_engine: UseEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Reading(StandingEngine):
        def stats(self, session: str) -> KVStats:  # noqa: ARG002
            past = {"live": 700, "evicted": 400, "restored": 100, "decode_tokens": 30}
            return KVStats(logical=9000, **past)

    monkeypatch.setattr(runner, "_LOOK_S", 0.01)
    monkeypatch.setattr(runner, "_STOP_S", 0.01)
    use_engine(Reading)

    def behave(_: str, __: int, context: TrialContext) -> Outcome:
        context.client.chat(HELLO)
        return scored()

    def end(_: RunSpec, __: int, ___: int, said: TrialRecord | str | None) -> None:
        if isinstance(said, str) and not said.startswith("0"):
            raise UsageError(said)

    told(behave, ids=("x-0",))
    with pytest.raises(UsageError, match=r"^1 under way, 970 tokens read, 30 written$"):
        runner.run_one(spec(limit=None), tmp_path, end)


class _Taken:
    """A memory that has taken past sessions in for two of three trials."""

    def taken(self, session: str) -> tuple[int, int]:
        return {"a": (19, 12_000), "b": (1, 345), "d": (0, 80)}.get(session, (0, 0))


@pytest.mark.parametrize(
    ("under_way", "past"),
    [
        ("abc", "; 20 past sessions taken in, 12,345 tokens"),
        ("d", "; 0 past sessions taken in, 80 tokens"),
        ("c", ""),
        ("", ""),
    ],
)
def test_what_is_under_way_tells_how_much_of_a_past_was_taken_in(under_way: str, past: str) -> None:
    class Blind:
        def stats(self, session: str) -> KVStats:
            raise KeyError(session)

    setup: Any = SimpleNamespace(
        deadlines=dict.fromkeys(under_way),
        engine=Blind(),
        gateway=SimpleNamespace(memories=_Taken()),
        spec=SimpleNamespace(concurrency=1),
    )
    said = runner.TrialThreads(setup, cast(Any, None), [])._under_way()
    assert said == f"{len(under_way)} under way, 0 tokens read, 0 written{past}"


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_a_wrong_patience_is_refused(
    told: Told, spec: SpecOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(runner.HUNG, text)
    told(scored)
    with pytest.raises(UsageError, match=f"{runner.HUNG}='{text}': expected seconds above 0"):
        runner.run_one(spec(), tmp_path, quiet)


def test_a_benchmark_that_exits_costs_its_trial_only(
    told: Told, spec: SpecOf, tmp_path: Path
) -> None:
    def behave(sample: str, *_: Any) -> Outcome:
        if sample == "x-1":
            raise SystemExit(0)
        return scored()

    told(behave, ids=("x-0", "x-1"))
    one = spec(limit=None)
    runner.run_one(one, tmp_path, quiet)
    records = {r.sample_id: r.status for r in RunStore(tmp_path).find(one.id).trials()}
    assert records == {"x-0": TrialStatus.SCORED, "x-1": TrialStatus.INFRA_ERROR}
    lines = (RunStore(tmp_path).find(one.id).path / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["attempts"] for line in lines if "x-1" in line] == [1, 2, 3]
