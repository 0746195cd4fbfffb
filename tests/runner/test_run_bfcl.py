"""BFCL through the runner: worker, server, sessions and records together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agentbench_kv.adapters.base import Sample, ScriptedAgent
from agentbench_kv.adapters.bfcl.task import MultiTurnBase
from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.results.records import TrialRecord, TrialStatus
from agentbench_kv.results.store import RunStore
from agentbench_kv.run import runner
from agentbench_kv.run.spec import RunSpec

pytestmark = pytest.mark.engine

PlayBfcl = Callable[..., list[TrialRecord]]


@pytest.fixture
def play_bfcl(spec: Callable[..., RunSpec], tmp_path: Path) -> PlayBfcl:
    try:
        python_of("bfcl")
    except PrerequisiteError:
        pytest.skip("bfcl environment absent: kvbench env create bfcl")

    def run(**changes: object) -> list[TrialRecord]:
        one = spec(**{"task": "bfcl/multi_turn_base", "limit": 3, **changes})
        runner.run_one(one, tmp_path, lambda *_: None)
        return RunStore(tmp_path).find(one.id).trials()

    return run


def test_the_gold_agent_wins_and_its_sessions_are_accounted_for(
    play_bfcl: PlayBfcl,
) -> None:
    records = play_bfcl()
    assert [record.score for record in records] == [1.0] * 3
    for record in records:
        assert record.usage.requests == record.metrics["steps"]
        assert record.session_resets == 0
        assert record.kv.logical > 1000


@pytest.mark.parametrize(("room", "asked"), [(20, 1), (60, 2)], ids=["answer", "prompt"])
def test_a_conversation_past_the_context_is_context_limit(
    play_bfcl: PlayBfcl, use_engine: Callable[..., list[ScriptedEngine]], room: int, asked: int
) -> None:
    (whole,) = play_bfcl(limit=1)
    first_prompt = whole.metrics["first_prompt_tokens"]
    assert isinstance(first_prompt, int)
    # The first answer has about 50 tokens.
    use_engine(ScriptedEngine, context_limit=first_prompt + room)
    (record,) = play_bfcl(limit=1, seed=1)
    assert (record.status, record.score) == (TrialStatus.CONTEXT_LIMIT, None)
    assert (record.attempts, record.usage.requests) == (1, asked)


def test_a_conversation_without_time_is_a_timeout(
    play_bfcl: PlayBfcl,
) -> None:
    for record in play_bfcl(timeout_s=1e-6):
        assert (record.status, record.attempts) == (TrialStatus.TIMEOUT, 1)


def test_the_raw_route_refuses_what_it_cannot_write(play_bfcl: PlayBfcl) -> None:
    with pytest.raises(UsageError, match="calls of the glm syntax; use --set route=chat"):
        play_bfcl(limit=1, tool_syntax="glm")


def test_the_raw_route_explains_and_reads_json(
    play_bfcl: PlayBfcl, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = MultiTurnBase.script

    def fenced(self: MultiTurnBase, sample: Sample, agent: ScriptedAgent) -> list[str]:
        texts = script(self, sample, agent)
        blocks = [text.replace("<tool_call>", "```json") for text in texts]
        return [text.replace("</tool_call>", "```") for text in blocks]

    monkeypatch.setattr(MultiTurnBase, "script", fenced)
    records = play_bfcl(limit=2, tool_syntax="json")
    assert [record.score for record in records] == [1.0] * 2
    missed = play_bfcl(limit=2)
    assert [record.score for record in missed] == [0.0] * 2
    assert {record.metrics["other_syntax"] for record in missed} == {"json"}
