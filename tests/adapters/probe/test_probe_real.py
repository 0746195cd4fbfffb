"""Questions asked of many methods beside one full cache, against the task's own runs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner

from agentbench_kv.adapters.probe.session import ChatSession
from agentbench_kv.cli import kvbench

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import real_probes
import real_sessions

METHODS = ("agentkv", "streamingllm")


def call(number: int, name: str) -> dict[str, object]:
    function = {"name": "find", "arguments": json.dumps({"name": name})}
    calls = [{"id": f"c{number}", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def session() -> dict[str, object]:
    tool = {"name": "find", "parameters": {"type": "object", "properties": {}}}
    messages = [
        {"role": "user", "content": "Find Anna's folder, whose code is 7731-A."},
        call(1, "Anna"),
        {"role": "tool", "tool_call_id": "c1", "content": json.dumps({"folder": "x82-q1"})},
        {"role": "assistant", "content": "It is x82-q1."},
        {"role": "user", "content": "And Bertil's?"},
        call(2, "Bertil"),
        {"role": "tool", "tool_call_id": "c2", "content": json.dumps({"folder": "zz90-b"})},
        {"role": "assistant", "content": "It is zz90-b."},
    ]
    return {"id": "s", "messages": messages, "tools": [{"type": "function", "function": tool}]}


def by_task(file: Path, out: Path, floor: str, methods: tuple[str, ...]) -> list[dict[int, str]]:
    """Return what `kvbench run --task probe/file` was answered, by question."""
    command = ["run", "--task", "probe/file", "--set", f"file={file}", "--set", "questions=4"]
    command += ["--set", "answer_tokens=8", "--set", f"floor={floor}", "--dtype", "bfloat16"]
    command += ["--budget", "64"] if floor == "off" else []
    command += ["--set", "trigger=prefill+every"] if floor == "off" else []
    found = []
    for method in methods:
        folder = out / f"{method}-{floor}"
        told = CliRunner().invoke(kvbench, [*command, "--method", method, "--out", str(folder)])
        assert told.exit_code == 0, told.output
        (transcript,) = folder.glob("*/transcripts/*.json")
        asked = json.loads(transcript.read_text())["transcript"]["probes"]
        found.append({each["rank"]: each["answer"] for each in asked})
    return found


def test_answers_are_those_of_the_task(tmp_path: Path, monkeypatch) -> None:
    file, out = tmp_path / "s.jsonl", tmp_path / "out.jsonl"
    file.write_text(json.dumps(session()) + "\n")
    command = [str(file), "--model", "micro", "--budget", "64", "--set", "trigger=prefill+every"]
    command += ["--answer-tokens", "8", "--out", str(out)]
    command += [part for method in METHODS for part in ("--method", method)]
    monkeypatch.setattr(sys, "argv", ["real_probes.py", *command])
    real_probes.main()
    real_probes.main()  # nothing is asked twice
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    told = {row["method"]: {each[0]: each[-1] for each in row["asked"]} for row in rows}
    assert len(rows) == len(told) == 5
    assert all(row["events"] for row in rows if row["method"] in METHODS)

    full, *others = by_task(file, tmp_path, "off", ("full", *METHODS))
    assert told["full"] == full
    assert [told[method] for method in METHODS] == others
    assert len(full) == 4
    assert [told["full:none"]] == by_task(file, tmp_path, "none", ("full",))
    (removed,) = by_task(file, tmp_path, "removed", ("full",))
    assert told["full:removed"] == {at: removed[at] for at in told["full:removed"]}
    assert told["full:removed"]


def test_sessions_end_with_an_answer_of_the_agent(tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl"
    file.write_text(json.dumps(session()) + "\n")
    (read,) = real_probes.read_sessions(file)
    cut = real_sessions.first_answers(read, 3)
    assert [message["role"] for message in cut.messages][-1] == "assistant"
    assert len(cut.answers) == 3
    assert real_sessions.first_answers(read, None) == read
    assert real_sessions.first_answers(read, 9) == read


def test_sessions_of_several_tasks_come_by_turns_under_their_names() -> None:
    one = ChatSession("1", ({"role": "user", "content": "Hello."},), ())
    found = {"probe/x/air": [one, replace(one, id="2")], "probe/x/shop": [one]}
    assert [each.id for each in real_sessions.by_turns(found)] == ["air/1", "shop/1", "air/2"]
    assert [each.id for each in real_sessions.by_turns({"probe/x/air": [one]})] == ["1"]
