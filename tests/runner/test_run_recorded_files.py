"""Trajectories of any agent as sessions: `kvbench fidelity --from FILE.jsonl`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentbench_kv.cli import kvbench
from agentbench_kv.errors import KVBenchError
from agentbench_kv.methods.base import Phase
from agentbench_kv.phases.tokens import TokenCodec, load_tokenizer
from agentbench_kv.run.recordings import record_file

FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Find a thing.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
CALL = {"id": "c1", "type": "function",
        "function": {"name": "find", "arguments": '{"key": "box seven"}'}}  # fmt: skip
SESSION: dict[str, Any] = {
    "id": "a",
    "cluster": "boxes",
    "tools": [FIND],
    "messages": [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": "Find the code of box seven."},
        {"role": "assistant", "content": "", "reasoning_content": "I look it up.",
         "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": '{"code": "K-4471"}'},
        {"role": "assistant", "content": "It is K-4471."},
        {"role": "user", "content": "Thanks."},
        {"role": "assistant", "content": "You are welcome."},
    ],
}  # fmt: skip
SHORT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def test_answers_are_those_of_the_file_with_their_phases(tmp_path: Path) -> None:
    first, second = record_file(write(tmp_path / "t.jsonl", SESSION, SHORT), "micro")
    codec = TokenCodec(load_tokenizer(Path("agentbench_kv/models/micro").resolve()))

    def said(turn: Any, phase: Phase | None = None) -> str:
        return codec.decode([token for token, own in turn.answer if phase in (None, own)])

    assert [len(recording.turns) for recording in (first, second)] == [3, 1]
    call, told, thanked = first.turns
    assert "I look it up." in said(call, Phase.THINK)
    assert '{"name": "find", "arguments": {"key": "box seven"}}' in said(call, Phase.ACT)
    assert said(told).startswith("It is K-4471.")
    assert said(thanked).startswith("You are welcome.")
    assert all(said(turn).endswith("<|im_end|>") for turn in first.turns)
    result = [token for token, phase in told.prompt if phase is Phase.TOOL]
    assert "K-4471" in codec.decode(result)
    assert "value" in call.kinds
    assert (first.sample, first.cluster, second.cluster) == ("a", "boxes", None)
    whole = codec.decode([token for turn in first.turns for part in (turn.prompt, turn.answer)
                          for token, _ in part])  # fmt: skip
    assert whole.count("Find a thing.") == 1


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["{"], "line 1"),
        (["[]"], "line 1"),
        ([SHORT, {"messages": []}], "line 2: expected an object with a list `messages`"),
        ([{"messages": [{"role": "robot", "content": "x"}]}], "no role among"),
        ([{"messages": [{"role": "user", "content": "x"}]}], "no session with an answer"),
        ([{"messages": [{"role": "assistant", "content": "x"}]}], "no session with an answer"),
        ([SESSION, SESSION], "the same `id`"),
        ([""], "no session with an answer"),
    ],
)
def test_what_is_no_trajectory_is_said_in_one_line(
    tmp_path: Path, rows: list[Any], said: str
) -> None:
    with pytest.raises(KVBenchError) as caught:
        record_file(write(tmp_path / "t.jsonl", *rows), "micro")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_plays_a_file_and_goes_on_with_it(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", SESSION, SHORT)
    words = ["fidelity", "--from", str(file), "--method", "random", "--budget", "64",
             "--set", "interval=8", "--out", str(tmp_path / "runs")]  # fmt: skip
    done = CliRunner().invoke(kvbench, words, catch_exceptions=False)
    assert "fidelity/file/mine" in done.stdout
    assert "1/2 sessions" in done.stderr
    again = CliRunner().invoke(kvbench, words, catch_exceptions=False)
    assert (again.stdout, again.stderr) == (done.stdout, "")
    # Another session of that name is not mixed into the run.
    changed = {**SESSION, "messages": [*SESSION["messages"][:-1], {"role": "assistant",
               "content": "Gladly."}]}  # fmt: skip
    write(file, changed, SHORT)
    with pytest.raises(KVBenchError, match="holds another session"):
        CliRunner().invoke(kvbench, words, catch_exceptions=False)
