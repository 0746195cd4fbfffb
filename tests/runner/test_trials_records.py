"""What a trial is given, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.adapters.base import Fact, Outcome, TrialContext
from agentbench_kv.engines.base import Generation, KVEvent, KVStats, Sampling
from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.results.records import TrialRecord, TrialStatus
from agentbench_kv.results.store import RunDir, RunStore
from agentbench_kv.run import runner
from agentbench_kv.run.spec import RunSpec

SpecOf = Callable[..., RunSpec]
UseEngine = Callable[..., list[ScriptedEngine]]
HELLO = [{"role": "user", "content": "hello"}]


def quiet(*_: Any) -> None:
    """Report no progress."""


def greet(_: str, __: int, context: TrialContext) -> Outcome:
    """Play a trial of one message."""
    context.client.chat(HELLO)
    return Outcome(TrialStatus.SCORED, score=1.0, transcript=["hello"])


def test_trials_get_the_sampling_of_the_run_and_a_seed_of_their_own(
    told: Callable[..., Any], spec: SpecOf, use_engine: UseEngine, tmp_path: Path
) -> None:
    contexts: list[TrialContext] = []
    samplings: dict[str, Sampling] = {}

    class Watched(ScriptedEngine):
        def generate(self, session: str, sampling: Sampling) -> Generation:
            samplings[session] = sampling
            return super().generate(session, sampling)

    def behave(sample: str, tries: int, context: TrialContext) -> Outcome:
        contexts.append(context)
        return greet(sample, tries, context)

    told(behave, ids=("x-0", "x-1"))
    use_engine(Watched)
    one = spec(trials=2, concurrency=1, temperature=0.7, max_tokens=9, timeout_s=77.0)
    runner.run_one(one, tmp_path, quiet)
    assert [c.seed for c in contexts] == [
        one.trial_seed(sample, trial) for trial in (0, 1) for sample in ("x-0", "x-1")
    ]
    assert [c.trial for c in contexts] == [0, 0, 1, 1]
    for context in contexts:
        assert (context.temperature, context.max_tokens, context.timeout_s) == (0.7, 9, 77.0)
        sampling = samplings[context.session]
        assert (sampling.temperature, sampling.max_tokens) == (0.7, 9)
    assert len({sampling.seed for sampling in samplings.values()}) == 4


def test_every_attempt_has_its_own_session(
    told: Callable[..., Any], spec: SpecOf, tmp_path: Path
) -> None:
    sessions: list[str] = []

    def behave(sample: str, tries: int, context: TrialContext) -> Outcome:
        sessions.append(context.session)
        if tries < 3:
            context.client.chat(HELLO)
            raise OSError("the worker died")
        return greet(sample, tries, context)

    told(behave, ids=("x-0",))
    one = spec()
    runner.run_one(one, tmp_path, quiet)
    assert sessions == [f"{one.id}|0|{attempt}|x-0" for attempt in (1, 2, 3)]
    run = RunStore(tmp_path).find(one.id)
    assert [record.status for record in run.trial_lines().records] == [
        "infra_error", "infra_error", "scored"
    ]  # fmt: skip
    assert [turn.turn for turn in run.turn_lines().records] == [0, 0, 0]


def test_a_trial_leaves_transcript_events_and_figures(
    told: Callable[..., Any], spec: SpecOf, use_engine: UseEngine, tmp_path: Path
) -> None:
    event = KVEvent(decoded=3, logical=9, live_before=9, live_after=4, rows_moved=2)

    class Evicting(ScriptedEngine):
        def close(self, session: str) -> KVStats:
            stats = super().close(session)
            stats.events.append(event)
            return stats

    def remember(sample: str, tries: int, context: TrialContext) -> Outcome:
        fact = Fact(text="w-1", source="tool", kind="one_shot", right=True)
        return replace(greet(sample, tries, context), facts=(fact,))

    told(remember, ids=("x-0",))
    use_engine(Evicting)
    one = spec()
    runner.run_one(one, tmp_path, quiet)
    run = RunStore(tmp_path).find(one.id)
    (record,) = run.trials()
    document = run.transcript(record)
    assert all(token.isdecimal() for token in document.pop("generated")[0].split())
    assert document == {
        "transcript": ["hello"],
        "error": None,
        "events": [
            {"decoded": 3, "logical": 9, "live_before": 9, "live_after": 4, "rows_moved": 2}
        ],
        "facts": [{"text": "w-1", "source": "tool", "kind": "one_shot", "right": True}],
    }
    assert record.kv.events == 1
    assert record.timing.e2e_s
    assert record.seed == one.trial_seed("x-0", 0)


def test_a_failed_trial_leaves_its_error(
    told: Callable[..., Any], spec: SpecOf, tmp_path: Path
) -> None:
    told(lambda *_: Outcome(TrialStatus.TURN_LIMIT, error="too many turns"), ids=("x-0",))
    one = spec()
    runner.run_one(one, tmp_path, quiet)
    run = RunStore(tmp_path).find(one.id)
    assert run.transcript(run.trials()[0])["error"] == "too many turns"


def test_turns_are_on_the_disk_before_the_trial_that_vouches_for_them(
    told: Callable[..., Any], spec: SpecOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[int] = []
    append = RunDir.append_trial

    def watched(run: RunDir, record: TrialRecord) -> None:
        turns.append(len(run.turns()))
        append(run, record)

    monkeypatch.setattr(RunDir, "append_trial", watched)
    told(greet, ids=("x-0",))
    runner.run_one(spec(), tmp_path, quiet)
    assert turns == [1]
