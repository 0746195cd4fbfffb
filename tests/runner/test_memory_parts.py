"""What a memory of plain text is told of a past session."""

from __future__ import annotations

from typing import Any

import pytest

from agentbench_kv.adapters.base import Message, PastSession
from agentbench_kv.adapters.micro.memory import _told, asked, evidence_of, past_sessions
from agentbench_kv.memories.store import parts
from agentbench_kv.registry import load_task

SYSTEM: Message = {"role": "system", "content": "rules"}


def call(name: str) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": '{"n": 1}'}}


def all_told(past: PastSession, size: int = 1) -> dict[int, str]:
    """Return the text in which each message was told."""
    found: dict[int, str] = {}
    for messages, numbers in parts(past, size):
        assert all(each["role"] in ("user", "assistant") for each in messages)
        found |= dict.fromkeys(numbers, "\n".join(each["content"] for each in messages))
    return found


def test_calls_thoughts_and_results_are_told() -> None:
    calls = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": []}
    messages = [
        SYSTEM,
        {"role": "user", "content": "hello"},
        {**calls, "tool_calls": [call("one"), call("two")]},
        {"role": "tool", "tool_call_id": "c", "content": "a result"},
        {"role": "assistant", "content": " "},
        {"role": "assistant", "content": "done "},
    ]
    told = all_told(PastSession(messages, [None, 1, 2, 3, 4, 5]))
    assert told[1] == "hello"
    assert all(text in told[2] for text in ("hm", '"one"', '"two"', '{"n": 1}'))
    assert "a result" in told[3]
    assert told[5] == "done "
    assert sorted(told) == [1, 2, 3, 5]  # of the blank one nothing came to anybody


@pytest.mark.parametrize("size", [0, 1, 2, 3])
def test_parts_are_as_long_as_asked_for(size: int) -> None:
    said = [{"role": "user", "content": str(number)} for number in range(5)]
    found = list(parts(PastSession(said, list(range(5))), size))
    assert [number for _, numbers in found for number in numbers] == list(range(5))
    assert {len(numbers) for _, numbers in found[:-1]} <= {size}
    assert list(parts(PastSession([SYSTEM], [None]), size)) == []


def test_all_evidence_of_micro_memory_is_told() -> None:
    task = load_task("micro/memory").create({})
    for sample in task.samples(3, 0):
        episode = task._episode(sample)  # type: ignore[attr-defined]
        told: dict[int, str] = {}
        for session in past_sessions(episode):
            told |= all_told(_told({"role": "system", "content": episode.system}, session))
        for each in asked(episode).calls:
            handles = [slot.handle for slot in each.slots]
            for number in evidence_of(episode, each):
                assert any(handle in told[number] for handle in handles)
