"""Recorded sessions: which messages are answers, and which are only read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.adapters.probe.session import read_sessions, refuse_repeated
from agentbench_kv.errors import UsageError
from agentbench_kv.run.recordings import record_file

SAID: list[dict[str, Any]] = [
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "First.", "weight": 0},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Second.", "weight": 1},
    {"role": "user", "content": "Three?"},
    {"role": "assistant", "content": "Third."},
]


def wrote(path: Path, messages: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"id": "a", "messages": messages}))
    return path


def test_a_greeting_and_what_has_weight_0_are_read_only(tmp_path: Path) -> None:
    (session,) = read_sessions(wrote(tmp_path / "t.jsonl", SAID))
    assert session.answers == [4, 6]


def test_what_is_read_only_is_part_of_the_next_prompt(tmp_path: Path) -> None:
    without = [{k: v for k, v in message.items() if k != "weight"} for message in SAID]
    (whole,) = record_file(wrote(tmp_path / "w.jsonl", without), "micro")
    (found,) = record_file(wrote(tmp_path / "t.jsonl", SAID), "micro")
    assert (len(whole.turns), len(found.turns)) == (3, 2)
    ids = [
        [token for turn in each.turns for token, _ in (*turn.prompt, *turn.answer)]
        for each in (whole, found)
    ]
    assert ids[0] == ids[1]
    assert found.turns[1] == whole.turns[2]


def test_other_weights_are_refused(tmp_path: Path) -> None:
    wrong = [SAID[1], {**SAID[2], "weight": 0.5}]
    with pytest.raises(UsageError, match=r"line 1: message 1: weight is 0 \(read only\) or 1"):
        list(read_sessions(wrote(tmp_path / "t.jsonl", wrong)))


def several(path: Path, *sessions: dict[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in sessions))
    return path


@pytest.mark.parametrize("first", [len(SAID), 4])
@pytest.mark.parametrize("turned", [False, True])
def test_a_session_and_its_beginning_are_no_two(tmp_path: Path, first: int, turned: bool) -> None:
    """A proxy's log with a line for each request looked like many independent sessions."""
    lines = [{"id": "a", "messages": SAID[:first]}, {"id": "b", "messages": SAID}]
    path = several(tmp_path / "t.jsonl", *(lines[::-1] if turned else lines))
    with pytest.raises(UsageError, match="one is the other or its beginning"):
        refuse_repeated(path, read_sessions(path))
    one = [{**line, "cluster": "c"} for line in lines]
    refuse_repeated(path, read_sessions(several(tmp_path / "c.jsonl", *one)))
    two = [{**line, "cluster": line["id"]} for line in lines]
    with pytest.raises(UsageError, match="one is the other or its beginning"):
        refuse_repeated(path, read_sessions(several(tmp_path / "d.jsonl", *two)))


def test_sessions_that_only_begin_alike_are_two(tmp_path: Path) -> None:
    other = [*SAID[:-1], {"role": "assistant", "content": "Third!"}]
    lines = [{"id": "a", "messages": SAID}, {"id": "b", "messages": other}]
    lines += [{"id": "c", "messages": SAID, "tools": [{"type": "function"}]}]
    path = several(tmp_path / "t.jsonl", *lines)
    refuse_repeated(path, read_sessions(path))
