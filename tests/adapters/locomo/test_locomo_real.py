"""LoCoMo's questions asked of many methods beside one full cache, against the task's own runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentbench_kv.adapters.locomo.data import load
from agentbench_kv.cli import kvbench

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import real_locomo


def by_task(out: Path, *more: str) -> list[tuple[int, str, float]]:
    """Return what `kvbench run --task probe/locomo` was answered, with F1, by question."""
    command = ["run", "--task", "probe/locomo", "--set", "check=off", "--limit", "1"]
    command += ["--max-tokens", "24", "--dtype", "bfloat16", *more, "--out", str(out)]
    told = CliRunner().invoke(kvbench, command)
    assert told.exit_code == 0, told.output
    (transcript,) = out.glob("*/transcripts/*.json")
    answers = json.loads(transcript.read_text())["transcript"]["answers"]
    return [(each["index"], each["answer"], round(each["f1"], 4)) for each in answers]


@pytest.mark.usefixtures("folder")
def test_answers_are_those_of_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, trigger = tmp_path / "out.jsonl", "trigger=prefill+every"
    command = ["--model", "micro", "--budget", "64", "--set", trigger, "--answer-tokens", "24"]
    command += ["--method", "agentkv", "--method", "streamingllm", "--limit", "1"]
    monkeypatch.setattr(sys, "argv", ["real_locomo.py", *command, "--out", str(out)])
    monkeypatch.setattr(real_locomo, "load", lambda: load(check=False))
    real_locomo.main()
    real_locomo.main()  # nothing is asked twice
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    told = {row["method"]: [(each[0], each[-1], each[2]) for each in row["asked"]] for row in rows}
    assert len(rows) == len(told) == 4
    assert len(told["full"]) == 5  # all but the adversarial one
    budget = ("--budget", "64", "--set", trigger)
    for method, more in {"full": (), "agentkv": budget, "streamingllm": budget}.items():
        assert told[method] == by_task(tmp_path / method, "--method", method, *more)
    nothing = by_task(tmp_path / "none", "--method", "full", "--set", "context=none")
    assert told["full:none"] == nothing


@pytest.mark.usefixtures("folder")
def test_questions_are_spread_over_a_conversation() -> None:
    dialogue = next(iter(load(check=False).conversations.values()))
    asked = real_locomo.spread(dialogue, 3)
    assert [each.index for each in asked] == [dialogue.questions[at].index for at in (0, 2, 4)]
    assert real_locomo.spread(dialogue, 99) == list(dialogue.questions)
