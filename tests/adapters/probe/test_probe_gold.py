"""Golden sessions: what the worker's requests and a task's script come to as messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.adapters.agent_client import AgentConnection, call_text, think_block
from agentbench_kv.adapters.base import Outcome, Sample, ScriptedAgent, Task, TrialContext
from agentbench_kv.adapters.probe.gold import GoldSessions, gold_session, said_in
from agentbench_kv.adapters.probe.session import tool_uses
from agentbench_kv.adapters.probe.task import ProbeBfcl, ProbeRetail
from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.results.records import TrialStatus

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


class Benchmark(Task):
    """Greets, is called once or more, and leaves thoughts out of what it sends back."""

    name = "test/gold"
    summary = "for tests"
    status = TrialStatus.SCORED
    played = 0

    def samples(self, limit: int | None, seed: int) -> list[Sample]:
        del seed
        return [Sample("a", "group")][:limit]

    def script(self, sample: Sample, agent: ScriptedAgent) -> list[str]:
        del sample, agent
        look = think_block("The next step is look.") + call_text("look", {"key": "<#7>"})
        return [look, "All done."]

    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:
        del sample
        Benchmark.played += 1
        line = AgentConnection(str(context.endpoint), context.session, {}, None, 10.0)
        messages: list[dict[str, Any]] = [
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": "What is #7?"},
        ]
        while calls := (said := line.chat(messages, TOOLS).said).get("tool_calls"):
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": '{"price": 5.5}'}
            messages.append(result)
        assert said["content"] == "All done."
        return Outcome(self.status, 1.0 if self.status is TrialStatus.SCORED else None)


def test_a_session_is_what_was_sent_and_answered() -> None:
    session = gold_session(Benchmark(), Sample("a", "group"))
    assert session is not None
    assert [message["role"] for message in session.messages] == [
        *("assistant", "user", "assistant", "tool", "assistant"),
    ]
    assert session.messages[2]["reasoning_content"] == "The next step is look."
    (use,) = tool_uses(session.messages)
    assert (use.name, use.arguments, use.message, use.result) == ("look", {"key": "<#7>"}, 2, 3)
    assert session.answers == [2, 4]  # not the greeting
    assert (session.tools, session.cluster) == (tuple(TOOLS), "group")


def test_a_session_is_known_by_all_that_is_in_it() -> None:
    session = gold_session(Benchmark(), Sample("a", "group"))
    assert session is not None
    longer = replace(session, messages=(*session.messages, {"role": "user", "content": "More?"}))
    other = [longer, replace(session, tools=()), replace(session, messages=session.messages[1:])]
    assert len({session.sha, *(each.sha for each in other)}) == 4
    assert replace(session, id="b", cluster=None).sha == session.sha


def test_what_does_not_come_to_its_end_is_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Benchmark, "status", TrialStatus.TURN_LIMIT)
    assert gold_session(Benchmark(), Sample("a")) is None


def test_sessions_are_kept_and_heal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path))
    monkeypatch.setattr(Benchmark, "played", 0)
    kept = GoldSessions(Benchmark())
    first = kept.of(Sample("a", "group"))
    assert GoldSessions(Benchmark()).of(Sample("a", "group")) == first
    assert Benchmark.played == 1
    (file,) = (tmp_path / "gold").rglob("*.jsonl")
    for damage in (file.read_text()[:-40], "[]\n", '{"messages": 7}\n', ""):
        file.write_text(damage)
        assert kept.of(Sample("a", "group")) == first
    assert Benchmark.played == 5
    monkeypatch.setattr(Benchmark, "provenance", lambda _: {"data": "other"})
    GoldSessions(Benchmark()).of(Sample("a"))
    assert Benchmark.played == 6


@pytest.mark.parametrize(
    ("status", "again"), [(TrialStatus.TURN_LIMIT, False), (TrialStatus.INFRA_ERROR, True)]
)
def test_only_an_end_that_would_come_again_is_kept(
    status: TrialStatus, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path))
    monkeypatch.setattr(Benchmark, "status", status)
    assert GoldSessions(Benchmark()).of(Sample("a")) is None
    monkeypatch.setattr(Benchmark, "status", TrialStatus.SCORED)
    assert (GoldSessions(Benchmark()).of(Sample("a")) is not None) == again


@pytest.mark.parametrize(
    ("text", "thoughts", "content", "calls"),
    [
        ("All done.", None, "All done.", 0),
        (think_block("Hm.") + "Yes.", "Hm.", "Yes.", 0),
        (f"First {call_text('a', {})}\n{call_text('b', {'x': 1})}", None, "First", 2),
    ],
)
def test_a_text_is_taken_apart(text: str, thoughts: str | None, content: str, calls: int) -> None:
    said = said_in(text, 3)
    assert (said.get("reasoning_content"), said["content"]) == (thoughts, content)
    written = said.get("tool_calls", [])
    assert len(written) == len({call["id"] for call in written}) == calls
    assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in written)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "environment"), [(ProbeBfcl, "bfcl"), (ProbeRetail, "tau2")])
def test_real_sessions_yield_questions(task: Callable[[], Any], environment: str) -> None:
    probes = task()
    try:
        python_of(environment)
        samples = probes.samples(2, 0)
    except PrerequisiteError as error:
        pytest.skip(str(error))
    finally:
        probes.close()
    assert len(samples) == 2
    for sample in samples:
        session, chosen = probes._chosen[sample.id]
        assert 1 <= len(chosen) <= 8
        assert all(probe.value not in probe.question for probe in chosen)
        text = json.dumps(session.messages, ensure_ascii=False)
        assert all(probe.value in text for probe in chosen)
